"""Tables of an evaluation, in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from trainers.core.granularity import Granularity
from trainers.evaluation.choice import BYTES_PER_NUMBER
from trainers.evaluation.results import GridResults, Latency


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table. Its first `words` columns hold words and are aligned left; the others are aligned right."""
    aligned = ["---"] * words + ["--:"] * (len(header) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, aligned, *map(_escaped, rows)))


def _escaped(row: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in row]


def percent(value: float) -> str:
    """A share in percent, with one decimal."""
    return f"{100 * value:.1f}"


def task_type_table(results: GridResults) -> str:
    """One row per granularity: the mean of each task type in percent, bytes per vector, and ms per query."""
    task_types = results.judged_task_types()
    quality = {task_type: results.quality(results.tasks(task_type)) for task_type in task_types}
    counted = [f"{task_type} ({len(results.tasks(task_type))})" for task_type in task_types]
    header = ["granularity", *counted, "bytes per vector", *(["ms per query"] if results.latency else [])]

    def row(g: Granularity) -> list[str]:
        cells = [str(g), *(percent(quality[task_type][g]) for task_type in task_types), str(BYTES_PER_NUMBER * g.dim)]
        return [*cells, f"{results.latency.of(g):.1f}"] if results.latency else cells

    return markdown(header, map(row, results.granularities))


def task_table(results: GridResults, task_type: str) -> str:
    """One row per granularity, one column per task of a type: the main metric, in percent where it is a quality."""
    quality = {task: results.quality([task]) for task in results.tasks(task_type)}
    spell = percent if task_type in results.judged_task_types() else "{:.3f}".format
    return markdown(
        ["granularity", *quality],
        ([str(g), *(spell(values[g]) for values in quality.values())] for g in results.granularities),
    )


def two_stage_table(results: GridResults, granularity: Granularity) -> str:
    """
    The measured searches in two stages whose second stage uses `granularity`: one row per collection, first dim and
    shortlist length. Multiplications and quality are also given as shares of those of the exact search.
    """
    searches = [
        search
        for search in results.two_stage_searches
        if (search.layer, search.second_dim) == (granularity.layer, granularity.dim)
    ]
    exact = {task: results.quality([task])[granularity] for task in dict.fromkeys(search.task for search in searches)}
    return markdown(
        ["collection", "documents", "first dim", "shortlist", "multiplications, %", "quality", "of exact, %"],
        (
            [
                search.task,
                f"{search.documents:,}",
                str(search.first_dim),
                str(search.shortlist),
                percent(search.products_share),
                percent(search.value),
                percent(search.value / exact[search.task]) if exact[search.task] else "-",
            ]
            for search in searches
        ),
    )


def asymmetric_table(results: GridResults, dim: int) -> str:
    """
    One row per query layer: the main metric of each retrieval task in percent, with the documents at the last layer
    and at the layer of the query, and ms per query if latency was measured. In the last row these are one search.

    Args:
        results ([`GridResults`]): Results of an evaluation.
        dim (`int`): Dim of queries and documents.

    Returns:
        `str`: the table.

    Raises:
        ValueError: if there is no asymmetric search at this dim.
    """
    searches = [search for search in results.asymmetric_searches if search.dim == dim]
    if not searches:
        measured = ", ".join(map(str, sorted({search.dim for search in results.asymmetric_searches})))
        raise ValueError(f"No asymmetric search at {dim} dims was measured; measured: {measured or 'none'}.")
    last = max(search.document_layer for search in searches)
    values = {(search.task, search.query_layer): search.value for search in searches if search.document_layer == last}
    tasks = list(dict.fromkeys(task for task, _ in values))
    same = {task: results.quality([task]) for task in tasks}
    header = [
        "query layer",
        *(f"{task}, {place}" for task in tasks for place in (f"documents at {last}", "same layer")),
    ]

    def row(layer: int) -> list[str]:
        g = Granularity(layer, dim)
        cells = [str(layer)]
        for task in tasks:
            cells += [percent(values.get((task, layer), same[task][g])), percent(same[task][g])]
        return [*cells, f"{results.latency.of(g):.1f}"] if results.latency else cells

    layers = sorted({layer for _, layer in values} | {last})
    return markdown([*header, *(["ms per query"] if results.latency else [])], map(row, layers))


def latency_note(latency: Latency) -> str:
    """What the times of a latency are, for the text below a table of them."""
    return (
        f"ms per query: encoding in torch and exact search among {latency.documents:,} documents (threads: "
        f"{latency.threads}). Each time is {latency.statistic}."
    )


def engine_table(latency: Latency, layers: Collection[int]) -> str:
    """
    One row per layer, one column per engine: milliseconds to encode one query.

    Args:
        latency ([`Latency`]): A latency.
        layers (`Collection[int]`): Rows, as far as another engine than torch was measured at them.

    Returns:
        `str`: the table; empty if it has no row.
    """
    measured = {
        layer: latency.encode_ms_by_engine(layer) for layer in sorted(layers) if str(layer) in latency.encode_ms
    }
    rows = {layer: times for layer, times in measured.items() if len(times) > 1}
    if not rows:
        return ""
    engines = ["torch", *latency.engine_ms]
    return markdown(
        ["layer", *engines],
        (
            [str(layer), *(f"{times[name]:.2f}" if name in times else "" for name in engines)]
            for layer, times in rows.items()
        ),
    )


def report(results: GridResults) -> str:
    """All tables of an evaluation, below a summary of the run."""
    settings = ", ".join(f"{name} {value}" for name, value in results.settings.items() if value)
    parts = [
        f"# {results.model} over {results.grid}",
        f"{results.date}, {results.machine}, seed {results.seed}; {settings}. "
        f"{len(results.tasks())} tasks, {len(results.scores)} scores. Numbers in percent.",
        "## Means per task type",
        task_type_table(results),
    ]
    if results.latency is not None:
        parts.append(latency_note(results.latency))
        if engines := engine_table(results.latency, results.granularities.layers):
            parts += ["## Milliseconds to encode one query, by engine", engines]
    for task_type in results.task_types():
        parts += [f"## {task_type} ({results.main_metric(task_type)})", task_table(results, task_type)]
    if results.two_stage_searches:
        full = results.granularities.full
        parts += [f"## Search in two stages, the second with {full}", two_stage_table(results, full)]
    if results.asymmetric_searches:
        dim = max(search.dim for search in results.asymmetric_searches)
        parts += [f"## Queries at one layer, documents at another, {dim} dims", asymmetric_table(results, dim)]
    return "\n\n".join(parts) + "\n"
