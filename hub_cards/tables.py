"""Tables of an evaluation, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainers import Granularity
from trainers.evaluation import GridResults
from trainers.evaluation.selection import BYTES_A_NUMBER


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is words and whose others are numbers."""
    lines = [f"| {' | '.join(header)} |", "| --- |" + " --: |" * (len(header) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def family_table(results: GridResults) -> str:
    """A row a granularity: the mean of each family of tasks, in percent, bytes a vector, and milliseconds a query."""
    families = results.judged_families()
    quality = {family: results.quality(results.tasks(family)) for family in families}
    header = ["granularity", *(f"{family} ({len(results.tasks(family))})" for family in families), "bytes a vector"]
    header += ["ms a query"] if results.latency else []

    def row(g: Granularity) -> list[str]:
        cells = [str(g), *(percent(quality[family][g]) for family in families), str(BYTES_A_NUMBER * g.dim)]
        return [*cells, f"{results.latency.of(g):.1f}"] if results.latency else cells

    return markdown(header, map(row, results.granularities))


def task_table(results: GridResults, family: str) -> str:
    """A row a granularity, a column a task: its main metric, in percent where it is a quality."""
    quality = {task: results.quality([task]) for task in results.tasks(family)}
    spell = percent if family in results.judged_families() else "{:.3f}".format
    return markdown(
        ["granularity", *quality],
        ([str(g), *(spell(values[g]) for values in quality.values())] for g in results.granularities),
    )


def two_stage_table(results: GridResults, granularity: Granularity) -> str:
    """
    Searches in two stages that end with one granularity: a row for each collection, first dim and length of the
    shortlist; the multiplications and the quality as shares of the exact search's.
    """
    plans = [plan for plan in results.plans if (plan.layer, plan.second_dim) == (granularity.layer, granularity.dim)]
    exact = {task: results.quality([task])[granularity] for task in dict.fromkeys(plan.task for plan in plans)}
    return markdown(
        ["collection", "documents", "first dim", "shortlist", "multiplications, %", "quality", "of exact, %"],
        (
            [
                plan.task,
                f"{plan.documents:,}",
                str(plan.first_dim),
                str(plan.shortlist),
                percent(plan.products_share),
                percent(plan.value),
                percent(plan.value / exact[plan.task]),
            ]
            for plan in plans
        ),
    )


def report(results: GridResults) -> str:
    """All tables of an evaluation, with what was run above them."""
    settings = ", ".join(f"{name} {value}" for name, value in results.settings.items() if value)
    parts = [
        f"# {results.model} over {results.grid}",
        f"{results.date}, {results.machine}, seed {results.seed}; {settings}. "
        f"{len(results.tasks())} tasks, {len(results.scores)} scores. Numbers in percent.",
        "## Means of the families",
        family_table(results),
    ]
    for family in results.families():
        parts += [f"## {family} ({results.main_metric(family)})", task_table(results, family)]
    if results.plans:
        full = results.granularities.full
        parts += [f"## Two stages, ending with {full}", two_stage_table(results, full)]
    return "\n\n".join(parts) + "\n"
