"""
Tasks made of your own data: a collection to search, scored or labelled pairs, and labelled texts.

The data is a local file or folder, or a data set on the Hub: `user/name`, or `user/name:configuration`. What exists
locally comes first.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ..core.dataset_checks import require_columns
from ..data.files import FORMATS, load_files, suffix_of
from ..data.hub_data import hub_configs, hub_splits, load_hub
from .readers import COLLECTION_PARTS, Rows, first_of, read_rows
from .tasks import GROUPS, TASKS, HubData, Task


logger = logging.getLogger(__name__)
HUB_SOURCE = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+))?")  # id, and configuration
PAIRS_COLUMNS = ("sentence1", "sentence2")
THIRD_COLUMNS = ("score", "label")
LABELS_COLUMNS = ("text", "label")
COLUMNS = {"corpus": ("id", "text"), "queries": ("id", "text"), "qrels": ("query-id", "corpus-id", "score")}
TEST_SHARE = 0.2  # of the texts of a single file
SPLIT_SEED = 0


def collection_task(source: str, *, split: str = "test") -> Task:
    """
    Retrieval in your own collection, in the layout of BEIR.

    Args:
        source (`str`): A folder with `corpus.jsonl` (`_id`, `text` and, if you like, `title`), `queries.jsonl` (`_id`,
            `text`) and `qrels/{split}.tsv` (header `query-id`, `corpus-id`, `score`), each plain or gzipped;
            `qrels.tsv` stands for `qrels/test.tsv`. Or a data set on the Hub with the configurations `corpus`,
            `queries` and `default` or `qrels`, with the same columns.
        split (`str`, *optional*, defaults to `"test"`): Which relevance judgements to score.

    Returns:
        [`Task`]: named after the folder or the data set.

    Raises:
        ValueError: if a file is missing (here), or empty or malformed (when it is read). The message names it.
        OSError: if the data set cannot be read from the Hub.
    """
    hub = hub_source(source)
    if hub is None and not Path(source).is_dir():
        raise ValueError(
            f"{source} is not a folder: a collection has corpus.jsonl, queries.jsonl and qrels/{split}.tsv."
        )
    if hub is None:
        files = {part: _part_file(Path(source), part, split) for part in COLLECTION_PARTS}
        read = partial(_read_part, files)
    else:
        read = partial(_download_part, hub, split)
    return _own_task(source, "retrieval", hub, read, split)


def pairs_task(source: str, *, columns: Sequence[str] = (), split: str = "test") -> Task:
    """
    Pairs of your own texts with a number: semantic textual similarity if there are more than two different numbers,
    pair classification if all are 0 or 1.

    Args:
        source (`str`): A file (`.csv`, `.tsv`, `.jsonl` or `.parquet`, also gzipped), a folder of files that are named
            after their splits, or a data set on the Hub.
        columns (`Sequence[str]`, *optional*): The columns of both texts and of the number. Default: `sentence1`,
            `sentence2`, and `score` or `label`.
        split (`str`, *optional*, defaults to `"test"`): Split of a folder or of a data set on the Hub.

    Returns:
        [`Task`]: named after the file, the folder or the data set. Rows that lack a text are left out with a warning.

    Raises:
        ValueError: if there is no such file, column or text, or a number is not finite. The message names it.
        OSError: if the data set cannot be read from the Hub.
    """
    hub = hub_source(source)
    table = _read_table(source, hub, split)
    third = next((name for name in THIRD_COLUMNS if name in table.column_names), THIRD_COLUMNS[0])
    columns = tuple(columns) or (*PAIRS_COLUMNS, third)
    if len(columns) != 3:
        raise ValueError(f"Pairs have three columns, two texts and a number; got {', '.join(columns)}.")
    with _naming(source):
        first, second, number = columns
        rows = _rows_with_texts(table, {"sentence1": first, "sentence2": second, "score": number})
        classes = getattr(table.features[number], "names", ())
        if len(classes) > 2:
            raise ValueError(
                f"column {number!r} has {len(classes)} classes, which are no scores: {', '.join(classes)}."
            )
        for row in rows:
            row["score"] = _number(row["score"], number, row["row"])
        values = {row["score"] for row in rows}
        if values == {0.0, 1.0}:
            rows = [{**row, "label": int(row["score"])} for row in rows]
        elif len(values) < 3:
            found = ", ".join(f"{value:g}" for value in sorted(values))
            raise ValueError(
                f"column {number!r} has only the value(s) {found}: similarity needs three different scores or more, "
                "pair classification the labels 0 and 1."
            )
    task_type = "pair_classification" if len(values) == 2 else "sts"
    return _own_task(source, task_type, hub, {split: rows}.__getitem__, split)


def labels_task(source: str, *, columns: Sequence[str] = LABELS_COLUMNS, split: str = "test") -> Task:
    """
    Classification of your own labelled texts. A label is a number or a text.

    Args:
        source (`str`): A folder with the files `train` and `test` (`.csv`, `.tsv`, `.jsonl` or `.parquet`, also
            gzipped), or a data set on the Hub with these splits. Or a single file: a fifth of its texts, drawn with
            seed 0, is the test split, and equal texts are on the same side.
        columns (`Sequence[str]`, *optional*, defaults to `("text", "label")`): The columns of text and label.
        split (`str`, *optional*, defaults to `"test"`): Split to score, of a folder or of a data set on the Hub.

    Returns:
        [`Task`]: named after the file, the folder or the data set. Rows without a text are left out with a warning.

    Raises:
        ValueError: if there is no such file, column or text, a label is missing, or all labels are equal. The message
            names it.
        OSError: if the data set cannot be read from the Hub.
    """
    if len(columns) != 2:
        raise ValueError(f"Labelled texts have two columns, text and label; got {', '.join(columns)}.")
    hub = hub_source(source)
    names = dict(zip(LABELS_COLUMNS, columns, strict=True))
    single = Path(source).is_file()
    tables = [_read_table(source, hub, part) for part in ((split,) if single else ("train", split))]
    with _naming(source):
        parts = [_labelled(table, names) for table in tables]
    train, test = _drawn(parts[0]) if single else parts
    if not all(isinstance(row["label"], int) for row in train + test):
        for row in train + test:
            row["label"] = str(row["label"])
    return _own_task(source, "classification", hub, {"train": train, split: test}.__getitem__, split)


def hub_source(source: str) -> HubData | None:
    """
    The data set on the Hub that a source names; `None` for a local file or folder.

    Raises:
        ValueError: if the source is neither.
    """
    if Path(source).exists():
        return None
    named = HUB_SOURCE.fullmatch(source)
    if named is None or suffix_of(source) in FORMATS:
        raise ValueError(f"{source} does not exist.")
    return HubData(named[1], named[2])


def _own_task(source: str, task_type: str, hub: HubData | None, read: Any, split: str) -> Task:
    """
    The task of a source, under its own name. A data set on the Hub with the name of a task of another data set
    or split is called `user-name`.

    Raises:
        ValueError: if a local source has the name of a task: reports and cards would take one for the other.
    """
    taken = {*TASKS, *GROUPS}
    if hub is not None:
        suffix = f"-{hub.config}" if hub.config else ""
        name = hub.path.rpartition("/")[2] + suffix
        task = TASKS.get(name)
        known = (task.hub.path, task.hub.config, task.splits) if task is not None and task.hub is not None else None
        if name in taken and known != (hub.path, hub.config, (split,)):
            name = hub.path.replace("/", "-") + suffix
    else:
        name = Path(source).resolve().name
        if Path(source).is_file():
            name = name.removesuffix(".gz").removesuffix(suffix_of(name))
        if name in taken:
            raise ValueError(f"{source} has the name of the task or group {name!r} (see --list_tasks): rename it.")
    return Task(name, task_type, folder=Path(source).name, splits=(split,), hub=hub, read=read)


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Put the source before the message of a ValueError that does not name it."""
    try:
        yield
    except ValueError as error:
        raise error if source in str(error) else ValueError(f"{source}: {error}") from error


