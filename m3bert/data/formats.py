"""
The formats of data files, and their rows. No library guesses the types of values.

The values of CSV and TSV files are texts, and an empty cell is `None`. JSON keeps its types: a text that looks like a
date stays a text. Use [`text_of`] or [`number_of`] to convert a value. Only Parquet files and URLs need a library,
which is imported on use.
"""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from pathlib import Path
from typing import IO, Any

from ..utils.columns import check_columns


FORMATS = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
TABLES = {".csv": ",", ".tsv": "\t"}  # suffix -> delimiter
Row = dict[str, Any]
NAMED_FILE = re.compile(r"(?P<name>[\w.-]+)=(?P<file>.+)")
FIRST_ROWS = 1000
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
# What reading broken data raises, beside an OSError: csv, json and pyarrow (a ValueError), gzip and zlib.
UNREADABLE = (ValueError, TypeError, EOFError, gzip.BadGzipFile, zlib.error, csv.Error)


def file_name(file: str) -> str:
    """The name of a file or URL without its folder, and without a query, which may hold a signature."""
    return Path(file.partition("?")[0] if is_url(file) else file).name


def is_url(file: str) -> bool:
    """Whether the name of a file is a URL, such as `hf://datasets/...` or `https://...`, and not a local path."""
    return "://" in file


def is_pattern(file: str) -> bool:
    """Whether the name of a file is a pattern for several files, such as `parts/*.jsonl`."""
    return "*" in file if is_url(file) else bool(re.search(r"[*?[]", file)) and not Path(file).is_file()


def suffix_of(file: str) -> str:
    """The suffix of a file that says its format: `.csv` of `rows.csv.gz`."""
    return Path(file.removesuffix(".gz")).suffix


def files_by_name(files: Sequence[str]) -> dict[str, list[str]]:
    """The files of several data sets, `["nli=a.csv", "nli=b.csv", "qa=c.csv"]`, grouped: name -> files. Empty if the
    files have no names; a ValueError if only some have. The name of a local file is not split at its `=`."""
    groups: dict[str, list[str]] = {}
    for file in files:
        if (match := NAMED_FILE.fullmatch(file)) and not Path(file).is_file():
            groups.setdefault(match["name"], []).append(match["file"])
    if groups and sum(map(len, groups.values())) < len(files):
        raise ValueError(f"All files need a name, or none: {', '.join(files)} is both.")
    return groups


def files_by_language(files: Sequence[str]) -> dict[str, list[str]]:
    """Files, or those in folders, grouped by the folder that they are in: language -> files, in alphabetical order."""
    groups: dict[str, list[str]] = {}
    for name in files:
        inside = sorted(str(file) for file in Path(name).glob("*/*") if suffix_of(file.name) in FORMATS)
        if Path(name).is_dir() and not inside:
            raise ValueError(f"{name} has no files of text in folders: it must have one folder per language.")
        for file in inside or [name]:
            groups.setdefault(Path(file).absolute().parent.name, []).append(file)
    return {language: sorted(group) for language, group in sorted(groups.items())}


def require_one_format(files: Sequence[str]) -> None:
    """Raise a ValueError unless all files have one of the [`FORMATS`], the same one."""
    suffixes = {suffix_of(file) for file in files}
    if len(suffixes) != 1 or not suffixes <= {*FORMATS}:
        raise ValueError(
            f"{', '.join(files) or 'No file'} cannot be read: name files of one format, which is one of "
            f"{', '.join(FORMATS)}, also with .gz."
        )


def check_files(files: Sequence[str], columns: Iterable[str] = ()) -> list[str]:
    """The columns of the first of some data files, none for URLs, by the first rows. ValueError if a file cannot be
    read, is empty or lacks a column, or the formats are unknown or differ; OSError if a file does not exist."""
    require_one_format(files)
    every = [[] if is_url(file) or is_pattern(file) else columns_of(file) for file in files]
    for file, present in zip(files, every, strict=True):
        if present:
            check_columns(present, columns, file)
    return every[0]


def columns_of(file: str) -> list[str]:
    """The columns of a file, by its header or its first rows; none if a library is needed. As [`check_files`]."""
    suffix = suffix_of(file)
    if not is_url(file) and not Path(file).is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
    if suffix in TABLES:
        with naming_file(file), opened(file, newline="") as lines:
            return _table(lines, suffix)[0]
    rows = islice(rows_of(file), FIRST_ROWS) if suffix != ".parquet" else ()
    return list(dict.fromkeys(name for row in rows for name in row))


