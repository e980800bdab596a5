"""Choose the granularity to deploy within a budget, from the results of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from ..core.granularity import Granularity
from .results import GridResults


BYTES_PER_NUMBER = 4  # float32
GIGABYTE = 1e9


@dataclass(frozen=True)
class Budget:
    """
    Limits of a deployment; `None` is no limit.

    Args:
        documents (`int`): Number of vectors in the index.
        memory_gb (`float`, *optional*): Maximum memory of the float32 vectors, in gigabytes (1e9 bytes).
        latency_ms (`float`, *optional*): Maximum milliseconds per query for encoding and search, on the machine of the
            evaluation.
        min_quality (`float`, *optional*): Minimum quality: mean of the main metrics.

    Raises:
        ValueError: if a value is not positive.
    """

    documents: int
    memory_gb: float | None = None
    latency_ms: float | None = None
    min_quality: float | None = None

    def __post_init__(self) -> None:
        for name in ("documents", "memory_gb", "latency_ms", "min_quality"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value} must be above 0.")


@dataclass(frozen=True)
class SearchPlan:
    """
    A measured two-stage search, averaged over collections.

    Args:
        first_dim (`int`): Dim of the first stage, which finds the shortlist.
        second_dim (`int`): Dim of the second stage, which re-ranks the shortlist.
        shortlist (`int`): Length of the shortlist.
        products_share (`float`): Multiplications, as a share of an exact search at `second_dim`.
        quality (`float`): Main metric of the two-stage search.
        exact_quality (`float`): Main metric of the exact search.
        collections (`str`): Names and sizes of the collections.
        largest (`int`): Number of documents in the largest collection.
    """

    first_dim: int
    second_dim: int
    shortlist: int
    products_share: float
    quality: float
    exact_quality: float
    collections: str
    largest: int


@dataclass(frozen=True)
class Choice:
    """
    The granularity to deploy, and how to search with it.

    Args:
        granularity ([`Granularity`]): The chosen granularity.
        quality (`float`): Mean of the main metrics of the tasks, with exact search.
        memory_gb (`float`): Memory of all vectors, in gigabytes.
        latency_ms (`float`, *optional*): Milliseconds per query with the chosen search; `None` if latency was not
            measured.
        plan ([`SearchPlan`], *optional*): The two-stage search to use; `None` is exact search.
        explanation (`str`): The choice and its reasons in a few sentences.
    """

    granularity: Granularity
    quality: float
    memory_gb: float
    latency_ms: float | None
    plan: SearchPlan | None
    explanation: str


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """
    The Pareto front: points for which no other point is better at the same or a lower cost, or cheaper at the same or
    a higher quality.

    Args:
        points (`Sequence[tuple[float, float]]`): Cost and quality of each point.

    Returns:
        `list[int]`: indices of the points on the front, cheapest first. Of equal points, only the first is returned.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i)):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def two_stage_plans(results: GridResults, tasks: Iterable[str], granularity: Granularity) -> list[SearchPlan]:
    """Measured two-stage searches whose second stage uses this granularity, averaged over the retrieval tasks."""
    collections = [task for task in tasks if task in results.tasks("retrieval")]
    if not collections:
        return []
    exact = results.quality(collections)[granularity]
    measured = {
        (plan.task, plan.first_dim, plan.shortlist): plan
        for plan in results.two_stage_searches
        if (plan.layer, plan.second_dim) == (granularity.layer, granularity.dim)
    }
    found = []
    for first_dim, shortlist in sorted({(first, size) for _, first, size in measured}):
        plans = [measured.get((task, first_dim, shortlist)) for task in collections]
        kept = [plan for plan in plans if plan is not None]
        if len(kept) == len(collections):
            share, quality = mean(plan.products_share for plan in kept), mean(plan.value for plan in kept)
            sizes = ", ".join(f"{plan.task} ({plan.documents:,} documents)" for plan in kept)
            found.append(
                SearchPlan(
                    first_dim,
                    granularity.dim,
                    shortlist,
                    share,
                    quality,
                    exact,
                    sizes,
                    max(plan.documents for plan in kept),
                )
            )
    return found


def cheapest_search(
    results: GridResults, tasks: Iterable[str], granularity: Granularity, documents: int, tolerance: float
) -> tuple[SearchPlan | None, float | None]:
    """
    The fastest way to search at one granularity: a two-stage search that keeps the quality, or exact search if that is
    faster. Without measured latency, the two-stage search with the fewest multiplications.

    Args:
        results ([`GridResults`]): Results of an evaluation.
        tasks (`Iterable[str]`): Tasks to judge by; only retrieval tasks count.
        granularity ([`Granularity`]): Granularity of the search, or of its second stage.
        documents (`int`): Number of documents in the index.
        tolerance (`float`): Share of the exact search's quality that a two-stage search may lose.

    Returns:
        `tuple`: the [`SearchPlan`], or `None` for exact search; and the milliseconds per query, or `None` if latency
        was not measured.
    """
    plans = [
        plan
        for plan in two_stage_plans(results, tasks, granularity)
        if plan.quality >= (1 - tolerance) * plan.exact_quality and plan.products_share < 1
    ]
    latency = results.latency
    if latency is None:
        return min(plans, key=lambda plan: plan.products_share, default=None), None
    ways: list[tuple[float, SearchPlan | None]] = [(latency.of(granularity, documents), None)]
    ways += [
        (latency.of_two_stages(granularity, plan.first_dim, plan.shortlist, documents), plan)
        for plan in plans
        if str(plan.shortlist) in latency.rerank_ms[str(granularity.dim)]
    ]
    milliseconds, best = min(ways, key=lambda way: way[0])
    return best, milliseconds


