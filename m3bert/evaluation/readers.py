"""Read the data of a task from local files, or from the Hub if there are none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..data.formats import number_of, rows_of, text_of
from ..data.hub_data import load_hub
from ..data.stdlib_docs import split_by_module, stdlib_pairs
from ..utils.words import words
from .evaluators import STS, BitextMining, Classification, Evaluator, Geometry, PairClassification, Retrieval
from .tasks import HubData, Task


logger = logging.getLogger(__name__)
Rows = list[dict[str, Any]]
Name = TypeVar("Name")
Value = TypeVar("Value")
Read = Callable[[str], Rows]  # name of a split, or of a part of a collection -> its rows
ALIKE = 4.0  # lowest score of a positive pair, among the scores 0..5 of STS-B


def load_task(task: Task, data: Path | None = None) -> Evaluator:
    """
    Read the texts and gold labels of a task from the folder `data`, or from the Hub if they are not there. ValueError,
    which names the task and the searched places, if the data is not found.
    """
    try:
        return READERS[task.task_type](task, partial(read_part, task, data))
    except ValueError as error:
        raise ValueError(f"Task {task.name!r}: {error}") from error


def read_part(task: Task, data: Path | None, part: str) -> Rows:
    """The rows of a split, or of a part of a collection. ValueError if there are none: names the searched places."""
    if task.read is not None:
        return task.read(part)
    if task.builtin:
        return stdlib_rows(part)
    file = Path(data or "M3BERT_DATA", task.folder or task.name, f"{part}.{'tsv' if part == 'qrels' else 'jsonl'}.gz")
    if data is not None and file.is_file():
        return _relabel(read_rows(file), task.labels)
    if task.hub is None:
        raise ValueError(f"there is no {part!r}: {file} does not exist, and the Hub has no such data set.")
    try:
        return download(task, part, task.hub)
    except OSError as error:  # offline, or the data set does not exist
        raise ValueError(f"there is no {part!r}: {file} does not exist, and {error}") from error


def download(task: Task, part: str, hub: HubData) -> Rows:
    """Read the rows of a split, or of a part of a collection, from the Hub."""
    config, split = hub.config, part
    if task.task_type == "retrieval":
        config, split = (config or "default", "test") if part == "qrels" else (part, part)
    dataset = load_hub(hub.path, config, split=hub.splits.get(part, split))
    theirs = {ours: name for ours, name in hub.columns.items() if name in dataset.column_names}
    dataset = dataset.rename_columns({name: ours for ours, name in theirs.items()})
    return _relabel(dataset.to_list(), hub.labels)


def stdlib_rows(part: str) -> Rows:
    """A part of the collection `stdlib`: the test split of the documentation of Python's standard library."""
    _, pairs = split_by_module(stdlib_pairs())
    if part == "qrels":
        return [{"query-id": row, "corpus-id": row, "score": 1} for row in range(len(pairs))]
    return [{"id": row, "text": pair.summary if part == "queries" else pair.body} for row, pair in enumerate(pairs)]


def read_rows(file: Path) -> Rows:
    """The rows of a JSON Lines file, or of a TSV file whose quotes are text. Raises as [`rows_of`]."""
    return [*rows_of(str(file), quoted=False)]


def first_of(members: Iterable[object]) -> str:
    """The first three different members of a list, for a message."""
    different = [str(member) for member in dict.fromkeys(members)]
    return ", ".join([*different[:3], *(["..."] if len(different) > 3 else [])])


def _relabel(rows: Rows, labels: Mapping[Any, int]) -> Rows:
    if not labels:
        return rows
    return [{**row, "label": labels[row["label"]]} for row in rows if row["label"] in labels]


def _pairs(task: Task, read: Read) -> tuple[Rows, dict[str, list[str]]]:
    """Rows of all splits, and the sentences of both columns."""
    rows = [row for split in task.splits for row in read(split)]
    return rows, {side: [row[side] for row in rows] for side in ("sentence1", "sentence2")}


def _read_pairs(task: Task, read: Read) -> Evaluator:
    rows, texts = _pairs(task, read)
    if task.task_type == "pair_classification":
        return PairClassification(texts, [row["label"] for row in rows])
    scores = [row["score"] for row in rows]
    if task.task_type == "sts":
        return STS(texts, scores)
    return Geometry(texts, [index for index, score in enumerate(scores) if score >= ALIKE])


