"""Read the data of a task from local files, or from the Hub if there are none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..data.stdlib_docs import split_by_module, stdlib_pairs
from .evaluators import STS, BitextMining, Classification, Evaluator, Geometry, PairClassification, Retrieval
from .tasks import HubData, Task


Rows = list[dict[str, Any]]
Read = Callable[[str], Rows]  # name of a split, or of a part of a collection -> its rows
COLLECTION_PARTS = ("corpus", "queries", "qrels")
ALIKE = 4.0  # lowest score of a positive pair, among the scores 0..5 of STS-B


def load_task(task: Task, data: Path | None = None) -> Evaluator:
    """
    Read the texts and gold labels of a task from local files, or from the Hub if there are none.

    Args:
        task ([`Task`]): Task to read.
        data (`Path`, *optional*): Folder of local data sets; `None` reads from the Hub.

    Returns:
        [`Evaluator`]

    Raises:
        ValueError: if the data is not found, or its labels are all equal. The message names the task and the places
            that were searched.
    """
    try:
        return READERS[task.task_type](task, partial(read_part, task, data))
    except ValueError as error:
        raise ValueError(f"Task {task.name!r}: {error}") from error


def read_part(task: Task, data: Path | None, part: str) -> Rows:
    """
    Read the rows of a split, or of a part of a collection.

    Raises:
        ValueError: if they are not found. The message names the places that were searched.
    """
    if task.builtin:
        return BUILTIN[task.name](part)
    looked = []
    if data is not None:
        file = data / (task.folder or task.name) / (f"{part}.tsv.gz" if part == "qrels" else f"{part}.jsonl.gz")
        if file.is_file():
            return _relabel(read_rows(file), task.labels)
        looked.append(f"{file} does not exist")
    else:
        looked.append("no folder of local data was given")
    if task.hub is None:
        looked.append("it is not on the Hub in this form")
    else:
        try:
            return download(task, part, task.hub)
        except OSError as error:  # offline, or the data set does not exist
            looked.append(f"{task.hub.path} could not be read from the Hub ({type(error).__name__})")
    raise ValueError(f"there is no {part!r}: {', and '.join(looked)}.")


def download(task: Task, part: str, hub: HubData) -> Rows:
    """Read the rows of a split, or of a part of a collection, from the Hub."""
    from datasets import load_dataset

    config, split = hub.config, hub.splits.get(part, part)
    if task.task_type == "retrieval":
        config, split = ("default", "test") if part == "qrels" else (part, part)
    dataset = load_dataset(hub.path, config, split=split)
    theirs = {ours: name for ours, name in hub.columns.items() if name in dataset.column_names}
    dataset = dataset.rename_columns({name: ours for ours, name in theirs.items()})
    return _relabel(dataset.to_list(), hub.labels)


def stdlib_rows(part: str) -> Rows:
    """A part of the collection `stdlib`: the test split of the documentation of Python's standard library."""
    _, pairs = split_by_module(stdlib_pairs())
    if part == "qrels":
        return [{"query-id": row, "corpus-id": row, "score": 1} for row in range(len(pairs))]
    return [{"id": row, "text": pair.summary if part == "queries" else pair.body} for row, pair in enumerate(pairs)]


BUILTIN: dict[str, Callable[[str], Rows]] = {"stdlib": stdlib_rows}


def read_rows(file: Path) -> Rows:
    """Rows of a gzipped JSON Lines file, or of a gzipped TSV file with a header (`.tsv.gz`)."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        if file.name.endswith(".tsv.gz"):
            header = next(lines).rstrip("\n").split("\t")
            return [dict(zip(header, line.rstrip("\n").split("\t"), strict=True)) for line in lines]
        return [json.loads(line) for line in lines]


def _relabel(rows: Rows, labels: Mapping[Any, int]) -> Rows:
    if not labels:
        return rows
    return [{**row, "label": labels[row["label"]]} for row in rows if row["label"] in labels]


def _pairs(task: Task, read: Read) -> tuple[Rows, dict[str, list[str]]]:
    """Rows of all splits, and the sentences of both columns."""
    rows = [row for split in task.splits for row in read(split)]
    return rows, {side: [row[side] for row in rows] for side in ("sentence1", "sentence2")}


def _read_sts(task: Task, read: Read) -> STS:
    rows, texts = _pairs(task, read)
    return STS(texts, [row["score"] for row in rows])


def _read_pair_classification(task: Task, read: Read) -> PairClassification:
    rows, texts = _pairs(task, read)
    return PairClassification(texts, [row["label"] for row in rows])


def _read_geometry(task: Task, read: Read) -> Geometry:
    rows, texts = _pairs(task, read)
    return Geometry(texts, [index for index, row in enumerate(rows) if row["score"] >= ALIKE])


def _read_bitext(task: Task, read: Read) -> BitextMining:
    return BitextMining(_pairs(task, read)[1])


def _read_classification(task: Task, read: Read) -> Classification:
    train, test = read(task.train_split), [row for split in task.splits for row in read(split)]
    return Classification(
        {"train": [row["text"] for row in train], "test": [row["text"] for row in test]},
        [row["label"] for row in train],
        [row["label"] for row in test],
    )


def _read_retrieval(task: Task, read: Read) -> Retrieval:
    """Queries without a relevant document are left out. A document is its title followed by its text."""
    corpus, queries, qrels = (read(part) for part in COLLECTION_PARTS)
    position = {str(row["id"]): index for index, row in enumerate(corpus)}
    relevant: dict[str, dict[int, float]] = {}
    for row in qrels:
        grade, document = float(row["score"]), position.get(str(row["corpus-id"]))
        if grade > 0 and document is not None:
            relevant.setdefault(str(row["query-id"]), {})[document] = grade
    asked = [row for row in queries if str(row["id"]) in relevant]
    return Retrieval(
        {
            "queries": [row["text"] for row in asked],
            "documents": [f"{row.get('title') or ''} {row['text']}".strip() for row in corpus],
        },
        [relevant[str(row["id"])] for row in asked],
    )


READERS: dict[str, Callable[[Task, Read], Evaluator]] = {
    "sts": _read_sts,
    "pair_classification": _read_pair_classification,
    "geometry": _read_geometry,
    "bitext": _read_bitext,
    "classification": _read_classification,
    "retrieval": _read_retrieval,
}