def choose(results: GridResults, tasks: Iterable[str], budget: Budget, *, tolerance: float = 0.01) -> Choice:
    """
    Choose the granularity to deploy. With a minimum quality: the cheapest granularity within all limits, with the
    fewest bytes, then the lowest latency. Without one: the best within the limits, and the cheapest of equally good
    ones.

    Args:
        results ([`GridResults`]): Results of an evaluation.
        tasks (`Iterable[str]`): Tasks to judge by, with the mean of their main metrics.
        budget ([`Budget`]): Limits. The latency of a granularity is that of [`cheapest_search`].
        tolerance (`float`, *optional*, defaults to 0.01): Share of the exact search's quality that a two-stage search
            may lose.

    Returns:
        [`Choice`]

    Raises:
        ValueError: if a task was not scored, if `latency_ms` is limited but was not measured, or if no granularity
            fits the budget; the message then names the best value of each limited quantity.
    """
    tasks, grid = list(tasks), results.granularities
    if results.latency is None and budget.latency_ms is not None:
        raise ValueError(f"latency_ms={budget.latency_ms:g} is set, but this evaluation did not measure latency.")
    quality = results.quality(tasks)
    memory = {g: budget.documents * g.dim * BYTES_PER_NUMBER / GIGABYTE for g in grid}
    searches = {g: cheapest_search(results, tasks, g, budget.documents, tolerance) for g in grid}
    latency = {g: milliseconds or 0.0 for g, (_, milliseconds) in searches.items()}
    fitting = _within(budget, quality, memory, latency)

    def cost(g: Granularity) -> tuple[float, float, int]:
        return (memory[g], latency[g], g.layer)

    if budget.min_quality is not None:
        best = min(fitting, key=lambda g: (cost(g), -quality[g]))
    else:
        best = min(fitting, key=lambda g: (-quality[g], cost(g)))
    plan, milliseconds = searches[best]
    why = "the cheapest" if budget.min_quality is not None else "the best"
    full = grid.full
    share = f" ({quality[best] / quality[full]:.1%} of {full})" if full in quality and full != best else ""
    time = "" if milliseconds is None else f", and a query takes {milliseconds:.3g} ms for encoding and search"
    explanation = (
        f"Deploy {best}: {len(fitting)} of {len(grid)} granularities fit the budget, and it is {why} of them. "
        f"Its quality is {quality[best]:.3f}{share}. {budget.documents:,} vectors take {memory[best]:.3g} GB{time}."
        f" {_how_to_search(plan, budget.documents, tolerance)}"
    )
    return Choice(best, quality[best], memory[best], milliseconds, plan, explanation)


def _within(
    budget: Budget,
    quality: Mapping[Granularity, float],
    memory: Mapping[Granularity, float],
    latency: Mapping[Granularity, float],
) -> set[Granularity]:
    """Granularities within all limits. If there is none, the ValueError names the limits that exclude them."""
    limits: dict[str, set[Granularity]] = {}
    if budget.memory_gb is not None:
        name = f"memory_gb={budget.memory_gb:g} (smallest: {min(memory.values()):.3g})"
        limits[name] = {g for g, needed in memory.items() if needed <= budget.memory_gb}
    if budget.latency_ms is not None:
        name = f"latency_ms={budget.latency_ms:g} (smallest: {min(latency.values()):.3g})"
        limits[name] = {g for g, needed in latency.items() if needed <= budget.latency_ms}
    if budget.min_quality is not None:
        name = f"min_quality={budget.min_quality:g} (best: {max(quality.values()):.3f})"
        limits[name] = {g for g, reached in quality.items() if reached >= budget.min_quality}
    fitting = set(quality).intersection(*limits.values())
    if not fitting:
        alone = [limit for limit, members in limits.items() if not members]
        counts = ", ".join(f"{limit}: {len(members)}" for limit, members in limits.items())
        reason = f"none is within {' or '.join(alone)}" if alone else f"none is within all limits ({counts})"
        raise ValueError(f"No granularity fits the budget: {reason}.")
    return fitting


def _how_to_search(plan: SearchPlan | None, documents: int, tolerance: float) -> str:
    if plan is None:
        kept = f"{1 - tolerance:.0%} of the quality"
        return f"Use exact search: no measured two-stage search is faster and keeps {kept}."
    larger = " A much larger index may need a longer shortlist." if documents > 2 * plan.largest else ""
    return (
        f"Search in two stages: shortlist {plan.shortlist} documents by {plan.first_dim} dims and re-rank them by "
        f"{plan.second_dim} dims. This takes {plan.products_share:.1%} of the multiplications of an exact search and "
        f"keeps {plan.quality / plan.exact_quality:.1%} of its quality, measured on {plan.collections}.{larger}"
    )
