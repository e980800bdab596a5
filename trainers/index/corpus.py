"""The documents to index, read from files in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

from ..core.streams.stream import UNREADABLE
from ..data.collators import fields_of, joined_text
from ..data.files import load_files


TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "text"}
RESERVED = ("key", "id", "text")


@dataclass(frozen=True)
class Document:
    """
    One row of a corpus.

    Args:
        place (`str`): File and row, for error messages.
        id (`str`, *optional*): Its id; `None` if the files have none.
        text (`str`): Text to embed.
        metadata (`dict[str, Any]`): The other columns.
    """

    place: str
    id: str | None
    text: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Corpus:
    """
    Files with documents. They are read as a stream, one after the other.

    Args:
        files (`Sequence[str]`): Paths of files, as [`load_files`] reads them.
        text_column (`str`, *optional*, defaults to `"text"`): Column with the text; `"title+text"` joins two.
        id_column (`str`, *optional*, defaults to `"id"`): Column with the ids. If the files do not have it, documents
            are numbered.
        metadata_columns (`Sequence[str]`, *optional*): Columns to keep. Default: all others.
        separator (`str`, *optional*): What joins two columns: see [`separator_for`].
    """

    files: Sequence[str]
    text_column: str = "text"
    id_column: str = "id"
    metadata_columns: Sequence[str] | None = None
    separator: str = ""

    def documents(self) -> Iterator[Document]:
        """
        The documents in order.

        Raises:
            ValueError: if a file cannot be read, a column is missing, or a row has no text or no id. The message names
                file and row.
        """
        for file in self.files:
            for number, row in enumerate(_rows(file), start=1):
                yield self._document(row, f"{file}, row {number}")

    def _document(self, row: dict[str, Any], place: str) -> Document:
        try:
            text = joined_text(row, self.text_column, self.separator)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if not text.strip():
            raise ValueError(f"{place}: the document has no text in the column {self.text_column}.")
        taken = {*fields_of(self.text_column), self.id_column}
        columns = self.metadata_columns
        if columns is None:
            columns = [name for name in row if name not in taken]
        if missing := [name for name in columns if name not in row]:
            raise ValueError(f"{place}: the row has no column {missing[0]!r}; it has {', '.join(row)}.")
        if reserved := [name for name in columns if name in RESERVED or '"' in name]:
            raise ValueError(
                f"{place}: a metadata column cannot be called {reserved[0]!r}; rename it, or leave it out with "
                "--metadata_columns."
            )
        id_ = row.get(self.id_column)
        if id_ is None and self.id_column in row:
            raise ValueError(f"{place}: the document has no id in the column {self.id_column}.")
        metadata = {name: None if row[name] != row[name] else row[name] for name in columns}  # JSON has no NaN
        return Document(place, None if id_ is None else str(id_), text, metadata)


def digest_of(before: str, document: Document) -> str:
    """A digest of a document and of all before it, whose digest is `before`."""
    content = json.dumps([before, document.id, document.text], ensure_ascii=False)
    return blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def chunks(documents: Iterator[Document], size: int) -> Iterator[list[Document]]:
    """Documents in lists of `size`; the last one may be shorter."""
    while chunk := list(islice(documents, size)):
        yield chunk


def column_types(documents: Sequence[Document]) -> dict[str, str]:
    """
    The types of the metadata columns of some documents: `"text"`, `"integer"`, `"number"`, `"boolean"`, or `"json"`
    for everything else. A column without a value is text.
    """
    found: dict[str, set[str]] = {}
    for document in documents:
        for name, value in document.metadata.items():
            kinds = found.setdefault(name, set())
            if value is not None:
                kinds.add(_type(value))
    return {name: _common(kinds) for name, kinds in found.items()}


def require_types(document: Document, columns: Mapping[str, str]) -> None:
    """Check that a document has the metadata columns of an index. ValueError: names file, row and column."""
    if document.metadata.keys() != columns.keys():
        raise ValueError(
            f"{document.place}: the metadata columns are {', '.join(document.metadata) or 'none'}, and the index has "
            f"{', '.join(columns) or 'none'}."
        )
    for name, value in document.metadata.items():
        wanted = columns[name]
        if value is not None and wanted != "json" and not is_of_type(value, wanted):
            raise ValueError(f"{document.place}: the column {name!r} has {value!r}, and the index has {wanted} there.")


def is_of_type(value: Any, wanted: str) -> bool:
    """Whether a column of a type may have a value. An integer is a number, too."""
    kind = _type(value)
    return kind == wanted or (kind, wanted) == ("integer", "number")


def _type(value: Any) -> str:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # which no engine stores as a number
        return "json"
    return TYPES.get(type(value), "json")


def _common(kinds: set[str]) -> str:
    if len(kinds) <= 1:
        return next(iter(kinds), "text")
    return "number" if kinds == {"integer", "number"} else "json"


def _rows(file: str) -> Iterator[dict[str, Any]]:
    rows = load_files([file], streaming=True)
    try:
        yield from rows
    except UNREADABLE as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"Cannot read {file}: {reason}") from error
