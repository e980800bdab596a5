"""Tables of an evaluation, in Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from trainers.core.codes import CODES, FLOAT, bytes_per_vector
from trainers.core.granularity import Granularity
from trainers.evaluation.results import RESCORERS, GridResults, Latency, rescored_bytes

from .task_words import SCORED, about_task, tasks_counted, texts_counted, title_of


CODE_NOTE = (
    "The tables above are for vectors in float32. Here, each column is a precision: how the numbers of a vector are "
    "stored. In brackets: the share of the quality in float32 at the same size, and bytes (B) per vector."
)

RESCORED_NOTE = (
    "In brackets: the share of exact search in float32, and the bytes (B) per vector of all that is kept. By `codes` "
    "compares the query in float32 with the codes that found the documents."
)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table. Its first `words` columns hold words and are aligned left; the others are aligned right."""
    aligned = ["---"] * words + ["--:"] * (len(header) - words)
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, aligned, *escaped))


def percent(value: float) -> str:
    """A share in percent, with one decimal."""
    return f"{100 * value:.1f}"


def share(value: float, whole: float) -> str:
    """A share of a whole in percent, with one decimal; `-` if the whole is nothing."""
    return percent(value / whole) if whole else "-"


def sizes_in(results: GridResults) -> list[Granularity]:
    """The granularities in float32, which the tables of layers and dims show."""
    return [g for g in results.granularities if g.code == FLOAT]


def tasks_table(results: GridResults) -> str:
    """One row per task: its type, its main metric in words, how many texts it has, and what they are."""

    metrics = {score.task: score.metric for score in results.scores if score.main}

    def row(task: str, task_type: str) -> list[str]:
        return [
            f"`{task}`",
            title_of(task_type),
            SCORED.get(metrics[task], metrics[task]),
            texts_counted(results.texts.get(task, {})),
            about_task(results, task),
        ]

    rows = [row(task, task_type) for task_type in results.task_types() for task in results.tasks(task_type)]
    return markdown(["task", "type", "score", "texts", "what it is"], rows, words=5)


def task_type_table(results: GridResults) -> str:
    """One row per size in float32: the mean of each task type in percent, bytes per vector, and ms per query."""
    task_types = results.judged_task_types()
    quality = {task_type: results.quality(results.tasks(task_type)) for task_type in task_types}
    counted = [f"{task_type} ({tasks_counted(results, task_type)})" for task_type in task_types]
    header = ["granularity", *counted, "bytes per vector", *(["ms per query"] if results.latency else [])]

    def row(g: Granularity) -> list[str]:
        cells = [str(g), *(percent(quality[task_type][g]) for task_type in task_types)]
        cells.append(str(bytes_per_vector(g.code, g.dim)))
        return [*cells, f"{results.latency.of(g):.1f}"] if results.latency else cells

    return markdown(header, map(row, sizes_in(results)))


def task_table(results: GridResults, task_type: str) -> str:
    """One row per size in float32, one column per task of a type: its main metric, in percent if that is a quality."""
    quality = {task: results.quality([task]) for task in results.tasks(task_type)}
    spell = percent if task_type in results.judged_task_types() else "{:.3f}".format
    return markdown(
        ["granularity", *quality],
        ([str(g), *(spell(values[g]) for values in quality.values())] for g in sizes_in(results)),
    )


def code_table(results: GridResults, task_type: str) -> str:
    """
    One row per size, one column per precision: the mean over the tasks of a type in percent, and in brackets its share
    of that in float32 and the bytes per vector. Precisions that were not measured at a size stay blank.
    """
    quality, codes = results.quality(results.tasks(task_type)), results.granularities.codes[::-1]  # most bits first

    def cell(g: Granularity) -> str:
        if g not in quality:
            return ""
        exact = None if g.code == FLOAT else quality.get(g.size)
        return _with_cost(quality[g], exact, bytes_per_vector(g.code, g.dim))

    return markdown(
        ["size", *codes],
        (
            [str(size), *(cell(Granularity(size.layer, size.dim, code)) for code in codes)]
            for size in results.granularities.sizes
        ),
    )


