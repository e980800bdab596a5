"""Tables of an evaluation, in Markdown, and its tasks in words."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from ..encode.granularity import Granularity
from ..encode.precisions import FLOAT, PRECISIONS, bytes_per_vector
from ..evaluation.results import RESCORERS, GridResults, Latency, rescored_bytes
from ..evaluation.tasks import TASKS


TITLES = {
    "sts": "semantic similarity",
    "classification": "classification",
    "pair_classification": "pair classification",
    "retrieval": "retrieval",
    "bitext": "bitext mining",
    "geometry": "geometry of the embeddings",
}
SCORED = {
    "spearman": "Spearman correlation of cosines with the scores of people",
    "macro_f1": "F1, averaged over the classes, of a logistic regression that is fitted on all training texts; not "
    "MTEB's protocol, which fits on a few texts per class",
    "accuracy": "share of right answers",
    "ndcg@10": "how high the right documents rank among the first 10 that are found (nDCG@10)",
    "uniformity": "how far the embeddings spread (lower: farther)",
}


EMPTY = "\0"  # in place of an empty expression of a template


def title_of(task_type: str) -> str:
    """A task type in words."""
    kind = task_type.removeprefix("mteb_")
    words = TITLES.get(kind, kind.replace("_", " "))
    return words if kind == task_type else f"{words} (MTEB)"


def tasks_counted(results: GridResults, task_type: str) -> str:
    """`mean of 3 tasks`, or the name of the only task of a type."""
    tasks = results.tasks(task_type)
    return tasks[0] if len(tasks) == 1 else f"mean of {len(tasks)} tasks"


def about_task(results: GridResults, task: str) -> str:
    """The texts of a task in words; empty if unknown."""
    if task in results.settings.get("own_data", {}):
        return f"own data: `{dataset_of(results, task)}`"
    if task in results.settings.get("mteb", {}):
        return f"MTEB's task by MTEB's own protocol, on `{dataset_of(results, task)}`"
    return TASKS[task].about if task in TASKS else ""


def dataset_of(results: GridResults, task: str) -> str | None:
    """Hub id of the data of a task, or the file or folder of your own data; `None` if it is neither."""
    if described := results.settings.get("mteb", {}).get(task):
        return described["dataset"]
    hub = TASKS[task].hub if task in TASKS else None
    return results.settings.get("own_data", {}).get(task) or (hub.path if hub else None)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table. Its first `words` columns hold words and are aligned left; the others are aligned right."""
    aligned = ["---"] * words + ["--:"] * (len(header) - words)
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, aligned, *escaped))


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def milliseconds(value: float | None, digits: int = 1) -> str:
    """A time; empty if it was not measured."""
    return "" if value is None or math.isinf(value) else f"{value:.{digits}f}"


def share(value: float, whole: float) -> str:
    """A share of a whole in percent, with one decimal; `-` if the whole is nothing."""
    return percent(value / whole) if whole else "-"


def sizes_in(results: GridResults) -> list[Granularity]:
    """The granularities in float32, which the tables of layers and dims show."""
    return [g for g in results.granularities if g.code == FLOAT]


def tasks_table(results: GridResults) -> str:
    """One row per task: its type, its main metric in words, how many texts it has, and what they are."""
    metrics = {score.task: score.metric for score in results.scores if score.main}
    rows = []
    for task_type in results.task_types():
        for task in results.tasks(task_type):
            texts = results.texts.get(task, {})
            counted = ", ".join(f"{number:,} {name}" for name, number in texts.items() if name != "sentence2")
            counted = counted.replace("sentence1", "pairs")
            score = SCORED.get(metrics[task], metrics[task])
            rows.append([f"`{task}`", title_of(task_type), score, counted, about_task(results, task)])
    return markdown(["task", "type", "score", "texts", "what it is"], rows, words=5)


def task_type_table(results: GridResults, every_task: bool = False) -> str:
    """One row per size in float32: the mean of each task type in percent, with `every_task` also the score of each of
    its tasks, bytes per vector, and ms per query."""
    latency, columns = results.latency, {}
    for task_type in results.judged_task_types():
        tasks = results.tasks(task_type)
        columns[f"{task_type} ({tasks_counted(results, task_type)})"] = tasks
        columns |= {task: [task] for task in tasks if every_task and len(tasks) > 1}
    header, means = ["granularity", *columns], [results.quality(tasks) for tasks in columns.values()]
    rows = []
    for g in sizes_in(results):
        row = [str(g), *(percent(quality[g]) for quality in means), str(bytes_per_vector(g.code, g.dim))]
        rows.append([*row, *([milliseconds(latency.of(g))] if latency else [])])
    return markdown([*header, "bytes per vector", *(["ms per query"] if latency else [])], rows)


