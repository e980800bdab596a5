"""Which granularity to deploy: the answer that an evaluation gives to a budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from ..granularity import Granularity
from .results import GridResults


BYTES_A_NUMBER = 4  # float32
GIGABYTE = 1e9


@dataclass(frozen=True)
class Budget:
    """
    What a deployment can afford; `None` is no limit.

    Args:
        documents (`int`): Vectors in the index.
        memory_gb (`float`, *optional*): Memory for them, in gigabytes (1e9 bytes).
        latency_ms (`float`, *optional*): Of one query, encoding and search, on the machine of the evaluation.
        min_quality (`float`, *optional*): Mean main metric that is good enough.

    Raises:
        ValueError: if a limit is not positive.
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
class TwoStages:
    """
    A measured search in two stages: means over collections.

    Args:
        first_dim (`int`): Prefix that makes the shortlist.
        second_dim (`int`): Prefix that re-ranks it.
        shortlist (`int`): Its length.
        products_share (`float`): Multiplications, as a share of an exact search with the second prefix.
        quality (`float`): Main metric.
        exact_quality (`float`): The same of the exact search.
        collections (`str`): What was searched, and its size.
        largest (`int`): Documents of the largest of them.
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
    The granularity to deploy, how to search, and why.

    Args:
        granularity ([`Granularity`]): It.
        quality (`float`): Mean main metric over the tasks, of exact search.
        memory_gb (`float`): Of all vectors.
        latency_ms (`float`, *optional*): Of a query, searched as said; `None` where it was not measured.
        plan ([`TwoStages`], *optional*): How to search in two stages; `None` is exact search.
        explanation (`str`): All this in a sentence or two.
    """

    granularity: Granularity
    quality: float
    memory_gb: float
    latency_ms: float | None
    plan: TwoStages | None
    explanation: str


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """
    Points that no other beats: none is as cheap and better, or as good and cheaper.

    Args:
        points (`Sequence[tuple[float, float]]`): Cost and quality.

    Returns:
        `list[int]`: their indices, the cheapest first; of equal points the first.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i)):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def two_stage_plans(results: GridResults, tasks: Iterable[str], granularity: Granularity) -> list[TwoStages]:
    """Measured searches that end with this granularity, as means over those of the tasks that are collections."""
    collections = [task for task in tasks if task in results.tasks("retrieval")]
    if not collections:
        return []
    exact = results.quality(collections)[granularity]
    measured = {
        (plan.task, plan.first_dim, plan.shortlist): plan
        for plan in results.plans
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
                TwoStages(
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
) -> tuple[TwoStages | None, float | None]:
    """
    How to search at one granularity: the measured search in two stages of least latency, or, where no latency was
    measured, of fewest multiplications, that keeps the quality; exact search where none is cheaper.

    Args:
        results ([`GridResults`]): An evaluation.
        tasks (`Iterable[str]`): Its collections count.
        granularity ([`Granularity`]): What ends the search.
        documents (`int`): In the index.
        tolerance (`float`): Share of the exact search's quality that may be lost.

    Returns:
        The plan, `None` for exact search, and the milliseconds of a query, `None` where they were not measured.
    """
    plans = [
        plan
        for plan in two_stage_plans(results, tasks, granularity)
        if plan.quality >= (1 - tolerance) * plan.exact_quality and plan.products_share < 1
    ]
    latency = results.latency
    if latency is None:
        return min(plans, key=lambda plan: plan.products_share, default=None), None
    ways: list[tuple[float, TwoStages | None]] = [(latency.of(granularity, documents), None)]
    ways += [
        (latency.of_two_stages(granularity, plan.first_dim, plan.shortlist, documents), plan)
        for plan in plans
        if str(plan.shortlist) in latency.rerank_ms[str(granularity.dim)]
    ]
    milliseconds, best = min(ways, key=lambda way: way[0])
    return best, milliseconds


def choose(results: GridResults, tasks: Iterable[str], budget: Budget, *, tolerance: float = 0.01) -> Choice:
    """
    The granularity to deploy. With a minimum quality, the cheapest that reaches it within the other limits: fewest
    bytes, then fewest milliseconds. Without one, the best within the limits; of equals the cheapest.

    Args:
        results ([`GridResults`]): An evaluation.
        tasks (`Iterable[str]`): Tasks to judge by: the mean of their main metrics.
        budget ([`Budget`]): Limits. Each granularity is searched as [`cheapest_search`] says.
        tolerance (`float`, *optional*, defaults to 0.01): Share of the exact search's quality that a search in two
            stages may lose.

    Returns:
        [`Choice`]

    Raises:
        ValueError: if a task was not scored, latency is limited and was not measured, or nothing keeps to the budget:
            says what the least of each is.
    """
    tasks, grid = list(tasks), results.granularities
    if results.latency is None and budget.latency_ms is not None:
        raise ValueError("Latency is limited, and this evaluation did not measure it.")
    quality = results.quality(tasks)
    memory = {g: budget.documents * g.dim * BYTES_A_NUMBER / GIGABYTE for g in grid}
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
    share = f", {quality[best] / quality[full]:.1%} of {full}'s" if full in quality and full != best else ""
    time = "" if milliseconds is None else f" and a query takes {milliseconds:.3g} ms, encoding and search"
    explanation = (
        f"Deploy {best}: of {len(grid)} granularities {len(fitting)} keep to the budget, and it is {why} of them, "
        f"with a quality of {quality[best]:.3f}{share}; {budget.documents:,} vectors take {memory[best]:.3g} GB{time}."
        f" {_how_to_search(plan, budget.documents, tolerance)}"
    )
    return Choice(best, quality[best], memory[best], milliseconds, plan, explanation)


def _within(
    budget: Budget,
    quality: Mapping[Granularity, float],
    memory: Mapping[Granularity, float],
    latency: Mapping[Granularity, float],
) -> set[Granularity]:
    """Granularities that keep to all limits; none is an error that says which limits rule them out."""
    limits: dict[str, set[Granularity]] = {}
    if budget.memory_gb is not None:
        name = f"memory of {budget.memory_gb:g} GB (least: {min(memory.values()):.3g} GB)"
        limits[name] = {g for g, needed in memory.items() if needed <= budget.memory_gb}
    if budget.latency_ms is not None:
        name = f"latency of {budget.latency_ms:g} ms (least: {min(latency.values()):.3g} ms)"
        limits[name] = {g for g, needed in latency.items() if needed <= budget.latency_ms}
    if budget.min_quality is not None:
        name = f"quality of {budget.min_quality:g} (best: {max(quality.values()):.3f})"
        limits[name] = {g for g, reached in quality.items() if reached >= budget.min_quality}
    fitting = set(quality).intersection(*limits.values())
    if not fitting:
        alone = [limit for limit, members in limits.items() if not members]
        counts = ", ".join(f"{len(members)} to a {limit}" for limit, members in limits.items())
        reason = f"none keeps to a {' or a '.join(alone)}" if alone else f"none keeps to all limits together, {counts}"
        raise ValueError(f"No granularity fits: {reason}.")
    return fitting


def _how_to_search(plan: TwoStages | None, documents: int, tolerance: float) -> str:
    if plan is None:
        kept = f"{1 - tolerance:.0%} of the quality"
        return f"Search exactly: no search in two stages was measured that is faster and keeps {kept}."
    larger = " An index so much larger may need a longer shortlist." if documents > 2 * plan.largest else ""
    return (
        f"Search in two stages: shortlist {plan.shortlist} documents by their first {plan.first_dim} dims and re-rank "
        f"them by {plan.second_dim}: {plan.products_share:.1%} of the multiplications of an exact search, and "
        f"{plan.quality / plan.exact_quality:.1%} of its quality, measured on {plan.collections}.{larger}"
    )
