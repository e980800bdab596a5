"""LanceDB: its indexes find nearly all, filters in SQL, and rows that wait for the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest


pytest.importorskip("lancedb")

from tests.trainers.index.collection import Collection, check_exact, make_layout
from trainers.index.documents import DocumentStore
from trainers.index.engine import Batch
from trainers.index.engines import lancedb_engine
from trainers.index.engines.lancedb_engine import LanceDBEngine
from trainers.index.engines.lancedb_pending import Pending


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection.make(1200, 20)


def filled(folder: Path, collection: Collection, text: str, rows: int = 100, kind: str = "flat") -> LanceDBEngine:
    engine = LanceDBEngine(folder, make_layout(collection, text, kind=kind))
    engine.write(collection.batch(engine.layout, range(rows)))
    engine.finish()
    return engine


@pytest.mark.parametrize(
    "text, kind",
    [
        ("64@float32", "ivf"),
        ("64@sign", "ivf"),
        ("64@float32", "hnsw"),
        ("64@float16", "hnsw"),
        ("16@float32>100>64@float32", "hnsw"),
    ],
)
def test_an_index_finds_nearly_all_and_takes_up_changes(tmp_path, collection, text, kind):
    flat, engine = (
        LanceDBEngine(tmp_path / kind, make_layout(collection, text, kind=kind)) for kind in ("flat", kind)
    )
    for rows in (range(800), range(800, 1200)):
        for one in (flat, engine):
            one.write(collection.batch(one.layout, rows))
            one.finish()
            one.delete(np.arange(rows.start, rows.stop, 7))
        expected, scores = (one.search(collection.queries, 10)[0] for one in (flat, engine))
        assert (scores >= expected[:, -1:] - 1e-5).mean() >= 0.98
        filtered = {"topic": "the sea's"}
        expected, scores = (one.search(collection.queries, 10, filtered)[0] for one in (flat, engine))
        assert (scores >= expected[:, -1:] - 1e-5).mean() >= 0.98
    (index,) = engine._table.list_indices()
    assert engine._table.index_stats(index.name).num_unindexed_rows == 0


def test_a_graph_of_bits_is_refused(tmp_path, collection):
    with pytest.raises(ValueError, match="^--kind hnsw: the engine lancedb has flat, ivf for sign"):
        LanceDBEngine(tmp_path, make_layout(collection, "64@sign", kind="hnsw"))


def test_documents_are_those_of_the_store(tmp_path, collection):
    engine = filled(tmp_path, collection, "64@float32")
    missing = {"year": None, "topic": None, "score": None, "open": None, "tags": None}
    batch = collection.batch(engine.layout, range(100, 101))
    batch = replace(batch, metadata=[missing])
    engine.write(batch)
    engine.finish()
    store = DocumentStore(tmp_path / "documents.sqlite")
    store.add(collection.batch(engine.layout, range(100)), {})
    store.add(batch, {})
    keys = np.array([41, 100, 2, 10_000])
    assert engine.documents(keys) == store.documents(keys)
    store.close()


NASTY = ["it's", "''", "' OR true --", 'a "b"', "a\\b", "a\nb", "%", "`", "ü", ""]


def test_texts_of_any_kind_are_filters(tmp_path, collection):
    name = "a.b `c` d's"
    layout = replace(make_layout(collection, "64@float32"), columns={name: "text"})
    engine = LanceDBEngine(tmp_path, layout)
    batch = collection.batch(layout, range(len(NASTY)))
    engine.write(replace(batch, metadata=[{name: text} for text in NASTY]))
    engine.finish()
    for row, text in enumerate(NASTY):
        assert engine.search(collection.queries[:1], 2, {name: text})[1].tolist() == [[row, -1]]
    assert set(engine.search(collection.queries[:1], 2, {name: NASTY[:2]})[1][0].tolist()) == {0, 1}


@pytest.mark.parametrize(
    "where, expected",
    [
        ({"score": 2.5}, {10}),
        ({"score": [0.25, 3]}, {1, 12}),
        ({"year": 1993.0, "score": [3.25, 5.75]}, {13, 23}),
        ({"open": True, "year": 1991}, {21, 51, 81}),
        ({"year": []}, set()),
        ({"year": "1991"}, set()),
        ({"year": 1990.5}, set()),
        ({"topic": 3}, set()),
        ({"open": 1}, set()),
    ],
)
def test_values_are_compared_by_the_type_of_the_column(tmp_path, collection, where, expected):
    engine = filled(tmp_path, collection, "64@float32")
    keys = engine.search(collection.queries[:1], 100, where)[1]
    assert set(keys[keys >= 0].tolist()) == expected


def test_batches_wait_until_they_fill_a_file(tmp_path, collection, monkeypatch):
    layout = make_layout(collection, "64@float32")
    monkeypatch.setattr(lancedb_engine, "FILE_BYTES", 100_000)  # about 300 documents
    engine = LanceDBEngine(tmp_path, layout)
    for start in range(0, 1200, 50):
        engine.write(collection.batch(layout, range(start, start + 50)))
    engine.finish()
    assert 2 <= len(list((tmp_path / "lancedb" / "documents.lance" / "data").iterdir())) <= 6
    assert not (tmp_path / "lancedb" / "pending").exists()
    check_exact(layout, collection, *engine.search(collection.queries, 10), 10)


def test_rows_that_a_killed_process_left_waiting_are_not_stored_twice(tmp_path, collection, monkeypatch):
    layout = make_layout(collection, "64@float32")
    engine = LanceDBEngine(tmp_path, layout)
    for start in (0, 100):
        engine.write(collection.batch(layout, range(start, start + 100)))
    with monkeypatch.context() as patch:
        patch.setattr(Pending, "clear", lambda self: 1 / 0)  # as if it were killed there
        with pytest.raises(ZeroDivisionError):
            engine.finish()
    engine = LanceDBEngine(tmp_path, layout)
    (tmp_path / "lancedb" / "pending" / "draft").write_bytes(b"half a batch")
    engine.write(collection.batch(layout, range(100, 200)))
    engine.write(collection.batch(layout, range(150, 1200)))
    engine.finish()
    assert engine._table.count_rows() == 1200
    check_exact(layout, collection, *engine.search(collection.queries, 10), 10)


def test_a_table_that_is_open_elsewhere_is_read_again(tmp_path, collection):
    engine = filled(tmp_path, collection, "64@float32")
    reader = LanceDBEngine(tmp_path, engine.layout)
    reader.search(collection.queries, 10)
    engine.delete(np.arange(50))
    engine.write(collection.batch(engine.layout, range(100, 1200)))
    engine.finish()
    check_exact(engine.layout, collection, *reader.search(collection.queries, 10), 10, range(50, 1200))


def test_errors_of_the_disk_name_the_folder(tmp_path, collection, monkeypatch):
    engine = filled(tmp_path, collection, "64@float32")

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("lance error: LanceError(IO): No space left on device (os error 28), /root/x.rs:1\nmore")

    monkeypatch.setattr(engine._table, "optimize", full)
    with pytest.raises(OSError, match=r"lancedb cannot be written: .*No space left on device \(os error 28\)$"):
        engine.finish()


def test_integers_beyond_64_bits_are_refused(tmp_path, collection):
    engine = LanceDBEngine(tmp_path, make_layout(collection, "64@float32"))
    batch: Batch = collection.batch(engine.layout, range(1))
    with pytest.raises(ValueError, match="^LanceDB holds integers of 64 bits"):
        engine.write(replace(batch, metadata=[{**batch.metadata[0], "year": 2**70}]))