def task_table(results: GridResults, task_type: str) -> str:
    """One row per size in float32, one column per task of a type: its main metric, in percent if that is a quality."""
    quality = {task: results.quality([task]) for task in results.tasks(task_type)}
    spell = percent if task_type in results.judged_task_types() else "{:.3f}".format
    rows = ([str(g), *(spell(values[g]) for values in quality.values())] for g in sizes_in(results))
    return markdown(["granularity", *quality], rows)


def code_table(results: GridResults, task_type: str) -> str:
    """One row per size, one column per precision: the mean over the tasks of a type in percent, and in brackets its
    share of that in float32 and the bytes per vector. What was not measured stays blank."""
    quality, codes = results.quality(results.tasks(task_type)), results.granularities.codes[::-1]  # most bits first
    rows = []
    for size in results.granularities.sizes:
        coded = [replace(size, code=code) for code in codes]
        exact = quality.get(size)
        costs = [(g, None if g.code == FLOAT else exact, bytes_per_vector(g.code, g.dim)) for g in coded]
        rows.append([str(size), *(_with_cost(quality.get(g), whole, stored) for g, whole, stored in costs)])
    return markdown(["size", *codes], rows)


def rescored_table(results: GridResults, size: Granularity) -> str:
    """One row per collection, or the mean of all, and precision whose shortlist is rescored, at one size: the main
    metric in percent, and in brackets its share of exact search in float32, and the bytes per vector of all that is
    kept. Shortlists are the longest that was measured on every collection. What was not measured stays blank."""
    searches = [search for search in results.rescored_searches if search.granularity.size == size]
    documents = {search.task: f"{search.documents:,}" for search in searches}
    tasks, codes, rescorers = [*documents], {s.code for s in searches}, {s.rescore for s in searches}
    shortlist = min(max(s.shortlist for s in searches if s.task == task) for task in tasks)
    groups = {task: [task] for task in tasks} | ({f"mean of {len(tasks)}": tasks} if len(tasks) > 1 else {})
    shown = [name for name in RESCORERS if name in rescorers]
    rows = []
    for name, group in groups.items():
        quality, rescored = results.quality(group), results.rescored_quality(group)
        for code in (code for code in PRECISIONS if code in codes):
            g = replace(size, code=code)
            searched = [(quality.get(g), bytes_per_vector(code, g.dim))]
            searched += [(rescored.get((g, by, shortlist)), rescored_bytes(g, by)) for by in shown]
            cells = (_with_cost(value, quality.get(size), stored) for value, stored in searched)
            rows.append([name, documents.get(name, ""), code, *cells])
    header = ["collection", "documents", "precision", "alone", *(f"{shortlist} rescored by {by}" for by in shown)]
    return markdown(header, rows)


def _with_cost(quality: float | None, exact: float | None, size: int) -> str:
    """A quality in percent, its share of that in float32 (if known), and bytes per vector: `53.0 (98.5%, 144 B)`."""
    if quality is None:
        return ""
    return f"{percent(quality)} ({'' if exact is None else f'{share(quality, exact)}%, '}{size} B)"


def two_stage_table(results: GridResults, granularity: Granularity) -> str:
    """One row per measured search in two stages whose second stage uses `granularity`, with shares of the
    multiplications and of the quality of the exact search."""
    rows = [
        [
            *(s.task, f"{s.documents:,}", str(s.first_dim), str(s.shortlist), percent(s.products_share)),
            *(percent(s.value), share(s.value, results.quality([s.task])[granularity])),
        ]
        for s in results.two_stage_searches
        if (s.layer, s.second_dim) == (granularity.layer, granularity.dim)
    ]
    header = ["collection", "documents", "first dim", "shortlist", "multiplications, %", "quality", "of exact, %"]
    return markdown(header, rows)


def asymmetric_table(results: GridResults, dim: int) -> str:
    """One row per query layer: the main metric of each retrieval task in percent, with the documents at the last layer
    and at the layer of the query, and ms per query if latency was measured. In the last row these are one search."""
    searches, latency = [search for search in results.asymmetric_searches if search.dim == dim], results.latency
    last = max(search.document_layer for search in searches)
    values = {(s.task, s.query_layer or 0): s.value for s in searches if s.document_layer == last}
    same = {task: results.quality([task]) for task, _ in values}
    rows = []
    for g in (Granularity(layer, dim) for layer in sorted({layer for _, layer in values} | {last})):
        row = [str(g.layer)]
        for task, quality in same.items():
            row += [percent(values.get((task, g.layer), quality[g])), percent(quality[g])]
        rows.append([*row, *([milliseconds(latency.of(g))] if latency else [])])
    header = [f"{task}, {place}" for task in same for place in (f"documents at {last}", "same layer")]
    return markdown(["query layer", *header, *(["ms per query"] if latency else [])], rows)


