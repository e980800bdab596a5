"""Choose what to deploy within a budget, from the results of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from ..encode.granularity import Granularity
from ..encode.precisions import FLOAT
from .results import GridResults, mean_over_tasks, rescored_bytes


GIGABYTE = 1e9


@dataclass(frozen=True)
class Budget:
    """
    Limits of a deployment; `None` is no limit.

    Args:
        documents (`int`): Number of vectors in the index.
        memory_gb (`float`, *optional*): Maximum memory of all stored vectors, in gigabytes (1e9 bytes).
        latency_ms (`float`, *optional*): Maximum milliseconds per query for encoding and search.
        min_quality (`float`, *optional*): Minimum quality: mean of the main metrics.
    """

    documents: int
    memory_gb: float | None = None
    latency_ms: float | None = None
    min_quality: float | None = None


@dataclass(frozen=True)
class SearchPlan:
    """
    A measured two-stage search, averaged over collections. The first stage finds a shortlist, the second reranks it
    with all dims. `products_share` is its share of the multiplications of the exact search, whose main metric is
    `exact_quality`.
    """

    first_dim: int
    shortlist: int
    products_share: float
    quality: float
    exact_quality: float


@dataclass(frozen=True)
class Rescoring:
    """Rescoring of a shortlist: by the `"codes"` that found it, or vectors beside them in `"int8"` or `"float32"`."""

    by: str
    shortlist: int


@dataclass(frozen=True)
class Choice:
    """
    What to deploy: the granularity of the index, with its precision, the layer for queries, and how to search.

    Args:
        granularity ([`Granularity`]): Granularity of the documents, with their precision. Queries have its dim, too.
        query_layer (`int`): Layer of the queries, which is another one with asymmetric encoders.
        quality (`float`): Mean of the main metrics of the tasks, with exact search, or with rescoring.
        memory_gb (`float`): Memory of all stored vectors, in gigabytes.
        latency_ms (`float`, *optional*): Milliseconds per query in torch; `None` if it was not measured.
        plan ([`SearchPlan`], *optional*): The two-stage search to use; `None` is exact search.
        rescoring ([`Rescoring`], *optional*): How the shortlist of a precision is rescored; `None` if it is not.
    """

    granularity: Granularity
    query_layer: int
    quality: float
    memory_gb: float
    latency_ms: float | None
    plan: SearchPlan | None = None
    rescoring: Rescoring | None = None

    @property
    def bytes_per_vector(self) -> int:
        """Bytes per stored vector, with the one that rescores."""
        return rescored_bytes(self.granularity, self.rescoring.by if self.rescoring else "codes")

    @property
    def asymmetric(self) -> bool:
        """Whether queries and documents are embedded at different layers."""
        return self.query_layer != self.granularity.layer

    @property
    def cost(self) -> tuple[float, float, int, int]:
        """Bytes, latency and layers, by which choices are compared. A latency that was not measured is infinite."""
        time = math.inf if self.latency_ms is None else self.latency_ms
        return self.memory_gb, time, self.query_layer, self.granularity.layer

    @property
    def explanation(self) -> str:
        """The choice in two sentences."""
        queries = f", queries at layer {self.query_layer}" if self.asymmetric else ""
        time = "" if self.latency_ms is None else f", {self.latency_ms:.3g} ms per query"
        search = "exact search"
        if (plan := self.plan) is not None:
            search = (
                f"shortlist {plan.shortlist} documents by {plan.first_dim} dims and rerank them by all "
                f"{self.granularity.dim}, with {plan.products_share:.1%} of the multiplications and "
                f"{plan.quality / plan.exact_quality:.1%} of the quality of an exact search"
            )
        elif (rescoring := self.rescoring) is not None:
            by = "the decoded codes" if rescoring.by == "codes" else f"{rescoring.by} vectors"
            search = f"shortlist {rescoring.shortlist} documents by their codes and rescore them by {by}"
        return (
            f"Deploy {self.granularity}{queries}: quality {self.quality:.3f}, {self.memory_gb:.3g} GB "
            f"({self.bytes_per_vector} bytes per vector){time}. Search: {search}."
        )


def two_stage_plans(results: GridResults, tasks: Iterable[str], granularity: Granularity) -> list[SearchPlan]:
    """Searches whose second stage has this granularity, averaged over retrieval tasks, if measured on all of them."""
    collections = [task for task in tasks if task in results.tasks("retrieval")]
    if not collections or granularity.code != FLOAT:
        return []
    size = (granularity.layer, granularity.dim)
    searches = [s for s in results.two_stage_searches if (s.layer, s.second_dim) == size]
    exact = results.quality(collections)[granularity]
    quality, share = (
        mean_over_tasks(searches, collections, lambda s: (s.first_dim, s.shortlist), value_of)
        for value_of in (attrgetter("value"), attrgetter("products_share"))
    )
    return [SearchPlan(*stage, share[stage], quality[stage], exact) for stage in sorted(quality)]


def cheapest_search(
    results: GridResults, tasks: Iterable[str], granularity: Granularity, documents: int, tolerance: float
) -> tuple[SearchPlan | None, float | None]:
    """
    The fastest way to search at one granularity, and its milliseconds per query: a two-stage search that keeps the
    quality, or exact search (`None`) if that is faster. Without measured latency (`None`), the two-stage search with
    the fewest multiplications. Arguments as for [`deployments`].
    """
    plans = [
        plan
        for plan in two_stage_plans(results, tasks, granularity)
        if plan.quality >= (1 - tolerance) * plan.exact_quality > 0 and plan.products_share < 1
    ]
    exact = math.inf if results.latency is None else results.latency.of(granularity, documents)
    if results.latency is None or math.isinf(exact):
        return min(plans, key=lambda plan: plan.products_share, default=None), None
    ways: list[tuple[float, SearchPlan | None]] = [(exact, None)]
    for plan in plans:
        time = results.latency.of(granularity, documents, first_dim=plan.first_dim, shortlist=plan.shortlist)
        ways.append((time, plan))
    milliseconds, best = min(ways, key=lambda way: way[0])
    return best, milliseconds


def deployments(results: GridResults, tasks: Iterable[str], documents: int, tolerance: float) -> list[Choice]:
    """
    Everything that can be chosen: every granularity, with the search of [`cheapest_search`]; and, if they were
    measured on all tasks, every exact search with asymmetric encoders, and every rescored search in a precision.
    Arguments as for [`choose`], with the `documents` of the budget.
    """
    tasks, latency = list(tasks), results.latency

    def gigabytes(g: Granularity, rescore: str = "codes") -> float:
        return documents * rescored_bytes(g, rescore) / GIGABYTE

    def time(g: Granularity, rescore: str = "codes", shortlist: int | None = None) -> float | None:
        measured = math.inf if latency is None else latency.of(g, documents, rescore=rescore, shortlist=shortlist)
        return None if math.isinf(measured) else measured

    choices = []
    for g, quality in results.quality(tasks).items():
        plan, milliseconds = cheapest_search(results, tasks, g, documents, tolerance)
        choices.append(Choice(g, g.layer, quality, gigabytes(g), milliseconds, plan))
    for (g, layer), quality in results.asymmetric_quality(tasks).items():
        choices.append(Choice(g, layer, quality, gigabytes(g), time(Granularity(layer, g.dim))))
    for (g, by, shortlist), quality in results.rescored_quality(tasks).items():
        rescoring = Rescoring(by, shortlist)
        choices.append(Choice(g, g.layer, quality, gigabytes(g, by), time(g, by, shortlist), rescoring=rescoring))
    return choices


def choose(results: GridResults, tasks: Iterable[str], budget: Budget, *, tolerance: float = 0.01) -> Choice:
    """
    Choose what to deploy from all [`deployments`]. With a minimum quality: the cheapest within all limits, with the
    fewest bytes, then the lowest latency. Without one: the best within the limits, and the cheapest of equally good
    ones.

    Args:
        results ([`GridResults`]): Results of an evaluation.
        tasks (`Iterable[str]`): Tasks to judge by, with the mean of their main metrics.
        budget ([`Budget`]): Limits. Granularities are searched by [`cheapest_search`], asymmetric encoders by exact
            search. What was not measured does not fit a limited latency.
        tolerance (`float`, *optional*, defaults to 0.01): Share of the exact search's quality that a two-stage search
            may lose.

    Raises:
        ValueError: if a task was not scored, or nothing fits the budget: the message names the best values.
    """
    candidates = deployments(results, tasks, budget.documents, tolerance)
    fitting = [
        choice
        for choice in candidates
        if (budget.memory_gb is None or choice.memory_gb <= budget.memory_gb)
        and (budget.latency_ms is None or choice.cost[1] <= budget.latency_ms)
        and (budget.min_quality is None or choice.quality >= budget.min_quality)
    ]
    if not fitting:
        memory, time = (min(choice.cost[place] for choice in candidates) for place in (0, 1))
        raise ValueError(
            f"No granularity fits the budget. The smallest memory is {memory:.3g} GB, the best quality "
            f"{max(choice.quality for choice in candidates):.3f}, and the lowest latency {time:.3g} ms (inf: not "
            "measured)."
        )
    if budget.min_quality is not None:
        return min(fitting, key=lambda choice: (choice.cost, -choice.quality))
    return min(fitting, key=lambda choice: (-choice.quality, choice.cost))