def _read_table(source: str, hub: HubData | None, split: str) -> Any:
    """A split of a source, as a [`~datasets.Dataset`]."""
    if hub is not None:
        return load_hub(hub.path, hub.config, split=split)
    path = Path(source)
    if path.is_file():
        return load_files([source])
    files = [str(file) for file in sorted(path.iterdir()) if suffix_of(file.name) in FORMATS]
    found = [file for file in files if Path(file.removesuffix(".gz")).stem == split]
    if len(found) != 1:
        held = ", ".join(Path(file).name for file in files) or "no data files"
        raise ValueError(f"{source} needs one file called {split}, such as {split}.csv; it has {held}.")
    return load_files(found)


def _rows_with_texts(table: Any, columns: dict[str, str]) -> Rows:
    """
    The rows of a table under our names of the columns, with their number (`row`, from 1). Every column but the last
    has texts; rows without one are counted in a warning.

    Raises:
        ValueError: if a column is missing or is not text, or no row has all texts.
    """
    require_columns(table, columns.values())
    rows, lacking = [], []
    *texts, _ = columns
    for number, values in enumerate(table.select_columns(list(columns.values())), 1):
        row = {name: values[column] for name, column in columns.items()}
        for name in texts:
            if row[name] is not None and not isinstance(row[name], str):
                raise ValueError(f"column {columns[name]!r} is not text: {row[name]!r} in row {number}.")
        if all(row[name] and row[name].strip() for name in texts):
            rows.append({**row, "row": number})
        else:
            lacking.append(number)
    where = " or ".join(repr(columns[name]) for name in texts)
    if not rows:
        raise ValueError(f"no row has a text in column {where.replace(' or ', ' and ')}.")
    if lacking:
        logger.warning(
            f"{len(lacking)} of {len(table)} rows have no text in column {where} (rows {first_of(lacking)}): they are "
            "left out."
        )
    return rows