def rescored_table(results: GridResults, size: Granularity) -> str:
    """
    The measured searches in a precision whose shortlist is rescored, at one size: one row per collection and
    precision, one per precision for the mean of several collections. Each value is the main metric in percent, and in
    brackets its share of exact search in float32, and the bytes per vector of all that is kept. Shortlists are the
    longest that was measured on every collection. What was not measured stays blank.
    """
    searches = [search for search in results.rescored_searches if search.granularity.size == size]
    longest: dict[str, int] = {}
    for search in searches:
        longest[search.task] = max(search.shortlist, longest.get(search.task, 0))
    tasks, shortlist = list(longest), min(longest.values())
    documents = {search.task: f"{search.documents:,}" for search in searches}
    values = {
        (search.task, search.code, search.rescore): search.value
        for search in searches
        if search.shortlist == shortlist
    }
    codes, rescorers = (
        [name for name in names if name in {key[place] for key in values}]
        for place, names in ((1, CODES), (2, RESCORERS))
    )
    groups = {task: [task] for task in tasks} | ({f"mean of {len(tasks)}": tasks} if len(tasks) > 1 else {})

    def row(name: str, group: Sequence[str], code: str) -> list[str]:
        quality, coded = results.quality(group), Granularity(size.layer, size.dim, code)
        found = [(quality.get(coded), bytes_per_vector(code, size.dim))]
        for rescore in rescorers:
            known = [values[task, code, rescore] for task in group if (task, code, rescore) in values]
            found.append((mean(known) if len(known) == len(group) else None, rescored_bytes(coded, rescore)))
        cells = ["" if value is None else _with_cost(value, quality.get(size), kept) for value, kept in found]
        return [name, documents.get(name, ""), code, *cells]

    return markdown(
        ["collection", "documents", "precision", "alone", *(f"{shortlist} rescored by {r}" for r in rescorers)],
        (row(name, group, code) for name, group in groups.items() for code in codes),
        words=1,
    )


def _with_cost(quality: float, exact: float | None, size: int) -> str:
    """A quality in percent, its share of that in float32 (if known), and bytes per vector: `53.0 (98.5%, 144 B)`."""
    known = [] if exact is None else [f"{share(quality, exact)}%"]
    return f"{percent(quality)} ({', '.join([*known, f'{size} B'])})"


def rescored_size(results: GridResults) -> Granularity:
    """The largest size with searches in a precision whose shortlist is rescored."""
    return max(search.granularity.size for search in results.rescored_searches)


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
                share(search.value, exact[search.task]),
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
        ValueError: if there is no search with asymmetric encoders at this dim.
    """
    searches = [search for search in results.asymmetric_searches if search.dim == dim]
    if not searches:
        measured = ", ".join(map(str, sorted({search.dim for search in results.asymmetric_searches})))
        raise ValueError(f"No queries at other layers were measured at {dim} dims; measured: {measured or 'none'}.")
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


def hybrid_table(results: GridResults) -> str:
    """
    One row per layer of the queries: the main metric in percent, mean over the retrieval tasks, of exact search with
    documents at the last layer, alone and with BM25 beside it. The last row is BM25 alone.

    Args:
        results ([`GridResults`]): Results with hybrid searches, which are shown at the widest dim.

    Returns:
        `str`: the table.
    """
    searches = results.hybrid_searches
    dim = max(search.dim for search in searches if search.dim is not None)
    values: dict[tuple[int | None, str | None], list[float]] = {}
    for search in searches:
        if search.dim in (dim, None):
            values.setdefault((search.query_layer, search.fusion), []).append(search.value)
    tasks = list(dict.fromkeys(search.task for search in searches))
    last = max(search.document_layer for search in searches if search.document_layer is not None)
    alone = {
        layer: value for (g, layer), value in results.asymmetric_quality(tasks).items() if g == Granularity(last, dim)
    }
    alone[last] = results.quality(tasks)[Granularity(last, dim)]
    rows = [
        [
            f"{layer}x{dim}",
            percent(alone[layer]) if layer in alone else "",
            *(percent(mean(values[layer, fusion])) for fusion in ("scores", "ranks")),
        ]
        for layer in sorted({layer for layer, _ in values if layer is not None})
    ]
    rows.append(["BM25 alone", "", *[percent(mean(values[None, None]))] * 2])
    return markdown(["queries", "embeddings", "with BM25, by scores", "with BM25, by ranks"], rows)


def latency_note(latency: Latency) -> str:
    """What the times of a latency are, for the text below a table of them."""
    return (
        f"ms per query: encoding in torch and exact search among {latency.documents:,} documents (threads: "
        f"{latency.threads}). Each time is {latency.statistic}."
    )


def engine_table(latency: Latency, layers: Collection[int]) -> str:
    """
    One row per layer, one column per runtime: milliseconds to encode one query.

    Args:
        latency ([`Latency`]): A latency.
        layers (`Collection[int]`): Rows, as far as another runtime than torch was measured at them.

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


def latency_report(latency: Latency, layers: Collection[int]) -> str:
    """[`latency_note`], and [`engine_table`] if another runtime than torch was measured at one of the layers."""
    engines = engine_table(latency, layers)
    return latency_note(latency) + (f"\n\nms to encode one query:\n\n{engines}" if engines else "")


