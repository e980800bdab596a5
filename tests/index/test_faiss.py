"""What is special to faiss: its kinds, its file, and what it survives."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from m3bert.index.engine import Engine
from m3bert.index.engines.faiss_engine import k_factor
from tests.conftest import refused
from tests.index.collection import Collection, add, check_exact, final_scores, make_layout, numbers, opened


faiss = pytest.importorskip("faiss")
KINDS = ("ivf", "hnsw")
LAYOUTS = ("64@float32", "64@float16", "48@int4", "64@binary", "16@float32>40>64@float32", "64@binary>40>64@int8")
LAYOUTS += ("32@qama-2>40",)


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection.make()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost more than they save on small data."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(threads)


def faiss_engine(folder: Path, collection: Collection, text: str, kind: str = "flat") -> Engine:
    return opened(folder, make_layout(collection, text, kind), "faiss")


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_clusters_and_graphs_find_nearly_all_and_can_change(tmp_path, text, kind):
    collection = Collection.make(1500, 40)
    engine = faiss_engine(tmp_path, collection, text, kind)
    add(engine, collection, range(1000))
    gone = set(range(0, 500, 3))
    engine.delete([*gone, 77_777])
    engine.close()
    engine = faiss_engine(tmp_path, collection, text, kind)
    add(engine, collection, range(1000, 1500))
    remaining = [row for row in range(1500) if row not in gone]
    scores, keys = numbers(engine.search(collection.queries, 10), 10)
    assert np.isin(keys, remaining).all()
    final = final_scores(engine.layout, collection)
    np.testing.assert_allclose(scores, np.take_along_axis(final, keys, axis=1), atol=2e-5)
    exact, _ = numbers(engine.search(collection.queries, 10, {"year": list(range(1990, 2000))}), 10)
    assert (scores >= exact[:, -1:] - 2e-5).mean() >= 0.98
    some = [row for row in remaining if row % 10 == 7]
    actual = engine.search(collection.queries, 10, {"year": [1997]})
    check_exact(engine.layout, collection, actual, 10, some)
    engine.close()


@pytest.mark.parametrize("text", ["64@float32", "64@binary"])
def test_clusters_are_those_of_the_first_build(tmp_path, collection, text):
    read = faiss.read_index_binary if "binary" in text else faiss.read_index
    engine = faiss_engine(tmp_path, collection, text, "ivf")
    counts = []
    for rows in (range(200), range(200, 300)):
        add(engine, collection, rows)
        index = read(str(tmp_path / "index.faiss"))
        inner = (faiss.downcast_IndexBinary if "binary" in text else faiss.downcast_index)(index.index)
        counts.append((inner.nlist, index.ntotal))
    assert counts == [(12, 200), (12, 300)]
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_can_be_tiny_and_become_empty(tmp_path, collection, kind):
    engine = faiss_engine(tmp_path, collection, "16@int8>40>64@float32", kind)

    def actual(k: int) -> list[list[int]]:
        return np.sort(numbers(engine.search(collection.queries, k), k)[1]).tolist()

    assert actual(3) == [[-1, -1, -1]] * 7
    add(engine, collection, range(1))
    assert actual(2) == [[-1, 0]] * 7
    engine.delete([0])
    assert actual(2) == [[-1, -1]] * 7
    add(engine, collection, range(1, 3))
    assert actual(2) == [[1, 2]] * 7
    engine.close()


@pytest.mark.parametrize("k", [1, 3, 7, 11, 29, 40, 64])
def test_shortlists_have_their_length(k):
    """faiss multiplies in float32 and rounds down."""
    for shortlist in range(1, 500):
        assert int(np.float32(k) * np.float32(k_factor(shortlist, k))) == max(k, shortlist)


@pytest.mark.parametrize("text, kind", [("64@binary>40>64@int8", "flat"), ("16@float32>40>64@float32", "hnsw")])
def test_an_interrupted_change_loses_nothing(tmp_path, collection, text, kind, monkeypatch):
    """A kill while the file is written, before it replaces the other: the same call completes the change."""
    engine = faiss_engine(tmp_path, collection, text, kind)
    add(engine, collection, range(200))
    for call, before, after in (
        (lambda engine: add(engine, collection, range(200, 300)), range(200), range(300)),
        (lambda engine: engine.delete(range(90)), range(300), range(90, 300)),
    ):

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", stop)
            call(engine)
        engine.close()
        engine = faiss_engine(tmp_path, collection, text, kind)
        check_exact(engine.layout, collection, engine.search(collection.queries, 10), 10, before)
        engine.truncate(before.stop)
        call(engine)
        check_exact(engine.layout, collection, engine.search(collection.queries, 10), 10, after)
    engine.close()


def test_a_full_disk_is_said_and_breaks_nothing(tmp_path, collection):
    engine = faiss_engine(tmp_path, collection, "64@float32")
    add(engine, collection, range(200))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for room in (300, 100):  # the vectors fit, and no more; not even they
            resource.setrlimit(resource.RLIMIT_FSIZE, (room * 64 * 4, limits[1]))
            with pytest.raises(OSError, match=f"The index {tmp_path} cannot be written; the disk may be full: "):
                add(engine, collection, range(200, 300))
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            engine.truncate(200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    engine.close()
    engine = faiss_engine(tmp_path, collection, "64@float32")
    check_exact(engine.layout, collection, engine.search(collection.queries, 10), 10, range(200))
    add(engine, collection, range(200, 300))
    check_exact(engine.layout, collection, engine.search(collection.queries, 10), 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents.sqlite", "index.faiss", "vectors"]
    engine.close()


def test_broken_files_are_named(tmp_path, collection):
    (tmp_path / "index.faiss").write_bytes(b"something else")
    refused("index.faiss is not an index of faiss: ", faiss_engine, tmp_path, collection, "64@float32")
    (tmp_path / "index.faiss").unlink()
    (tmp_path / "documents.sqlite").write_text("no database" * 99)
    with pytest.raises(OSError, match="documents.sqlite: file is not a database"):
        faiss_engine(tmp_path, collection, "64@float32")


def test_a_filter_finds_columns_of_any_name(tmp_path, collection, monkeypatch):
    names = ('a "quoted" one', "it's", "back\\slash", "$.year", "a.b", "")
    monkeypatch.setattr(Collection, "metadata", lambda self, row: dict.fromkeys(names, row % 5))
    engine = faiss_engine(tmp_path, collection, "64@float32")
    add(engine, collection, range(50))
    for name in names:
        actual = engine.search(collection.queries[:1], 50, {name: [3]})[0]
        assert {hit.id for hit in actual} == {f"id-{row}" for row in range(3, 50, 5)}
    engine.close()
