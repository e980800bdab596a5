"""Reading documents: order, ids, metadata, and rows that cannot be indexed."""

from __future__ import annotations

import gzip
import json
from datetime import date
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from trainers.evaluation.coding import Coder
from trainers.index.corpus import Corpus, Document, chunks, column_types, digest_of, require_types
from trainers.index.layout import Layout
from trainers.index.store import Batch, Store


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
    assert [len(chunk) for chunk in chunks(corpus.documents(), 4)] == [4, 4, 1]


def test_all_formats_give_the_same_documents(tmp_path):
    rows = rows_of(0, 3)
    expected = [(row["id"], row["text"], {"year": row["year"]}) for row in rows]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.write(lines)
    table = [",".join(map(str, values)) for values in (("id", "text", "year"), *(row.values() for row in rows))]
    (tmp_path / "rows.csv").write_text("\n".join(table) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl.gz", "rows.csv", "rows.parquet"):
        found = [(row.id, row.text, row.metadata) for row in Corpus([str(tmp_path / name)]).documents()]
        assert found == expected, name


def test_lines_of_text_have_no_ids(tmp_path):
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    found = [(row.id, row.text, row.metadata) for row in Corpus([str(tmp_path / "words.txt")]).documents()]
    assert found == [(None, "one", {}), (None, "two", {})]


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
        ({"id": "a", "text": "x", "key": 1}, {}, "a metadata column cannot be called 'key'"),
    ],
)
def test_rows_that_cannot_be_indexed_are_named(tmp_path, row, options, reason):
    file = write(tmp_path / "rows.jsonl", [{**row, "id": "first", "text": "fine"}, row])
    with pytest.raises(ValueError, match=reason) as error:
        list(Corpus([file], **options).documents())
    assert str(error.value).startswith(f"{file}, row ") and "\n" not in str(error.value)


def test_broken_files_are_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"rows\.jsonl"):
        list(Corpus([str(tmp_path / "rows.jsonl")]).documents())


def test_the_digest_depends_on_all_rows_and_their_order():
    def digest(*rows: tuple[str | None, str]) -> str:
        return reduce(digest_of, [Document("", id_, text, {}) for id_, text in rows], "")

    same = digest(("a", "one"), ("b", "two"))
    assert same == digest(("a", "one"), ("b", "two"))
    others = [
        digest(("b", "two"), ("a", "one")),
        digest(("a", "one")),
        digest(("a", "one"), ("btwo", "")),
        digest((None, "one"), ("b", "two")),
    ]
    assert len({same, *others}) == 5


def test_types_of_columns():
    def documents(*rows: dict) -> list[Document]:
        return [Document(f"row {number}", None, "x", row) for number, row in enumerate(rows)]

    rows = documents(
        {"a": 1, "b": 1, "c": "x", "d": True, "e": [1], "f": None, "g": 1, "h": date(2026, 1, 1), "i": 2**63},
        {"a": 2, "b": 1.5, "c": None, "d": False, "e": [2], "f": None, "g": "x", "h": date(2026, 1, 2), "i": 0},
    )
    found = column_types(rows)
    expected = ("integer", "number", "text", "boolean", "json", "text", "json", "json", "json")
    assert found == dict(zip("abcdefghi", expected, strict=True))
    for row in rows:
        require_types(row, found)
    with pytest.raises(ValueError, match="row 0: the column 'a' has 'one', and the index has integer there"):
        require_types(documents({**rows[0].metadata, "a": "one"})[0], found)
    with pytest.raises(ValueError, match="row 0: the column 'd' has 1, and the index has boolean there"):
        require_types(documents({**rows[0].metadata, "d": 1})[0], found)
    with pytest.raises(ValueError, match="row 0: the metadata columns are a, and the index has a, b"):
        require_types(documents({"a": 1})[0], {"a": "integer", "b": "integer"})


def store_of(folder: Path) -> Store:
    return Store(folder, Layout(Coder("float32", 1)))


def batch_of(first: int, ids: list[str], texts: list[str], metadata: list[dict]) -> Batch:
    keys = np.arange(first, first + len(ids))
    return Batch(keys, ids, texts, metadata, keys.astype(np.float32).view(np.uint8).reshape(-1, 4))


def test_the_store_keeps_documents_vectors_and_state_together(tmp_path):
    store = store_of(tmp_path)
    rows = [{"year": 1990, "when": date(2026, 1, 1)}, {"year": 1991, "when": None}]
    store.add(batch_of(0, ["a", "it's"], ["one", "two"], rows), {"rows": "2"})
    with pytest.raises(Exception, match="UNIQUE"):
        store.add(batch_of(2, ["c", "a"], ["x", "y"], rows), {"rows": "4"})
    store.close()
    with (tmp_path / "vectors" / "first").open("ab") as file:
        file.write(b"half a vector of a killed process")
    store = store_of(tmp_path)
    assert (len(store), store.state("rows"), store.next_key) == (2, "2", 2)
    assert store.keys_of(["it's", "none"]) == {"it's": 1}
    assert store.documents(np.array([0])) == {0: ("a", "one", {"year": 1990, "when": "2026-01-01"})}
    assert store.keys_where({"year": [1991, 1992]}).tolist() == [1]
    assert store.keys_where({"year": [1991], "when": ["x"]}).tolist() == []
    store.delete(np.array([1]))
    store.add(batch_of(2, ["it's"], ["again"], rows[:1]), {})
    assert (len(store), store.next_key, store.keys().tolist(), store.keys(1).tolist()) == (2, 3, [0, 2], [2])
    (batch,) = store.batches(np.array([2, 0]))
    assert (batch.ids, batch.texts) == (("it's", "a"), ("again", "one"))
    assert batch.first.view(np.float32).tolist() == [[2], [0]]
    store.close()


def test_a_full_disk_is_an_error_of_the_file(tmp_path):
    store = store_of(tmp_path)
    store._connection.execute("PRAGMA max_page_count = 6")
    with pytest.raises(OSError, match=r"documents\.sqlite: database or disk is full"):
        store.add(batch_of(0, [str(row) for row in range(200)], ["long text " * 50] * 200, [{}] * 200), {})
    assert len(store) == 0
    store.close()