def comparison_table(
    searches: Mapping[str, Mapping[Granularity, Mapping[str, float]]],
    metrics: Sequence[str],
    latency: Latency,
    baselines: Mapping[str, Mapping[str, float]],
) -> str:
    """
    Several encoders or ways to search on one task: one row per granularity, one column per search.

    Args:
        searches (`dict[str, dict[Granularity, dict[str, float]]]`): Heading -> granularity -> metric -> value.
        metrics (`Sequence[str]`): Metrics of a cell.
        latency ([`Latency`]): Latency of one query.
        baselines (`dict[str, dict[str, float]]`): Name of a row without granularities -> metric -> value.

    Returns:
        `str`: the table in Markdown, with values in percent.
    """

    def cell(scores: Mapping[str, float]) -> str:
        return " / ".join(percent(scores[metric]) for metric in metrics)

    rows = [
        [str(g), *(cell(found[g]) for found in searches.values()), f"{latency.of(g):.1f}", str(4 * g.dim)]
        for g in next(iter(searches.values()))
    ]
    rows += [[name, *[cell(scores)] * len(searches), "", ""] for name, scores in baselines.items()]
    return markdown(["granularity", *searches, "ms per query", "bytes per vector"], rows)


def parts_table(parts: Sequence[Mapping[str, Any]]) -> str:
    """One row per part of the training loss: its name, its weight where there are several, equation and papers."""
    weights = ["weight"] if len(parts) > 1 else []
    rows = [
        [
            part["name"],
            *(f"{part['weight']:g}" for _ in weights),
            part["equation"] or "not on record",
            ", ".join(f"[{paper['title']}]({address_of(paper)})" for paper in part["papers"]) or "none",
        ]
        for part in parts
    ]
    header = ["loss", *weights, "what it computes", "papers"]
    return markdown(header, rows, words=len(header))


def address_of(paper: Mapping[str, str]) -> str:
    """Address of a recorded paper. Older records name its arXiv identifier only."""
    return paper.get("link") or f"https://huggingface.co/papers/{paper['id']}"


def settings_table(settings: Mapping[str, Any]) -> str:
    """One row per setting of a run."""
    rows = ([f"`{name}`", f"`{value}`"] for name, value in settings.items())
    return markdown(["setting", "value"], rows, words=2)


def digest_table(digests: Mapping[str, str]) -> str:
    """One row per Python file: its name and its SHA-256."""
    return markdown(["file", "SHA-256"], ([f"`{name}`", f"`{digest}`"] for name, digest in digests.items()), words=2)


def has_codes(results: GridResults) -> bool:
    """Whether another precision than float32 was measured."""
    return results.granularities.codes != [FLOAT]


def report(results: GridResults) -> str:
    """All tables of an evaluation, below a summary of the run."""
    settings = ", ".join(f"{name} {value}" for name, value in results.settings.items() if value)
    parts = [
        f"# {results.model} over {results.grid}",
        f"{results.date}, {results.machine}, seed {results.seed}; {settings}. "
        f"{len(results.tasks())} tasks, {len(results.scores)} scores. Numbers in percent.",
        "## Tasks",
        tasks_table(results),
        "## Means per task type",
        task_type_table(results),
    ]
    if results.latency is not None:
        parts.append(latency_note(results.latency))
        if engines := engine_table(results.latency, results.granularities.layers):
            parts += ["## Milliseconds to encode one query, by runtime", engines]
    for task_type in results.task_types():
        parts += [f"## {task_type} ({results.main_metric(task_type)})", task_table(results, task_type)]
    if has_codes(results):
        parts += ["## Bits", CODE_NOTE]
        for task_type in results.judged_task_types():
            heading = f"### {task_type} ({results.main_metric(task_type)}) by precision"
            parts += [heading, code_table(results, task_type)]
    if results.rescored_searches:
        size = rescored_size(results)
        parts += [
            f"## Search at a precision, with rescoring, {size}",
            RESCORED_NOTE,
            rescored_table(results, size),
        ]
    if results.two_stage_searches:
        full = results.granularities.full
        parts += [f"## Search in two stages, the second with {full}", two_stage_table(results, full)]
    if results.asymmetric_searches:
        dim = max(search.dim for search in results.asymmetric_searches)
        parts += [f"## Queries at one layer, documents at another, {dim} dims", asymmetric_table(results, dim)]
    if results.hybrid_searches:
        parts += ["## BM25 beside embeddings, documents at the last layer", hybrid_table(results)]
    return "\n\n".join(parts) + "\n"