def rows_of(file: str, *, quoted: bool = True) -> Iterator[Row]:
    """
    The rows of a file or URL, with the types of the file. Missing cells at the end of a row of a table are `None`;
    missing keys of a JSON object stay missing. Unless `quoted`, quotes are part of the cells of a table.

    Raises:
        ValueError: if the file cannot be read, or is empty. The message names the file and the line.
        OSError: if it does not exist.
    """
    suffix = suffix_of(file)
    with naming_file(file):
        if suffix == ".parquet":
            for columns in parquet_columns(file):
                values = (column.to_pylist() for column in columns.values())
                yield from (dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True))
        elif suffix in TABLES:
            with opened(file, newline="") as lines:
                yield from _table(lines, suffix, quoted)[1]
        else:
            with opened(file) as lines:
                empty = True
                for row in ({"text": line.removesuffix("\n")} for line in lines) if suffix == ".txt" else _json(lines):
                    empty = False
                    yield row
                if empty:
                    raise ValueError("it is empty")


def parquet_columns(file: str) -> Iterator[Row]:
    """Column -> values of some rows at a time, as pyarrow has them."""
    import pyarrow.parquet as pq

    with binary(file) as content:
        for batch in pq.ParquetFile(content).iter_batches(FIRST_ROWS):
            yield dict(zip(batch.schema.names, batch.columns, strict=True))


def _table(lines: IO[str], suffix: str, quoted: bool = True) -> tuple[list[str], Iterator[Row]]:
    """The header and the rows of a table. An empty line is no row."""
    csv.field_size_limit(2**31 - 1)  # the default refuses long texts
    quoting: Any = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    table = csv.reader(lines, delimiter=TABLES[suffix], strict=True, quoting=quoting)
    header = next(filter(None, table), [])
    if not header:
        raise ValueError("it is empty")
    if len({*header}) < len(header):
        raise ValueError(f"two columns have one name; its columns are {', '.join(header)}")

    def rows() -> Iterator[Row]:
        try:
            for cells in filter(None, table):
                if len(cells) > len(header):
                    raise ValueError(f"line {table.line_num} has {len(cells)} cells, and the header {len(header)}")
                yield dict(zip_longest(header, (cell or None for cell in cells)))
        except csv.Error as error:
            raise ValueError(f"line {table.line_num}: {error}") from error

    return header, rows()


def _json(lines: IO[str]) -> Iterator[Row]:
    """The objects of JSON Lines, or of one array over the whole file, in which a text is a row, too."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            array = line.lstrip().startswith("[")
            content = json.loads(line + lines.read() if array else line)
            if "\\u" in line or array:
                json.dumps(content, ensure_ascii=False).encode()  # half a character cannot be written
        except (json.JSONDecodeError, UnicodeEncodeError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"line {number} is not JSON: {reason}") from error
        for row in content if array else [content]:
            row = {"text": row} if array and isinstance(row, str) else row
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no object: {row!r:.80}")
            yield row


@contextmanager
def binary(file: str) -> Iterator[IO[bytes]]:
    """The bytes of a local file or URL, unzipped if it is gzipped."""
    if is_url(file):
        import fsspec

        content = fsspec.open(file, "rb").open()
    else:
        content = open(file, "rb")
    with content:
        unzipped: Any = gzip.open(content) if file.endswith(".gz") else content
        yield unzipped


@contextmanager
def opened(file: str, newline: str | None = None) -> Iterator[IO[str]]:
    """The text of a local file or URL in UTF-8, plain or gzipped, with or without the mark of a byte order."""
    with binary(file) as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline=newline) as text:
        yield text


@contextmanager
def naming_file(file: str) -> Iterator[None]:
    """Raise what reading broken data raises as a ValueError of one line that names the file."""
    try:
        yield
    except UNREADABLE as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def text_of(value: object) -> str | None:
    """
    The text of a value of a file. A whole number has no point, so that 7 is equal to 7.0; other numbers, dates and
    times are as Python writes them: `0.5`, `2024-01-05`, `2024-01-05 12:30:00`. Booleans, lists and objects are JSON.
    NaN, which stands for an empty cell, is `None`.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        if value != value:
            return None
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False, default=text_of)
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def number_of(value: object) -> float | None:
    """The number of a value, or `None` for an empty cell and NaN. ValueError if it is no number, or not finite."""
    text = (text_of(value) or "").strip()
    if text.lower() in ("", "nan"):
        return None
    if text.lower() in ("true", "false"):
        return float(text.lower() == "true")
    if NUMBER.fullmatch(text) is None or (number := float(text)) in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:80]!r} is not a number")
    return number
