"""Tasks by name, over local files where they are and over the Hub where they are not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_dataset

from .protocols import STS, BitextMining, Classification, Geometry, PairClassification, Protocol, Retrieval


Rows = list[dict[str, Any]]
Read = Callable[[str], Rows]  # the rows of a split, or of a part of a collection
COLLECTION_PARTS = ("corpus", "queries", "qrels")
ALIKE = 4.0  # of STS-B's scores 0..5: pairs that mean the same


@dataclass(frozen=True)
class HubData:
    """
    The same data on the Hub.

    Args:
        path (`str`): Data set.
        config (`str`, *optional*): Its configuration.
        columns (`dict[str, str]`, *optional*): Our column -> its column, where they differ.
        labels (`dict`, *optional*): Its label -> ours; rows of other labels are left out. Empty keeps all.
        splits (`dict[str, str]`, *optional*): Our split -> its split, where they differ.
    """

    path: str
    config: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[Any, int] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """
    A data set and the protocol it is used with.

    Args:
        name (`str`): What users call it.
        protocol (`type[Protocol]`): What is done with it.
        folder (`str`, *optional*): Folder of the local files; `None` is the name.
        splits (`tuple[str, ...]`, *optional*, defaults to `("test",)`): What is scored, joined; local files
            `{split}.jsonl.gz`.
        train_split (`str`, *optional*, defaults to `"train"`): What a classifier is fitted on.
        labels (`dict[int, int]`, *optional*): Local label -> label; rows of other labels are left out; empty keeps
            all.
        hub ([`HubData`], *optional*): The same on the Hub; `None` where it is not there in the same form.
    """

    name: str
    protocol: type[Protocol]
    folder: str | None = None
    splits: tuple[str, ...] = ("test",)
    train_split: str = "train"
    labels: Mapping[int, int] = field(default_factory=dict)
    hub: HubData | None = None

    def load(self, data: Path | None = None) -> Protocol:
        """
        Read the texts and the gold: from local files, or from the Hub where there are none.

        Args:
            data (`Path`, *optional*): Folder of the local data sets; `None` goes to the Hub.

        Returns:
            [`Protocol`]

        Raises:
            ValueError: if there is no data, and says what is missing and where it was looked for; or labels are of one
                class. Names the task.
        """
        try:
            return READERS[self.protocol](self, lambda part: self._read(part, data))
        except ValueError as error:
            raise ValueError(f"Task {self.name!r}: {error}") from error

    def _read(self, part: str, data: Path | None) -> Rows:
        """Rows of a split, or of a part of a collection."""
        looked = []
        if data is not None:
            file = data / (self.folder or self.name) / (f"{part}.tsv.gz" if part == "qrels" else f"{part}.jsonl.gz")
            if file.is_file():
                return _relabel(read_rows(file), self.labels)
            looked.append(f"{file} is not there (the folder is M3BERT_DATA)")
        else:
            looked.append("no folder of local data was given (M3BERT_DATA)")
        if self.hub is None:
            looked.append("it is not on the Hub in this form")
        else:
            try:
                return self._download(part, self.hub)
            except OSError as error:  # not online, or no such data set
                looked.append(f"{self.hub.path} could not be had from the Hub ({type(error).__name__})")
        raise ValueError(f"there is no {part!r}: {', and '.join(looked)}.")

    def _download(self, part: str, hub: HubData) -> Rows:
        config, split = hub.config, hub.splits.get(part, part)
        if self.protocol is Retrieval:
            config, split = ("default", "test") if part == "qrels" else (part, part)
        dataset = load_dataset(hub.path, config, split=split)
        theirs = {ours: name for ours, name in hub.columns.items() if name in dataset.column_names}
        dataset = dataset.rename_columns({name: ours for ours, name in theirs.items()})
        return _relabel(dataset.to_list(), hub.labels)


def read_rows(file: Path) -> Rows:
    """Rows of a gzipped JSON Lines file, or of a gzipped table with a header (`.tsv.gz`)."""
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
    """Rows of all splits, and their sentences."""
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
    """Queries without a relevant document are left out; a document is its title and its text."""
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


READERS: dict[type[Protocol], Callable[[Task, Read], Protocol]] = {
    STS: _read_sts,
    PairClassification: _read_pair_classification,
    Geometry: _read_geometry,
    BitextMining: _read_bitext,
    Classification: _read_classification,
    Retrieval: _read_retrieval,
}


def _sts(name: str, hub: str | None = None, **options: Any) -> Task:
    return Task(name, STS, hub=HubData(hub) if hub else None, **options)


ENTAILED_OR_CONTRADICTED = {0: 1, 2: 0}  # neutral pairs are left out
NLI_COLUMNS = {"sentence1": "premise", "sentence2": "hypothesis"}
BEIR_COLUMNS = {"id": "_id"}
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _sts("stsb", "mteb/stsbenchmark-sts"),
        *(_sts(f"sts{year}", f"mteb/sts{year}-sts") for year in (12, 13, 14, 15, 16)),
        _sts("sick"),
        _sts("sickr", folder="sick", splits=("train", "dev", "test")),
        Task("banking77", Classification, hub=HubData("mteb/banking77")),
        Task("emotion", Classification, hub=HubData("mteb/emotion")),
        Task("tweeteval-emotion", Classification, hub=HubData("cardiffnlp/tweet_eval", "emotion")),
        # The official training texts are not among the local files, but the ones they were drawn from.
        Task(
            "tweeteval-sentiment",
            Classification,
            train_split="train_reconstructed",
            hub=HubData("cardiffnlp/tweet_eval", "sentiment", splits={"train_reconstructed": "train"}),
        ),
        Task("tweet-sentiment-extraction", Classification, hub=HubData("mteb/tweet_sentiment_extraction")),
        Task("mrpc", PairClassification, hub=HubData("nyu-mll/glue", "mrpc")),
        Task("wic", PairClassification),
        Task(
            "scitail",
            PairClassification,
            hub=HubData("allenai/scitail", "tsv_format", NLI_COLUMNS, {"entails": 1, "neutral": 0}),
        ),
        Task(
            "snli",
            PairClassification,
            labels=ENTAILED_OR_CONTRADICTED,
            hub=HubData("stanfordnlp/snli", None, NLI_COLUMNS, ENTAILED_OR_CONTRADICTED),
        ),
        *(Task(name, Retrieval) for name in ("cranfield", "cisi", "npl", "msmarco-mini")),
        *(
            Task(name, Retrieval, hub=HubData(f"mteb/{name}", columns=BEIR_COLUMNS))
            for name in ("scifact", "nfcorpus", "fiqa", "arguana")
        ),
        Task("stsb-geometry", Geometry, folder="stsb", hub=HubData("mteb/stsbenchmark-sts")),
    )
}
BITEXT_LANGUAGES = ("ara", "bul", "cmn", "deu", "ell", "fra", "hin", "rus", "spa", "swh", "tha", "tur", "urd", "vie")
STS_NAMES = tuple(name for name, task in TASKS.items() if task.protocol is STS)
CLASSIFICATION_NAMES = tuple(name for name, task in TASKS.items() if task.protocol is Classification)
LOCAL_RETRIEVAL = ("cranfield", "cisi", "npl", "msmarco-mini")
GROUPS: dict[str, tuple[str, ...]] = {
    # The data sets of MIPIC, MIC and IBKD, and for those of m3BERT and QAMA, which are too large, small collections.
    "seeds": (*STS_NAMES, *CLASSIFICATION_NAMES, "mrpc", "wic", "scitail", *LOCAL_RETRIEVAL, "stsb-geometry"),
    "sts": STS_NAMES,
    "classification": CLASSIFICATION_NAMES,
    "pair_classification": ("mrpc", "wic", "scitail", "snli"),
    "retrieval": LOCAL_RETRIEVAL,
    "beir": ("scifact", "nfcorpus", "fiqa", "arguana"),
    "bitext": tuple(f"tatoeba-{language}" for language in BITEXT_LANGUAGES),
    "geometry": ("stsb-geometry",),
}


def find_task(name: str) -> Task:
    """
    The task of this name. Besides those of [`TASKS`] there is one for each language of two collections:
    `tatoeba-deu` (three letters), `xnli-de` (two).

    Raises:
        ValueError: if there is none; names those there are.
    """
    if name in TASKS:
        return TASKS[name]
    collection, _, language = name.partition("-")
    if collection == "tatoeba" and language:
        pair = f"{language}-eng"
        return Task(
            name,
            BitextMining,
            "tatoeba",
            (pair,),
            hub=HubData("mteb/tatoeba-bitext-mining", pair, splits={pair: "test"}),
        )
    if collection == "xnli" and language:
        split = f"{language}-dev"
        hub = HubData("facebook/xnli", language, NLI_COLUMNS, ENTAILED_OR_CONTRADICTED, {split: "validation"})
        return Task(name, PairClassification, "xnli", (split,), labels=ENTAILED_OR_CONTRADICTED, hub=hub)
    raise ValueError(
        f"There is no task {name!r}. Tasks: {', '.join(TASKS)}, tatoeba-LANGUAGE, xnli-LANGUAGE; "
        f"groups: {', '.join(GROUPS)}."
    )


def find_tasks(names: Iterable[str]) -> list[Task]:
    """Tasks of these names and groups, each once, in this order."""
    members: Sequence[str] = [member for name in names for member in GROUPS.get(name, (name,))]
    return [find_task(name) for name in dict.fromkeys(members)]