def _read_bitext(task: Task, read: Read) -> BitextMining:
    if not task.parallel:
        return BitextMining(_pairs(task, read)[1])
    sides = ((row["sentence1"] for row in read(split)) for split in task.splits)
    first, second = zip(*dict.fromkeys(zip(*sides, strict=True)), strict=True)
    return BitextMining({"sentence1": first, "sentence2": second})


def _read_classification(task: Task, read: Read) -> Classification:
    train, test = read(task.train_split), [row for split in task.splits for row in read(split)]
    return Classification(
        {"train": [row["text"] for row in train], "test": [row["text"] for row in test]},
        [row["label"] for row in train],
        [row["label"] for row in test],
    )


def _read_retrieval(task: Task, read: Read) -> Retrieval:
    """
    Queries without a relevant document are left out. A document is its title followed by its text. Judgements of
    documents or queries that are not there are counted in a warning. Without a score (no column, an empty cell, NaN),
    a judgement says "relevant". What is listed several times counts once, and must say the same each time. A query
    that is a document, with the same id and words, is left out of its ranking (as in BEIR), unless that document
    is judged relevant.
    """
    corpus = [
        (text_of(row["id"]), text_of(row.get("title")) or "", text_of(row["text"]) or "") for row in read("corpus")
    ]
    documents = _unique(
        ((id_, f"{title} {body}".strip()) for id_, title, body in corpus), "corpus: the texts of id {!r}"
    )
    bodies = {id_: body for id_, _, body in corpus}
    queries = _unique(
        ((text_of(row["id"]), text_of(row["text"]) or "") for row in read("queries")), "queries: the texts of id {!r}"
    )
    judged = [
        ((text_of(row["query-id"]), text_of(row["corpus-id"])), 1.0 if grade is None else grade)
        for row in read("qrels")
        for grade in [number_of(row.get("score"))]
    ]
    unknown = {
        "documents": [document for (_, document), _ in judged if document not in documents],
        "queries": [query for (query, _), _ in judged if query not in queries],
    }
    position = {name: index for index, name in enumerate(documents)}
    relevant: dict[str | None, dict[int, float]] = {}
    for (query, document), grade in _unique(judged, "qrels: the scores of query and document {!r}").items():
        if grade > 0 and query in queries and document in documents:
            relevant.setdefault(query, {})[position[document]] = grade
    for what, ids in unknown.items():
        if ids:
            named = f"{len(ids)} of {len(judged)} qrels name unknown {what} ({first_of(ids)})"
            logger.warning(f"Task {task.name!r}: {named}; they are left out.")
    if not relevant:
        raise ValueError("no query has a relevant document.")
    if deep := [k for k in task.recall if k > len(documents)]:
        named = ", ".join(f"recall@{k}" for k in deep)
        logger.warning(f"Task {task.name!r}: {named} is left out: the collection has {len(documents)} documents.")
    asked = [query for query in queries if query in relevant]
    self_rows = [-1] * len(asked)
    for number, query in enumerate(asked):
        if query in documents and position[query] not in relevant[query]:
            if words(queries[query]) in (words(documents[query]), words(bodies[query])):
                self_rows[number] = position[query]
    return Retrieval(
        {"queries": [queries[query] for query in asked], "documents": list(documents.values())},
        [relevant[query] for query in asked],
        task.recall,
        self_rows if max(self_rows) >= 0 else (),
    )


def _unique(named: Iterable[tuple[Name, Value]], what: str) -> dict[Name, Value]:
    """Drop duplicates by name. Raises a ValueError if two values of one name differ."""
    values: dict[Name, Value] = {}
    for name, value in named:
        if values.setdefault(name, value) != value:
            raise ValueError(f"{what.format(name)} differ: {values[name]!r:.80} and {value!r:.80}. Keep one of them.")
    return values


READERS: dict[str, Callable[[Task, Read], Evaluator]] = {
    **dict.fromkeys(("sts", "pair_classification", "geometry"), _read_pairs),
    "bitext": _read_bitext,
    "classification": _read_classification,
    "retrieval": _read_retrieval,
}