def _labelled(table: Any, columns: dict[str, str]) -> Rows:
    """
    Texts with labels, under our names.

    Raises:
        ValueError: as [`_rows_with_texts`], or if a label is missing, or there is only one.
    """
    rows = _rows_with_texts(table, columns)
    name = columns["label"]
    for row in rows:
        if row["label"] is None or row["label"] == "":
            raise ValueError(f"row {row['row']} has no label in column {name!r}.")
    if len(labels := {row["label"] for row in rows}) < 2:
        raise ValueError(f"a classifier needs two classes or more; column {name!r} has only {labels.pop()!r}.")
    return rows


def _drawn(rows: Rows) -> tuple[Rows, Rows]:
    """Train and test rows of a single file. Equal texts are on the same side."""
    texts = sorted({row["text"] for row in rows})
    random.Random(SPLIT_SEED).shuffle(texts)
    test = set(texts[: max(1, round(TEST_SHARE * len(texts)))])
    return [row for row in rows if row["text"] not in test], [row for row in rows if row["text"] in test]


def _number(value: Any, column: str, row: int) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{value!r} in row {row} of column {column!r} is not a finite number.")
    return number


def _part_file(folder: Path, part: str, split: str) -> Path:
    """
    The file of a part of a collection.

    Raises:
        ValueError: if it does not exist. For judgements, the message names the splits that are there.
    """
    wanted = {"corpus": ["corpus.jsonl"], "queries": ["queries.jsonl"], "qrels": [f"qrels/{split}.tsv"]}[part]
    if part == "qrels" and split == "test":
        wanted.append("qrels.tsv")
    for name in wanted:
        for file in (folder / name, folder / f"{name}.gz"):
            if file.is_file():
                return file
    there = sorted({file.name.partition(".")[0] for file in folder.glob("qrels/*.tsv*")}) if part == "qrels" else []
    found = f"; qrels has the splits {', '.join(there)}" if there else ""
    raise ValueError(f"{folder / wanted[0]} does not exist, plain or with .gz{found}.")


def _read_part(files: dict[str, Path], part: str) -> Rows:
    """The rows of a part of a local collection."""
    return _checked(read_rows(files[part]), str(files[part]), part)


def _download_part(hub: HubData, split: str, part: str) -> Rows:
    """
    The rows of a part of a collection on the Hub, as MTEB lays it out: one configuration per part. The only split of a
    configuration is taken, whatever its name.

    Raises:
        ValueError: if there is no configuration for the part, or no such split.
    """
    names = [part, "default"] if part == "qrels" else [part]
    if hub.config is not None:
        names = [f"{hub.config}-{part}"]
    configs = hub_configs(hub.path)
    config = next((name for name in names if name in configs), None)
    if config is None:
        raise ValueError(
            f"{hub.path} has no configuration {' or '.join(map(repr, names))}; it has {', '.join(configs)}."
        )
    splits = hub_splits(hub.path, config)
    if split not in splits and len(splits) != 1:
        raise ValueError(f"{hub.path}, {config} has no split {split!r}; it has {', '.join(splits)}.")
    table = load_hub(hub.path, config, split=split if split in splits else splits[0])
    return _checked(table.to_list(), f"{hub.path}, {config}", part)


def _checked(rows: Rows, place: str, part: str) -> Rows:
    """
    The rows of a part of a collection under our names: `id` for `_id`.

    Raises:
        ValueError: if there are no rows or no texts, or a row lacks a field. The message names the place.
    """
    if not rows:
        raise ValueError(f"{place} is empty: it has no rows.")
    rows = [{"id": row["_id"], **row} if "_id" in row else row for row in rows]
    for number, row in enumerate(rows, 1):
        missing = [name for name in COLUMNS[part] if row.get(name) is None and name != "text"]
        if missing or (part != "qrels" and "text" not in row):
            raise ValueError(f"{place}: row {number} lacks {', '.join(missing) or 'text'}; it has {', '.join(row)}.")
        if part != "qrels":
            row["text"] = row["text"] or ""
            if not isinstance(row["text"], str):
                raise ValueError(f"{place}: the text of row {number} is not text: {row['text']!r}.")
        else:
            with _naming(place):
                row["score"] = _number(row["score"], "score", number)
    if part != "qrels" and not any(row["text"].strip() or row.get("title") for row in rows):
        raise ValueError(f"{place}: no row has a text.")
    return rows
