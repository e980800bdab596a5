"""
Tasks made of your own data: a collection to search, scored or labelled pairs, and labelled texts.

The data is a local file or folder, or a data set on the Hub: `user/name`, or `user/name:configuration`. What exists
locally comes first.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import datasets
from datasets import Dataset

from ..data.files import load_files
from ..data.formats import FORMATS, number_of, suffix_of, text_of
from ..data.hub_data import load_hub
from .readers import Read, Rows, first_of, read_rows
from .tasks import GROUPS, TASKS, HubData, Task


logger = logging.getLogger(__name__)
HUB_SOURCE = re.compile(r"([\w.-]+(?:/[\w.-]+)?)(?::([\w.-]+))?")  # id, and configuration
TEST_SHARE = 0.2  # of the texts of a single file
SPLIT_SEED = 0


def collection_task(source: str, *, split: str = "test") -> Task:
    """
    Retrieval in your own collection, in the layout of BEIR, named after the folder or the data set. ValueError if
    there is no such folder.

    Args:
        source (`str`): A folder with `corpus.jsonl` (`_id`, `text` and, if you like, `title`), `queries.jsonl` (`_id`,
            `text`) and `qrels/{split}.tsv` (header `query-id`, `corpus-id`, `score`), each plain or gzipped;
            `qrels.tsv` stands for `qrels/test.tsv`. Or a data set on the Hub with the configurations `corpus`,
            `queries` and `default` or `qrels`, with the same columns.
        split (`str`, *optional*, defaults to `"test"`): Which relevance judgements to score.
    """
    hub = hub_source(source)
    read = partial(_local_part, Path(source), split) if hub is None else partial(_hub_part, hub, split)
    return _own_task(source, "retrieval", hub, read, split)


def pairs_task(source: str, *, columns: Sequence[str] = (), split: str = "test") -> Task:
    """
    Pairs of your own texts with a number: pair classification if all numbers are 0 or 1, otherwise semantic textual
    similarity. The task is named after its source. Rows without a value, or with NaN, are left out with a warning.

    Args:
        source (`str`): A file (`.csv`, `.tsv`, `.jsonl` or `.parquet`, also gzipped), a folder of files that are named
            after their splits, or a data set on the Hub.
        columns (`Sequence[str]`, *optional*): The columns of both texts and of the number. Default: `sentence1`,
            `sentence2`, and `score` or `label`.
        split (`str`, *optional*, defaults to `"test"`): Split of a folder or of a data set on the Hub.

    Raises:
        ValueError: if there is no such file or column, or a value is not a number. The message names the source.
        OSError: if the data set cannot be read from the Hub.
    """
    hub = hub_source(source)
    table = _read_table(source, hub, split)
    third = "label" if "label" in table.column_names and "score" not in table.column_names else "score"
    columns = tuple(columns) or ("sentence1", "sentence2", third)
    rows = _rows(source, table, ("sentence1", "sentence2", "score"), columns, number_of)
    classes = getattr(table.features[columns[2]], "names", ())
    if len(classes) > 2:
        raise ValueError(f"{source}: column {columns[2]!r} has classes, which are no scores: {', '.join(classes)}.")
    labelled = all(row["score"] in (0, 1) for row in rows)
    if labelled:
        rows = [{**row, "label": int(row["score"])} for row in rows]
    return _own_task(source, "pair_classification" if labelled else "sts", hub, {split: rows}.__getitem__, split)


def labels_task(source: str, *, columns: Sequence[str] = ("text", "label"), split: str = "test") -> Task:
    """
    Classification of your own labelled texts, named after its source. Labels are compared as texts
    ([`~data.formats.text_of`]): `007` of a CSV file is not `7`, and the number 7 of a JSON file is. Rows that lack a
    value are left out with a warning.

    Args:
        source (`str`): A folder with the files `train` and `test` (`.csv`, `.tsv`, `.jsonl` or `.parquet`, also
            gzipped), or a data set on the Hub with these splits. Or a single file: a fifth of its texts, drawn with
            seed 0, is the test split, and equal texts are on the same side.
        columns (`Sequence[str]`, *optional*, defaults to `("text", "label")`): The columns of text and label.
        split (`str`, *optional*, defaults to `"test"`): Split to score, of a folder or of a data set on the Hub.

    Raises:
        ValueError: if there is no such file or column. The message names the source.
        OSError: if the data set cannot be read from the Hub.
    """
    hub, single = hub_source(source), Path(source).is_file()
    tables = [_read_table(source, hub, part) for part in ((split,) if single else ("train", split))]
    parts = [_rows(source, table, ("text", "label"), columns, text_of) for table in tables]
    train, test = _drawn(parts[0]) if single else parts
    return _own_task(source, "classification", hub, {"train": train, split: test}.__getitem__, split)


def hub_source(source: str) -> HubData | None:
    """The data set on the Hub that a source names; `None` for a local file or folder. ValueError if it is neither."""
    if Path(source).exists():
        return None
    named = HUB_SOURCE.fullmatch(source)
    if named is None or suffix_of(source) in FORMATS:
        raise ValueError(f"{source} does not exist.")
    return HubData(named[1], named[2])


def _own_task(source: str, task_type: str, hub: HubData | None, read: Read, split: str) -> Task:
    """The task of a source: `user-name` or `own-name` if a registered task or group of other data has its name."""
    if hub is not None:
        suffix = f"-{hub.config}" if hub.config else ""
        name, other = hub.path.rpartition("/")[2] + suffix, hub.path.replace("/", "-") + suffix
    else:
        name = Path(source).resolve().name
        if Path(source).is_file():
            name = name.removesuffix(".gz").removesuffix(suffix_of(name))
        other = f"own-{name}"
    task = TASKS.get(name)
    known = None if task is None or task.hub is None else (task.hub.path, task.hub.config, task.splits)
    if name in {*TASKS, *GROUPS} and (hub is None or known != (hub.path, hub.config, (split,))):
        name = other
    return Task(name, task_type, folder=Path(source).name, splits=(split,), hub=hub, read=read)


def _read_table(source: str, hub: HubData | None, split: str) -> Dataset:
    if hub is not None:
        return load_hub(hub.path, hub.config, split=split)
    path = Path(source)
    if path.is_file():
        return load_files([source])
    files = [file for file in sorted(path.iterdir()) if suffix_of(file.name) in FORMATS]
    matching = [file for file in files if Path(file.name.removesuffix(".gz")).stem == split]
    if len(matching) != 1:
        names = ", ".join(file.name for file in files) or "no data files"
        raise ValueError(f"{source} needs one file called {split}, such as {split}.csv; it has {names}.")
    return load_files([str(matching[0])])


def _rows(
    source: str,
    table: Dataset,
    names: Sequence[str],
    columns: Sequence[str],
    value_of: Callable[[object], float | str | None],
) -> Rows:
    """The rows of a table under our names of its columns, all texts but the last, which `value_of` reads. A warning
    counts rows that lack a value. ValueError if a column is missing or no text, a value cannot be read, or no row is
    whole."""
    *texts, last = columns
    missing = [column for column in columns if column not in table.column_names]
    wrong = [column for column in texts if column not in missing and "string" not in str(table.features[column])]
    if missing or wrong or len(columns) != len(names):
        what = ", ".join(missing or wrong or columns)
        raise ValueError(
            f"{source}: {what} cannot be the columns of {', '.join(names)}, which are texts but for the last; it has "
            f"{', '.join(table.column_names)}."
        )
    rows, lacking = [], []
    for number, values in enumerate(table.select_columns(list(columns)), 1):
        try:
            values[last] = value_of(values[last])
        except ValueError as error:
            raise ValueError(f"{source}, row {number}, column {last!r}: {error}.") from error
        if all(values[column] is not None and str(values[column]).strip() for column in columns):
            rows.append({name: values[column] for name, column in zip(names, columns, strict=True)})
        else:
            lacking.append(number)
    if not rows:
        raise ValueError(f"{source}: no row has values in all of {', '.join(columns)}.")
    if lacking:
        logger.warning(
            f"{source}: {len(lacking)} of {len(table)} rows (rows {first_of(lacking)}) have no value in one of the "
            f"columns {', '.join(columns)}: they are left out."
        )
    return rows


def _drawn(rows: Rows) -> tuple[Rows, Rows]:
    """Train and test rows of a single file. Equal texts are on the same side."""
    texts = sorted({row["text"] for row in rows})
    random.Random(SPLIT_SEED).shuffle(texts)
    test = set(texts[: max(1, round(TEST_SHARE * len(texts)))])
    return [row for row in rows if row["text"] not in test], [row for row in rows if row["text"] in test]


def _local_part(folder: Path, split: str, part: str) -> Rows:
    names = [f"{part}.jsonl"]
    if part == "qrels":
        names = [f"qrels/{split}.tsv", *(["qrels.tsv"] if split == "test" else [])]
    for file in (folder / f"{name}{suffix}" for name in names for suffix in ("", ".gz")):
        if file.is_file():
            return _named(read_rows(file), str(file), part)
    raise ValueError(f"{folder / names[0]} does not exist, plain or with .gz.")


def _hub_part(hub: HubData, split: str, part: str) -> Rows:
    """The rows of a part of a collection on the Hub, one configuration per part, as MTEB lays it out."""
    names = [part, "default"] if part == "qrels" else [part]
    if hub.config is not None:
        names = [f"{hub.config}-{part}"]
    configs = datasets.get_dataset_config_names(hub.path)
    config = next((name for name in names if name in configs), names[0])
    splits = [str(each) for each in datasets.get_dataset_split_names(hub.path, config)]
    table = load_hub(hub.path, config, split=splits[0] if len(splits) == 1 else split)
    return _named(table.to_list(), f"{hub.path}, {config}", part)


def _named(rows: Rows, place: str, part: str) -> Rows:
    """The rows of a part, `id` for `_id`. ValueError if there are none, or one lacks a field or an id."""
    rows = [{**row, "id": row["_id"]} if "_id" in row else row for row in rows]
    needed = {"query-id", "corpus-id"} if part == "qrels" else {"id", "text"}
    if lacking := [row for row in rows or [{}] if not row.keys() >= needed]:
        fields = ", ".join(lacking[0]) or "none"
        raise ValueError(f"{place}: every row needs {' and '.join(sorted(needed))}; one has the fields {fields}.")
    if nameless := [name for name in sorted(needed - {"text"}) if any(text_of(row[name]) is None for row in rows)]:
        raise ValueError(f"{place}: a row has no {nameless[0]}.")
    return rows
