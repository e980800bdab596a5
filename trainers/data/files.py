"""Read data files and tokenise their texts."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

from ..core.dataset_checks import ORIGINS, Origin, on_one_line, place_of, require_columns
from ..core.streams.stream import UNREADABLE, DatasetShard, Stream
from .collators import fields_of, joined_text


FORMATS = {
    ".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
NAMED_FILE = re.compile(r"(?P<name>[\w.-]+)=(?P<file>.+)")
# Only an empty cell is a missing value: pandas would also drop the texts "NA", "None" and "null".
TABLE = {"keep_default_na": False, "na_values": [""]}
# Format -> builder of the library datasets, with its options. Other formats are builders without options.
BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {"csv": ("csv", TABLE), "tsv": ("csv", {**TABLE, "sep": "\t"})}


def load_files(files: Sequence[str], *, streaming: bool = False) -> Any:
    """
    Read data files of one format: text (one row per line, column `text`), JSON Lines, CSV, TSV or Parquet. All but
    Parquet may be gzipped. In CSV and TSV files, an empty cell is `None`.

    Args:
        files (`Sequence[str]`): Paths or URLs.
        streaming (`bool`, *optional*, defaults to `False`): Whether to read rows during training, not before it.

    Returns:
        [`~datasets.Dataset`], or [`~datasets.IterableDataset`] if `streaming`

    Raises:
        ValueError: if a file does not exist, is empty or malformed, or the formats are unknown or differ.
    """
    kind = format_of(files)
    builder, options = BUILDERS.get(kind, (kind, {}))
    try:
        dataset = load_dataset(builder, data_files=list(files), split="train", streaming=streaming, **options)
    except UNREADABLE as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"The dataset is empty: {', '.join(files)} has no rows.") from error
        broken = None
        with suppress(*UNREADABLE):  # a broken archive has no lines
            broken = next(filter(None, map(broken_line, files)), None) if kind == "json" else None
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(broken or f"Cannot read {', '.join(files)}: {reason}") from error
    ORIGINS[dataset] = Origin(partial(place_in, files, kind), files[0] if kind in ("csv", "tsv") else None)
    return dataset


def files_by_name(files: Sequence[str]) -> dict[str, list[str]]:
    """
    The files of several data sets, `["nli=a.csv", "nli=b.csv", "qa=c.csv"]`, grouped: name -> files. Empty if the
    files have no names. A local file whose own name has a `=` has no name before it.

    Raises:
        ValueError: if only some of the files have names.
    """
    found: dict[str, list[str]] = {}
    for file in files:
        if (match := NAMED_FILE.fullmatch(file)) and not Path(file).is_file():
            found.setdefault(match["name"], []).append(match["file"])
    if found and sum(map(len, found.values())) < len(files):
        raise ValueError(f"All files need a name, or none: {', '.join(files)} is both.")
    return found


def opened_text(file: str) -> IO[str]:
    """A local file of text, plain or gzipped, open for reading."""
    opener: Any = gzip.open if file.endswith(".gz") else open
    return opener(file, "rt", encoding="utf-8", errors="replace", newline="")


def broken_line(file: str) -> str | None:
    """What is wrong with the first line of a JSON Lines file that is no JSON object; `None` if there is none, or the
    file is not local or is one JSON array."""
    if is_url(file):
        return None
    with opened_text(file) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1 and line.lstrip().startswith("["):
                return None
            try:
                if line.strip() and not isinstance(json.loads(line.rstrip()), dict):
                    return f"{file}, line {number} is not a JSON object: {line.strip()[:80]}"
            except json.JSONDecodeError as error:
                return f"{file}, line {number} is not JSON: {error.msg} (column {error.colno})."
    return None


def place_in(files: Sequence[str], kind: str, row: int) -> str:
    """The file and the line of a row of data files of one format; files that are not local have no lines."""
    if any(map(is_url, files)):
        return f"Row {row + 1} of {', '.join(files)}"
    for file in files:
        if kind == "parquet":
            count = pq.read_metadata(file).num_rows
            if row < count:
                return f"{file}, row {row + 1}"
            row -= count
            continue
        with opened_text(file) as lines:
            for line in lines_of_rows(lines, kind):
                if row == 0:
                    return f"{file}, line {line}"
                row -= 1
    raise IndexError(f"{', '.join(files)} have {row + 1} rows fewer.")


def lines_of_rows(lines: Iterable[str], kind: str) -> Iterator[int]:
    """The number of the line on which each row of a text, JSON Lines, CSV or TSV file ends, from 1."""
    if kind == "text":
        yield from (number for number, _ in enumerate(lines, 1))
    elif kind == "json":
        yield from (number for number, line in enumerate(lines, 1) if line.strip())
    else:
        rows = csv.reader(lines, delimiter="\t" if kind == "tsv" else ",")
        next(rows, None)  # the header
        yield from (rows.line_num for row in rows if row)


def require_texts(dataset: Any, columns: Sequence[str]) -> None:
    """
    Check that every row of a dataset has a text in every text column, before any work is done. A stream is checked
    while it is read.

    Args:
        dataset ([`~datasets.Dataset`] or stream): The data.
        columns (`Sequence[str]`): Text columns; `"title+text"` needs a text in one of the fields.

    Raises:
        ValueError: as [`require_columns`], or if a column is not text, or a text is missing or empty. The message
            names the place of the row, with file and line if they are known, and the column.
    """
    fields = list(dict.fromkeys(field for column in columns for field in fields_of(column)))
    require_columns(dataset, fields)
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return
    for field in fields:
        feature = dataset.features[field]
        kind = getattr(feature, "dtype", None) or type(feature).__name__
        if kind not in ("string", "large_string", "null"):
            raise ValueError(
                f"Column {field!r} is not text, but {kind}; the dataset has {on_one_line(dataset.column_names)}. Name "
                "the columns with text in text_columns."
            )
    start = 0
    for table in dataset.select_columns(fields).with_format("arrow").iter(batch_size=100_000):
        letters = {
            field: pc.fill_null(pc.utf8_length(pc.utf8_trim_whitespace(table[field].cast("string"))), 0)
            for field in fields
        }
        for column in columns:
            longest = pc.max_element_wise(*(letters[field] for field in fields_of(column)))
            if (row := pc.index(longest, 0).as_py()) >= 0:
                what = "has None" if table[fields_of(column)[0]][row].as_py() is None else "has no text"
                raise ValueError(f"{place_of(dataset, start + row)}: column {column!r} {what}.")
        start += len(table)


def stream_files(files: Sequence[str]) -> Stream:
    """
    A [`Stream`] of data files, which are its shards: see [`load_files`].

    Args:
        files (`Sequence[str]`): Paths or URLs.

    Returns:
        [`Stream`]

    Raises:
        ValueError: as [`load_files`].
    """
    unit = "line" if format_of(files) in ("text", "json") else "row"
    return Stream(
        [
            DatasetShard(
                file,
                load_files([file], streaming=True),
                unit,
                size=None if is_url(file) else Path(file).stat().st_size,
            )
            for file in files
        ]
    )


def format_of(files: Sequence[str]) -> str:
    """
    The format of data files, as the library datasets calls it.

    Raises:
        ValueError: if a file does not exist or is empty, or the formats are unknown or differ.
    """
    kinds = set()
    for file in files:
        suffix = suffix_of(file)
        if suffix not in FORMATS:
            raise ValueError(f"{file} has an unknown format; legal suffixes: {', '.join(FORMATS)}, also with .gz.")
        if not is_url(file):
            if not Path(file).is_file():
                raise ValueError(f"{file} does not exist.")
            try:
                with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as opened:
                    empty = not opened.read(1)
            except UNREADABLE as error:
                raise ValueError(f"{file} is not gzip, or is incomplete: {error}.") from error
            if empty:
                raise ValueError(f"The dataset is empty: {file} has no content.")
        kinds.add(FORMATS[suffix])
    if len(kinds) != 1:
        raise ValueError(f"The files must have one format; got {', '.join(sorted(kinds)) or 'no files'}.")
    return kinds.pop()


def is_url(file: str) -> bool:
    """Whether the name of a file is a URL, such as `hf://datasets/...` or `https://...`, and not a local path."""
    return "://" in file


def suffix_of(file: str) -> str:
    """The suffix of a file that says its format: that of `rows.csv.gz` is `.csv`."""
    return Path(file.removesuffix(".gz")).suffix


def tokenize_texts(
    dataset: Dataset | Stream, tokenizer: PreTrainedTokenizerBase, *, column: str = "text", max_length: int = 512
) -> Any:
    """
    Tokenise a text column: one row per text, with longer texts truncated. A stream is tokenised during training.

    Args:
        dataset ([`~datasets.Dataset`] or [`Stream`]): Dataset with the texts.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer.
        column (`str`, *optional*, defaults to `"text"`): Column to read.
        max_length (`int`, *optional*, defaults to 512): Maximum length of a text in tokens.

    Returns:
        [`~datasets.Dataset`] or [`Stream`]: columns `input_ids`, `attention_mask`, `special_tokens_mask`.

    Raises:
        ValueError: if the dataset is empty or lacks the column.
    """
    require_columns(dataset, [column])
    tokenize = Tokenize(tokenizer, column, max_length)
    if isinstance(dataset, Stream):
        return dataset.with_transform(tokenize.rows, TOKENIZED)
    return dataset.map(
        lambda columns: tokenize.texts(columns[column]),
        batched=True,
        remove_columns=dataset.column_names,
        desc="Tokenizing",
    )


TOKENIZED = ("input_ids", "attention_mask", "special_tokens_mask")


@dataclass(frozen=True)
class Tokenize:
    """Tokenises texts. Worker processes can be sent an object of this class."""

    tokenizer: PreTrainedTokenizerBase
    column: str
    max_length: int

    def texts(self, texts: Sequence[str]) -> Any:
        """Columns -> lists, one entry per text."""
        return self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.max_length,
            return_special_tokens_mask=True,
            return_token_type_ids=False,
        )

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """
        The tokens of the text column of each row.

        Raises:
            ValueError: if the column of a row is not text.
        """
        columns = self.texts([joined_text(row, self.column, "") for row in rows])
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
