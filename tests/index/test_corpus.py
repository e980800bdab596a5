"""Reading documents: order, ids, metadata, and rows that cannot be indexed."""

import json
from pathlib import Path

import pytest

from m3bert.index.corpus import Corpus, Document, column_types
from tests.conftest import refused


def write(file: Path, rows: list[dict]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def rows_of(first: int, count: int) -> list[dict]:
    return [{"id": f"d{row}", "text": f"text {row}", "year": 1900 + row} for row in range(first, first + count)]


def test_files_are_read_in_order(tmp_path):
    files = [write(tmp_path / "one.jsonl", rows_of(0, 5)), write(tmp_path / "two.jsonl", rows_of(5, 4))]
    corpus = Corpus(files)
    everything = list(corpus.documents())
    assert [document.id for document in everything] == [f"d{row}" for row in range(9)]
    assert everything[6] == Document(f"{files[1]}, row 2", "d6", "text 6", {"year": 1906})


def test_columns_can_be_joined_and_left_out(tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"name": 7, "title": "T", "text": "x", "a": 1, "b": 2}])
    corpus = Corpus([file], "title+text", "name", ["b"], separator="[SEP]")
    assert list(corpus.documents()) == [Document(f"{file}, row 1", "7", "T [SEP] x", {"b": 2})]


@pytest.mark.parametrize(
    ("row", "options", "reason"),
    [
        ({"id": "a", "text": " "}, {}, "row 2: the document has no text in the column text"),
        ({"id": "a", "text": None}, {}, "row 2: Column 'text' of a row is not text: None"),
        ({"id": None, "text": "x"}, {}, "row 2: the document has no id in the column id"),
        ({"id": "a", "text": "x"}, {"text_column": "body"}, "row 1: Column 'body' of a row is not text"),
        ({"id": "a", "text": "x"}, {"metadata_columns": ["year"]}, "row 1: the row has no column 'year'"),
        ({"id": "a", "text": "x", "price": [float("inf")]}, {}, "row 1: the metadata have a number that is not"),
    ],
)
def test_rows_that_cannot_be_indexed_are_named(tmp_path, row, options, reason):
    file = write(tmp_path / "rows.jsonl", [{**row, "id": "first", "text": "fine"}, row])
    refused(f"^(?=.*rows.jsonl, row ).*{reason}", lambda: list(Corpus([file], **options).documents()))


def test_types_of_columns():
    none = type(None)
    kinds = {"a": {int}, "b": {int, float}, "c": {str, none}, "d": {bool}, "e": {list}, "f": {none}, "g": {int, str}}
    types = column_types(kinds)
    assert types == dict(zip("abcdefg", ("integer", "number", "text", "boolean", "json", "json", "json"), strict=True))