def hybrid_table(results: GridResults) -> str:
    """One row per layer of the queries, and one for BM25 alone: the mean of the main metric over the retrieval tasks
    in percent, with documents at the last layer and the widest dim, of exact search alone and with BM25. Empty without
    searches that have both."""
    searches = results.hybrid_searches
    if not any(search.dim for search in searches):
        return ""
    full = max((Granularity(s.document_layer or 0, s.dim) for s in searches if s.dim), key=lambda g: g.dim)
    values: dict[tuple[int | None, str | None], list[float]] = {}
    for search in searches:
        if search.dim in (full.dim, 0):
            values.setdefault((search.query_layer, search.fusion), []).append(search.value)
    tasks = {search.task for search in searches}
    alone = {layer: value for (g, layer), value in results.asymmetric_quality(tasks).items() if g == full}
    alone[full.layer] = results.quality(tasks)[full]
    rows = [
        [
            *(f"{layer}x{full.dim}", percent(alone[layer]) if layer in alone else ""),
            *(percent(mean(values[layer, fusion])) for fusion in ("scores", "ranks")),
        ]
        for layer in sorted({layer for layer, _ in values if layer is not None})
    ]
    rows.append(["BM25 alone", "", *[percent(mean(values[None, None]))] * 2])
    return markdown(["queries", "embeddings", "with BM25, by scores", "with BM25, by ranks"], rows)


def engine_table(latency: Latency, layers: Collection[int]) -> str:
    """One row per layer at which another runtime than torch was measured, one column per runtime: milliseconds to
    encode one query. Empty if there is no row."""
    times = {layer: latency.encode_ms_by_engine(layer) for layer in sorted(layers) if str(layer) in latency.encode_ms}
    engines = ["torch", *latency.engine_ms]
    rows = [
        [str(layer), *(milliseconds(engine_ms.get(name), 2) for name in engines)]
        for layer, engine_ms in times.items()
        if len(engine_ms) > 1
    ]
    return markdown(["layer", *engines], rows) if rows else ""


def latency_report(latency: Latency, layers: Collection[int]) -> str:
    """The conditions of a latency, and [`engine_table`]."""
    engines = engine_table(latency, layers)
    return (
        f"ms per query: encoding in torch and exact search among {latency.documents:,} documents (threads: "
        f"{latency.threads}). Each time is {latency.statistic}."
    ) + (f"\n\nms to encode one query:\n\n{engines}" if engines else "")


def paper_link(paper: Mapping[str, str]) -> str:
    """A link to a paper on record. Older records name only its arXiv identifier."""
    return f"[{paper['title']}]({paper.get('link') or 'https://huggingface.co/papers/' + paper['id']})"


def parts_table(parts: Sequence[Mapping[str, Any]]) -> str:
    """One row per part of the training loss: its name, its weight where there are several, equation and papers."""
    weighted = len(parts) > 1
    rows = []
    for part in parts:
        papers = ", ".join(map(paper_link, part["papers"])) or "none"
        weight = [f"{part['weight']:g}"] if weighted else []
        rows.append([part["name"], *weight, part["equation"] or "not on record", papers])
    header = ["loss", *(["weight"] if weighted else []), "what it computes", "papers"]
    return markdown(header, rows, words=len(header))


def key_table(values: Mapping[str, Any], key: str, value: str) -> str:
    """One row per key and value; `key` and `value` are the header."""
    return markdown([key, value], ([f"`{name}`", f"`{content}`"] for name, content in values.items()), words=2)


def render(template: str, **values: Any) -> str:
    """Fill in a template in the folder of this file. It finds the tables of this module under `tables`. A line whose
    expressions are all empty is left out, and so are repeated blank lines."""
    import jinja2  # not at the top: the command that chooses a granularity answers at once

    def marked(value: Any) -> Any:
        return EMPTY if type(value) is jinja2.Undefined or value in ("", None) else value

    options: dict[str, Any] = {"undefined": jinja2.StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), finalize=marked, **options)
    text = environment.get_template(template).render(tables=sys.modules[__name__], **values)
    text = re.sub(rf"^[{EMPTY} ]*{EMPTY} *(\n|\Z)", "", text, flags=re.MULTILINE).replace(EMPTY, "")
    return re.sub(r"\n{3,}", "\n\n", text)


def report(results: GridResults) -> str:
    """All tables of an evaluation, below a summary of the run."""
    return render("report.md", results=results).strip() + "\n"
