"""The documents to index, read from files in order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from ..data.collators import joined_texts
from ..data.files import load_files
from ..data.formats import number_of, text_of
from ..utils.columns import fields_of


# Types of metadata columns that documents can be filtered by.
TYPES: dict[str, type] = {"boolean": bool, "integer": int, "number": float, "text": str}
Metadata = dict[str, Any]  # values as JSON has them


@dataclass(frozen=True)
class Document:
    """One row of a corpus: its file and row, for error messages; its id, if the files have some; the text to embed;
    and the other columns, as JSON has them. Those of CSV and TSV files are texts."""

    place: str
    id: str | None
    text: str
    metadata: Metadata


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
        separator (`str`, *optional*): Text between joined columns: see [`separator_for`].
    """

    files: Sequence[str]
    text_column: str = "text"
    id_column: str = "id"
    metadata_columns: Sequence[str] | None = None
    separator: str = ""

    def documents(self, types: Mapping[str, str] | None = None) -> Iterator[Document]:
        """
        The documents in order. With `types` of metadata columns ([`column_types`]), their values are converted, such
        as texts of a CSV file to numbers. A ValueError names the file and row that cannot be read, or lack a column,
        text, id or type.
        """
        read = [*fields_of(self.text_column), self.id_column]
        for file in self.files:
            for number, row in enumerate(load_files([file], text=read, streaming=True), start=1):
                yield self._document(row, f"{file}, row {number}", read, types or {})

    def with_columns(self) -> Corpus:
        """The corpus with the metadata columns of its first document, if it does not name any."""
        first = next(self.documents(), None)
        return self if first is None else replace(self, metadata_columns=list(first.metadata))

    def _document(self, row: Metadata, place: str, read: Sequence[str], types: Mapping[str, str]) -> Document:
        """The document of a row. Columns that are `read` are no metadata."""
        (text,) = joined_texts([row], self.text_column, self.separator, lambda _: f"{place}: ")
        columns = self.metadata_columns
        if columns is None:
            columns = [name for name in row if name not in read]
        if not text.strip():
            raise ValueError(f"{place}: the document has no text in the column {self.text_column}.")
        if missing := [name for name in columns if name not in row]:
            raise ValueError(f"{place}: the row has no column {missing[0]!r}; it has {', '.join(row)}.")
        id_ = row.get(self.id_column)
        if id_ is None and self.id_column in row:
            raise ValueError(f"{place}: the document has no id in the column {self.id_column}.")
        metadata = {name: None if row[name] != row[name] else row[name] for name in columns}  # JSON has no NaN
        try:
            metadata = json.loads(json.dumps(metadata, default=text_of, allow_nan=False))
        except ValueError as error:
            raise ValueError(f"{place}: the metadata have a number that is not finite, which JSON lacks.") from error
        for name, kind in types.items():
            try:
                metadata[name] = _as_type(metadata[name], kind)
            except ValueError as error:
                raise ValueError(f"{place}: the column {name!r} of the index is {kind}: {error}.") from error
        return Document(place, id_, text, metadata)


def column_types(kinds: Mapping[str, Set[type]]) -> dict[str, str]:
    """The types of metadata columns with values of these kinds: one of [`TYPES`], or `"json"` for everything else."""
    names = {frozenset({kind}): name for name, kind in TYPES.items()}
    names[frozenset({int, float})] = "number"
    return {column: names.get(frozenset(types - {NoneType}), "json") for column, types in kinds.items()}


def _as_type(value: object, kind: str) -> object:
    """A value of metadata as one of a type. ValueError if it is none."""
    if value is None or kind == "json" or is_of_type(value, kind):
        return value
    if kind == "text":
        return text_of(value)
    number = number_of(value)
    if number is not None and TYPES[kind](number) != number:
        raise ValueError(f"{value!r} is not of this type")
    return None if number is None else TYPES[kind](number)


def is_of_type(value: object, kind: str) -> bool:
    """Whether a column of a type may have a value. An integer is a number, too."""
    return type(value) is TYPES.get(kind) or (type(value) is int and kind == "number")
