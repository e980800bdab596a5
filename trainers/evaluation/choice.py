"""Choose what to deploy within a budget, from the results of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from ..core.codes import FLOAT, bytes_per_vector, code_of
from ..core.granularity import Granularity
from .results import GridResults, rescored_bytes


GIGABYTE = 1e9


@dataclass(frozen=True)
class Budget:
    """
    Limits of a deployment; `None` is no limit.

    Args:
        documents (`int`): Number of vectors in the index.
        memory_gb (`float`, *optional*): Maximum memory of the stored vectors, in gigabytes (1e9 bytes): codes, and
            what is kept beside them to rescore a shortlist.
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
        second_dim (`int`): Dim of the second stage, which reranks the shortlist.
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
class Rescoring:
    """
    How a shortlist that a precision found is rescored.

    Args:
        by (`str`): `"codes"`, or vectors beside them in `"int8"` or `"float32"`.
        shortlist (`int`): Length of the shortlist.
        without (`float`): Quality of the search in the precision alone.
        largest (`int`): Number of documents in the largest collection that this was measured on.
    """

    by: str
    shortlist: int
    without: float
    largest: int


@dataclass(frozen=True)
class Choice:
    """
    What to deploy: the granularity of the index, with its precision, the layer for queries, and how to search.

    Args:
        granularity ([`Granularity`]): Granularity of the documents, with their precision. Queries have its dim, too.
        query_layer (`int`): Layer of the queries. It differs from the granularity's layer with asymmetric
            encoders.
        quality (`float`): Mean of the main metrics of the tasks, with exact search, or with rescoring.
        memory_gb (`float`): Memory of all vectors, in gigabytes, with those that rescore.
        latency_ms (`float`, *optional*): Milliseconds per query with the chosen search; `None` if latency was not
            measured, or not for this precision.
        plan ([`SearchPlan`], *optional*): The two-stage search to use; `None` is exact search, as always with
            asymmetric encoders.
        explanation (`str`, *optional*): The choice and its reasons in a few sentences.
        encode_ms (`dict[str, float]`, *optional*): Runtime -> milliseconds to encode a query; empty if latency was not
            measured. `latency_ms` and `quality` are those of torch.
        rescoring ([`Rescoring`], *optional*): How the shortlist of a precision is rescored; `None` if it is not.
    """

    granularity: Granularity
    query_layer: int
    quality: float
    memory_gb: float
    latency_ms: float | None
    plan: SearchPlan | None
    explanation: str = ""
    encode_ms: Mapping[str, float] = field(default_factory=dict)
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
        """What makes one choice cheaper than another, most important first: bytes, latency, layers. A latency that was
        not measured counts as the highest."""
        time = math.inf if self.latency_ms is None else self.latency_ms
        return self.memory_gb, time, self.query_layer, self.granularity.layer


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
    if not collections or granularity.code != FLOAT:
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
        was not measured, or not for this precision.
    """
    plans = [
        plan
        for plan in two_stage_plans(results, tasks, granularity)
        if plan.quality >= (1 - tolerance) * plan.exact_quality > 0 and plan.products_share < 1
    ]
    latency = results.latency
    if latency is None or not latency.has(granularity):
        return min(plans, key=lambda plan: plan.products_share, default=None), None
    ways: list[tuple[float, SearchPlan | None]] = [(latency.of(granularity, documents), None)]
    ways += [
        (latency.of_two_stages(granularity, plan.first_dim, plan.shortlist, documents), plan)
        for plan in plans
        if str(plan.shortlist) in latency.rerank_ms[str(granularity.dim)]
    ]
    milliseconds, best = min(ways, key=lambda way: way[0])
    return best, milliseconds


def deployments(results: GridResults, tasks: Iterable[str], documents: int, tolerance: float) -> list[Choice]:
    """
    Everything that can be chosen: every granularity, with the search of [`cheapest_search`]; and, if they were
    measured on all tasks, every search with asymmetric encoders, which is an exact search, and every search in a
    precision with rescoring.

    Args:
        results ([`GridResults`]): Results of an evaluation.
        tasks (`Iterable[str]`): Tasks to judge by. There are asymmetric and rescored searches only if all are
            retrieval tasks.
        documents (`int`): Number of documents in the index.
        tolerance (`float`): Share of the exact search's quality that a two-stage search may lose.

    Returns:
        `list[Choice]`: choices without an explanation.

    Raises:
        ValueError: if there are no tasks, or a task was not scored.
    """
    tasks, latency, exact = list(tasks), results.latency, results.quality(tasks)

    def gigabytes(g: Granularity, rescore: str = "codes") -> float:
        return documents * rescored_bytes(g, rescore) / GIGABYTE

    found = []
    for g, quality in exact.items():
        plan, milliseconds = cheapest_search(results, tasks, g, documents, tolerance)
        found.append(Choice(g, g.layer, quality, gigabytes(g), milliseconds, plan))
    for (g, query_layer), quality in results.asymmetric_quality(tasks).items():
        time = None if latency is None else latency.of(Granularity(query_layer, g.dim), documents)
        found.append(Choice(g, query_layer, quality, gigabytes(g), time, None))
    largest = max((search.documents for search in results.rescored_searches if search.task in tasks), default=0)
    for (g, by, shortlist), quality in results.rescored_quality(tasks).items():
        time = None if latency is None else latency.of_rescored(g, by, shortlist, documents)
        rescoring = Rescoring(by, shortlist, exact[g], largest)
        found.append(Choice(g, g.layer, quality, gigabytes(g, by), time, None, rescoring=rescoring))
    return found


def choose(results: GridResults, tasks: Iterable[str], budget: Budget, *, tolerance: float = 0.01) -> Choice:
    """
    Choose what to deploy, from all [`deployments`]: a granularity; a search with asymmetric encoders, whose index has
    one granularity and whose queries are embedded at another layer; or a search in a precision whose shortlist is
    rescored. With a minimum quality: the cheapest within all limits, with the fewest bytes, then the lowest latency.
    Without one: the best within the limits, and the cheapest of equally good ones.

    Args:
        results ([`GridResults`]): Results of an evaluation.
        tasks (`Iterable[str]`): Tasks to judge by, with the mean of their main metrics.
        budget ([`Budget`]): Limits. The latency of a granularity is that of [`cheapest_search`]; that of asymmetric
            encoders is encoding at the query's layer and exact search. What was not measured does not fit a limited
            latency.
        tolerance (`float`, *optional*, defaults to 0.01): Share of the exact search's quality that a two-stage search
            may lose.

    Returns:
        [`Choice`]

    Raises:
        ValueError: if a task was not scored, if `latency_ms` is limited but was not measured, or if nothing fits the
            budget; the message then names the best value of each limited quantity.
    """
    if results.latency is None and budget.latency_ms is not None:
        raise ValueError(f"latency_ms={budget.latency_ms:g} is set, but this evaluation did not measure latency.")
    candidates = deployments(results, tasks, budget.documents, tolerance)
    fitting = _within(budget, candidates)
    if budget.min_quality is not None:
        best = min(fitting, key=lambda choice: (choice.cost, -choice.quality))
    else:
        best = min(fitting, key=lambda choice: (-choice.quality, choice.cost))
    if results.latency is not None:
        best = replace(best, encode_ms=results.latency.encode_ms_by_engine(best.query_layer))
    return replace(best, explanation=_explain(best, candidates, len(fitting), budget, tolerance))


def _within(budget: Budget, candidates: Sequence[Choice]) -> list[Choice]:
    """Candidates within all limits. If there is none, the ValueError names the limits that exclude them."""
    limits: dict[str, list[bool]] = {}
    if budget.memory_gb is not None:
        needed = [choice.memory_gb for choice in candidates]
        name = f"memory_gb={budget.memory_gb:g} (smallest: {min(needed):.3g})"
        limits[name] = [value <= budget.memory_gb for value in needed]
    if budget.latency_ms is not None:
        taken = [math.inf if choice.latency_ms is None else choice.latency_ms for choice in candidates]
        name = f"latency_ms={budget.latency_ms:g} (smallest: {min(taken):.3g})"
        limits[name] = [value <= budget.latency_ms for value in taken]
    if budget.min_quality is not None:
        reached = [choice.quality for choice in candidates]
        name = f"min_quality={budget.min_quality:g} (best: {max(reached):.3f})"
        limits[name] = [value >= budget.min_quality for value in reached]
    fitting = [choice for index, choice in enumerate(candidates) if all(kept[index] for kept in limits.values())]
    if not fitting:
        alone = [limit for limit, kept in limits.items() if not any(kept)]
        counts = ", ".join(f"{limit}: {sum(kept)}" for limit, kept in limits.items())
        reason = f"none is within {' or '.join(alone)}" if alone else f"none is within all limits ({counts})"
        raise ValueError(f"No granularity fits the budget: {reason}.")
    return fitting


def _explain(best: Choice, candidates: Sequence[Choice], fitting: int, budget: Budget, tolerance: float) -> str:
    """The choice and its reasons in a few sentences."""
    symmetric = {c.granularity: c for c in candidates if not c.asymmetric and c.rescoring is None}
    full = symmetric.get(Granularity(max(g.layer for g in symmetric), max(g.dim for g in symmetric)))
    what = str(best.granularity)
    if best.asymmetric:
        what += f" for documents and embed queries at {_layers(best.query_layer)}"
    kind = "granularities" if len(symmetric) == len(candidates) else "plans"
    why = "the cheapest" if budget.min_quality is not None else "the best"
    share = ""
    if full is not None and full != best and full.quality > 0:
        share = f" ({best.quality / full.quality:.1%} of {full.granularity})"
    time = "" if best.latency_ms is None else f", and a query takes {best.latency_ms:.3g} ms for encoding and search"
    explanation = (
        f"Deploy {what}: {fitting} of {len(candidates)} {kind} fit the budget, and it is {why} of them. "
        f"Its quality is {best.quality:.3f}{share}. {_storage(best)}"
        f"{budget.documents:,} vectors take {best.memory_gb:.3g} GB{time}.{_engines(best.encode_ms)}"
    )
    if best.granularity.code != FLOAT:
        return f"{explanation} {_how_to_search_codes(best, budget.documents)}"
    if not best.asymmetric:
        return f"{explanation} {_how_to_search(best.plan, budget.documents, tolerance)}"
    same = symmetric[best.granularity]
    time = "" if same.latency_ms is None else f" in {same.latency_ms:.3g} ms"
    layers = _layers(same.query_layer)
    return f"{explanation} Queries at {layers} would reach {same.quality:.3f}{time}. Use exact search."


def _engines(encode_ms: Mapping[str, float]) -> str:
    """What encoding takes in each runtime, if there are several."""
    if len(encode_ms) < 2:
        return ""
    times = [f"{milliseconds:.3g} ms in {engine}" for engine, milliseconds in encode_ms.items()]
    quickest = min(encode_ms, key=lambda engine: encode_ms[engine])
    return (
        f" Encoding alone takes {', '.join(times[:-1])} and {times[-1]}: {quickest} is quickest. The quality, the "
        "time of a query and the limits are those of torch."
    )


def _storage(choice: Choice) -> str:
    """The precision in plain words; empty for float32."""
    g = choice.granularity
    if g.code == FLOAT:
        return ""
    beside = ""
    if choice.rescoring is not None and choice.rescoring.by != "codes":
        beside = f", and {bytes_per_vector(choice.rescoring.by, g.dim)} bytes beside them in {choice.rescoring.by}"
    return (
        f"A vector is stored as {g.code}, {code_of(g.code).words}: {bytes_per_vector(g.code, g.dim)} bytes instead of "
        f"{bytes_per_vector(FLOAT, g.dim)} in float32{beside}. "
    )


def _how_to_search_codes(choice: Choice, documents: int) -> str:
    code, rescoring = code_of(choice.granularity.code), choice.rescoring
    bits = code.learned or code.name == "binary"
    compared = "by the Hamming distance of their codes" if bits else "with a float query against the decoded codes"
    if rescoring is None:
        return f"Use exact search, {compared}."
    by = "the codes decoded" if rescoring.by == "codes" else f"their {rescoring.by} vectors"
    larger = " A much larger index may need a longer shortlist." if documents > 2 * rescoring.largest else ""
    return (
        f"Search in two stages: shortlist {rescoring.shortlist} documents {compared}, and rescore them by the "
        f"float query against {by}. Without that, the quality is {rescoring.without:.3f}.{larger}"
    )


def _layers(count: int) -> str:
    if count == 0:
        return "0 layers (a table look-up)"
    return "1 layer" if count == 1 else f"{count} layers"


def _how_to_search(plan: SearchPlan | None, documents: int, tolerance: float) -> str:
    if plan is None:
        kept = f"{1 - tolerance:.0%} of the quality"
        return f"Use exact search: no measured two-stage search is faster and keeps {kept}."
    larger = " A much larger index may need a longer shortlist." if documents > 2 * plan.largest else ""
    return (
        f"Search in two stages: shortlist {plan.shortlist} documents by {plan.first_dim} dims and rerank them by "
        f"{plan.second_dim} dims. This takes {plan.products_share:.1%} of the multiplications of an exact search and "
        f"keeps {plan.quality / plan.exact_quality:.1%} of its quality, measured on {plan.collections}.{larger}"
    )
