"""The formats of data files, and a first look into them that takes milliseconds: no library is imported."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ...encode.columns import check_columns


# Suffix -> builder of the library datasets, with its options. Only an empty cell of a table is a missing value: pandas
# would also drop the texts "NA", "None" and "null".
TABLE = {"keep_default_na": False, "na_values": [""]}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    ".txt": ("text", {}),
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", TABLE),
    ".tsv": ("csv", {**TABLE, "sep": "\t"}),
    ".parquet": ("parquet", {}),
}
NAMED_FILE = re.compile(r"(?P<name>[\w.-]+)=(?P<file>.+)")
FIRST_ROWS = 1000


def file_name(file: str) -> str:
    """The name of a file or URL without its folder, and without a query, which may hold a signature."""
    return Path(file.partition("?")[0] if is_url(file) else file).name


def is_url(file: str) -> bool:
    """Whether the name of a file is a URL, such as `hf://datasets/...` or `https://...`, and not a local path."""
    return "://" in file


def suffix_of(file: str) -> str:
    """The suffix of a file that says its format: that of `rows.csv.gz` is `.csv`."""
    return Path(file.removesuffix(".gz")).suffix


def files_by_name(files: Sequence[str]) -> dict[str, list[str]]:
    """The files of several data sets, `["nli=a.csv", "nli=b.csv", "qa=c.csv"]`, grouped: name -> files. Empty if the
    files have no names; a ValueError if only some have. A local file with a `=` in its own name has none before it."""
    found: dict[str, list[str]] = {}
    for file in files:
        if (match := NAMED_FILE.fullmatch(file)) and not Path(file).is_file():
            found.setdefault(match["name"], []).append(match["file"])
    if found and sum(map(len, found.values())) < len(files):
        raise ValueError(f"All files need a name, or none: {', '.join(files)} is both.")
    return found


def files_by_language(files: Sequence[str]) -> dict[str, list[str]]:
    """Files, or those in folders with one folder per language, grouped by the folder that they are in: language ->
    files, both in alphabetical order."""
    found: dict[str, list[str]] = {}
    for name in files:
        inside = sorted(str(file) for file in Path(name).glob("*/*") if suffix_of(file.name) in FORMATS)
        if Path(name).is_dir() and not inside:
            raise ValueError(f"{name} has no files of text in folders: it must have one folder per language.")
        for file in inside or [name]:
            found.setdefault(Path(file).absolute().parent.name, []).append(file)
    return {language: sorted(found[language]) for language in sorted(found)}


def require_one_format(files: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The member of [`FORMATS`] that all files have. ValueError if there are none, or their formats differ."""
    found = [FORMATS.get(suffix_of(file)) for file in files]
    if not found or found[0] is None or found.count(found[0]) < len(found):
        raise ValueError(
            f"{', '.join(files) or 'No file'} cannot be read: name files of one format, which is one of "
            f"{', '.join(FORMATS)}, also with .gz."
        )
    return found[0]


def check_files(files: Sequence[str], columns: Iterable[str] = ()) -> list[str]:
    """
    Look into the first rows of data files, before a model is loaded for them. URLs are not opened. Returns the columns
    of the first file; none if only a library can tell them.

    Raises:
        ValueError: if a file cannot be read, is empty or lacks a column, or the formats are unknown or differ.
        OSError: if a file does not exist.
    """
    require_one_format(files)
    every = [[] if is_url(file) or re.search(r"[*?[]", file) else columns_of(file) for file in files]
    for file, found in zip(files, every, strict=True):
        if found:
            check_columns(found, columns, file)
    return every[0]


def columns_of(file: str, rows: int | None = FIRST_ROWS) -> list[str]:
    """The columns of the first rows of a local file, or of all; none if a library is needed. As [`check_files`]."""
    suffix, columns = suffix_of(file), dict[str, None]()
    if not Path(file).is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
    try:
        with (gzip.open if file.endswith(".gz") else open)(file, "rt", encoding="utf-8-sig") as opened:
            lines = list(islice(opened, rows)) if suffix not in (".parquet", ".json") else ["["]
        if not lines:
            raise ValueError("it is empty")
        if suffix == ".txt":
            return ["text"]
        if suffix in (".csv", ".tsv"):
            return next(csv.reader(lines, delimiter="\t" if suffix == ".tsv" else ","))
        if lines[0].lstrip().startswith("["):  # an array over the whole file
            return []
        for number, line in enumerate(lines, start=1):  # noqa: B007
            row = json.loads(line) if line.strip() else {}
            json.dumps(row, ensure_ascii=False).encode()
            columns |= dict.fromkeys(row)
    except (json.JSONDecodeError, UnicodeEncodeError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"{file} cannot be read: line {number} is not JSON: {reason}") from error
    except (ValueError, TypeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return list(columns)
