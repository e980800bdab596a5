"""sqlite-vec: its limits, scores of int8, transactions, and a Python that cannot load it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from tests.trainers.index.collection import Collection, check_exact, final_scores, make_layout
from trainers.index.documents import DocumentStore
from trainers.index.engines import sqlite_vec_engine
from trainers.index.engines.sqlite_vec_engine import SqliteVecEngine


pytest.importorskip("sqlite_vec")


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection.make()


def opened(folder, collection, text="64@float32"):
    return SqliteVecEngine(folder, make_layout(collection, text, one_range=True))


def written(folder, collection, text="64@float32", rows=range(300)):
    engine = opened(folder, collection, text)
    engine.write(collection.batch(engine.layout, rows))
    engine.finish()
    return engine


@pytest.mark.parametrize("allowed", [None, np.arange(0, 300, 2)], ids=["all", "some"])
def test_scores_of_int8_are_about_the_cosines(tmp_path, collection, allowed):
    engine = written(tmp_path, collection, "64@int8")
    scores, keys = engine.search(collection.queries, 10, allowed=allowed)
    expected = final_scores(engine.layout, collection)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, keys, axis=1), atol=0.01)
    assert (np.diff(scores) <= 0).all()
    kept = np.arange(300) if allowed is None else allowed
    assert np.isin(keys, kept).all()
    best = kept[np.argsort(-expected[:, kept], axis=1)[:, :10]]
    assert np.mean([np.isin(*pair).mean() for pair in zip(keys, best, strict=True)]) >= 0.9
    engine.close()


def test_what_is_longer_than_sqlite_vec_allows_is_refused(tmp_path, collection):
    engine = written(tmp_path, collection)
    assert (engine.search(collection.queries, 4096)[1] >= 0).sum(axis=1).tolist() == [300] * 7
    with pytest.raises(ValueError, match=r"^The engine sqlite-vec finds at most 4,096 documents, not 4,097\.$"):
        engine.search(collection.queries, 4097)
    engine.close()
    with pytest.raises(ValueError, match=r"finds at most 4,096 documents; a shortlist of 5,000 is too long\.$"):
        opened(tmp_path, collection, "64@sign>5000>64@float32")


def test_a_python_that_cannot_load_extensions_is_told_what_to_install(tmp_path, collection, monkeypatch):
    class Plain:
        class Connection:
            pass

    monkeypatch.setattr(sqlite_vec_engine, "sqlite3", Plain)
    monkeypatch.setitem(sys.modules, "pysqlite3", None)
    with pytest.raises(ValueError, match=r"^The engine sqlite-vec .* cannot: pip install pysqlite3-binary"):
        opened(tmp_path, collection)


def test_a_full_disk_is_an_os_error_and_keeps_what_was_there(tmp_path, collection):
    engine = written(tmp_path, collection, rows=range(200))
    pages = engine._connection.execute("PRAGMA page_count").fetchone()[0]
    engine._connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(OSError, match=r"vectors\.sqlite cannot be written: .+$"):
        for first in range(1000, 4000, 300):
            engine.write(collection.batch(engine.layout, range(300), first))
    for _ in range(2):
        _, keys = engine.search(collection.queries, 4000)
        assert set(range(200)) <= set(keys[0].tolist()) and (keys[0] >= 0).sum() % 300 == 200
        engine.close()
        engine = opened(tmp_path, collection)
    engine.close()


KILLED = """
import os, signal, sqlite_vec, {module} as sqlite3
db = sqlite3.connect({file!r})
db.enable_load_extension(True)
sqlite_vec.load(db)
db.execute("PRAGMA cache_size = 1")  # so that the file is changed before the transaction ends
db.execute("DELETE FROM vectors WHERE key < 150")
db.execute("INSERT INTO vectors (key, first) VALUES (999, zeroblob(256))")
print("changed", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_write_leaves_the_documents_before_it(tmp_path, collection):
    engine = written(tmp_path, collection, rows=range(200))
    engine.close()
    code = KILLED.format(module=engine._sqlite.__name__, file=str(tmp_path / "vectors.sqlite"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("changed\n", -signal.SIGKILL), done.stderr
    assert (tmp_path / "vectors.sqlite-journal").is_file()
    engine = opened(tmp_path, collection)
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10, range(200))
    engine.write(collection.batch(engine.layout, range(100, 300)))
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10)
    engine.close()


def test_the_store_of_documents_and_the_vectors_do_not_lock_each_other(tmp_path, collection):
    engine, store = opened(tmp_path, collection), DocumentStore(tmp_path / "documents.sqlite")
    reader = sqlite3.connect(tmp_path / "documents.sqlite")
    for rows in (range(150), range(150, 300)):
        engine.write(collection.batch(engine.layout, rows))
        store.add(collection.batch(engine.layout, rows), {})
        names = {"query": collection.queries[0].numpy()}
        exec(engine.example(), names)
        scores, keys = engine.search(collection.queries[:1], 10)
        assert [id_ for id_, _ in names["found"]] == [f"id-{key}" for key in keys[0]]
        np.testing.assert_allclose([score for _, score in names["found"]], scores[0], atol=1e-6)
        names["db"].close()
    for opened_file in (reader, store, engine):
        opened_file.close()
