"""What is special to faiss: its kinds, its files, and what they survive."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.trainers.index.collection import Collection, check_exact, final_scores, make_layout, quantizer_for
from trainers.index.documents import DocumentStore
from trainers.index.engines import faiss_build, faiss_parts
from trainers.index.engines.faiss_engine import FaissEngine


faiss = pytest.importorskip("faiss")
KINDS = ("ivf", "hnsw")
LAYOUTS = ("64@float32", "48@int4", "64@sign", "16@float32>40>64@int8", "64@sign>40>64@float16", "32@qama-2>40")


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


def opened(folder: Path, collection: Collection, text: str, kind: str = "flat") -> FaissEngine:
    return FaissEngine(folder, make_layout(collection, text, kind=kind))


def add(engine: FaissEngine, collection: Collection, rows: range) -> None:
    engine.write(collection.batch(engine.layout, rows))
    engine.finish()


def share_found(engine: FaissEngine, collection: Collection, kept: np.ndarray) -> float:
    """Share of the ten results that a search without clusters or a graph finds, too, or others with their scores."""
    scores, keys = engine.search(collection.queries, 10)
    assert np.isin(keys, kept).all()
    expected = np.take_along_axis(final_scores(engine.layout, collection), keys, axis=1)
    np.testing.assert_allclose(scores, expected, atol=2e-5)
    exact, _ = engine.search(collection.queries, 10, allowed=kept)
    return (scores >= exact[:, -1:] - 2e-5).mean()


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_clusters_and_graphs_find_nearly_all_and_can_change(tmp_path, text, kind):
    collection = Collection.make(1500, 40)
    engine = opened(tmp_path, collection, text, kind)
    add(engine, collection, range(1000))
    gone = set(range(0, 500, 3))
    engine.delete(np.array([*gone, 77_777]))
    engine.close()
    engine = opened(tmp_path, collection, text, kind)
    add(engine, collection, range(1000, 1500))
    kept = [row for row in range(1500) if row not in gone]
    assert share_found(engine, collection, np.array(kept)) >= 0.98
    allowed = [row for row in kept if row % 7 == 0]
    check_exact(
        engine.layout, collection, *engine.search(collection.queries, 10, allowed=np.array(allowed)), 10, allowed
    )
    few = np.array([*allowed[:4], 3])  # 3 is deleted
    assert (engine.search(collection.queries, 10, allowed=np.sort(few))[1] >= 0).sum(axis=1).tolist() == [4] * 40
    stored = collection.batch(engine.layout, [1, 1499])
    expected = stored.first if stored.second is None else stored.second
    np.testing.assert_array_equal(engine.packed(np.array([1, 1499])), expected)


@pytest.mark.parametrize("text", ["64@float32", "64@sign"])
def test_adding_keeps_the_clusters(tmp_path, collection, text):
    engine = opened(tmp_path, collection, text, "ivf")
    add(engine, collection, range(200))
    before = engine._index.centres
    clusters = dict(zip(engine._index.keys.tolist(), engine._index.clusters[0].tolist(), strict=True))
    add(engine, collection, range(200, 300))
    np.testing.assert_array_equal(engine._index.centres, before)
    after = dict(zip(engine._index.keys.tolist(), engine._index.clusters[0].tolist(), strict=True))
    assert len(before) == 12 and {key: after[key] for key in clusters} == clusters


@pytest.mark.parametrize("kind", ["flat", *KINDS])
def test_an_index_can_be_tiny_and_become_empty(tmp_path, collection, kind):
    engine = opened(tmp_path, collection, "16@int8>40>64@float32", kind)
    assert (engine.search(collection.queries, 3)[1] == -1).all()
    engine.finish()
    add(engine, collection, range(1))
    assert engine.search(collection.queries, 2)[1].tolist() == [[0, -1]] * 7
    engine.delete(np.array([0]))
    assert (engine.search(collection.queries, 2)[1] == -1).all()
    add(engine, collection, range(1, 3))
    assert np.sort(engine.search(collection.queries, 2)[1]).tolist() == [[1, 2]] * 7


def test_the_second_vectors_may_be_the_shorter_ones(tmp_path, collection):
    engine = opened(tmp_path, collection, "64@int8>40>16@float32")
    add(engine, collection, range(300))
    check_exact(engine.layout, collection, *engine.search(collection.queries, 7), 7)


@pytest.mark.parametrize("k", [1, 3, 7, 11, 29, 40, 64])
def test_shortlists_have_their_length(k):
    """faiss multiplies in float32 and rounds down."""
    for shortlist in range(1, 500):
        assert int(np.float32(k) * np.float32(faiss_parts.k_factor(shortlist, k))) == max(k, shortlist)


@pytest.mark.parametrize(
    "text, kind",
    [("64@sign>40>64@int8", "flat"), ("16@float32>40>64@float32", "ivf"), ("64@sign>40>64@int8", "hnsw")],
)
def test_an_interruption_at_any_step_loses_nothing(tmp_path, collection, text, kind, monkeypatch):
    """Whatever file was being replaced or removed: the index is whole, and the same call completes it."""
    steps = ((os, "replace"), (faiss_build, "rmtree"), (Path, "unlink"))
    for stop in range(6):
        folder = tmp_path / str(stop)
        folder.mkdir()
        engine = opened(folder, collection, text, kind)
        add(engine, collection, range(200))
        for call, kept in (
            (lambda engine: add(engine, collection, range(200, 300)), range(300)),
            (lambda engine: engine.delete(np.arange(0, 90)), range(90, 300)),
        ):
            calls = 0

            def stopping(original, *, stop=stop):
                def step(*arguments, **options):
                    nonlocal calls
                    calls += 1
                    if calls == stop + 1:
                        raise KeyboardInterrupt
                    return original(*arguments, **options)

                return step

            with monkeypatch.context() as patch:
                for place, name in steps:
                    patch.setattr(place, name, stopping(getattr(place, name)))
                try:
                    call(engine)
                except KeyboardInterrupt:
                    pass
            engine.close()
            engine = opened(folder, collection, text, kind)
            engine.search(collection.queries, 10)
            call(engine)
            check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10, kept)
        engine.close()


def test_half_a_batch_is_written_over(tmp_path, collection):
    engine = opened(tmp_path, collection, "16@float32>40>64@float32")
    engine.write(collection.batch(engine.layout, range(100)))
    for name in ("keys", "first", "second"):
        with (tmp_path / "pending" / name).open("ab") as file:
            file.write(b"torn!")
    engine = opened(tmp_path, collection, "16@float32>40>64@float32")
    add(engine, collection, range(100, 300))
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10)


def test_documents_that_wait_can_be_deleted(tmp_path, collection):
    engine = opened(tmp_path, collection, "64@float32")
    engine.write(collection.batch(engine.layout, range(300)))
    engine.delete(np.arange(100))
    engine.finish()
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10, range(100, 300))


@pytest.mark.parametrize("kind", ["flat", *KINDS])
def test_a_full_disk_is_said_and_breaks_nothing(tmp_path, collection, kind):
    engine = opened(tmp_path, collection, "64@float32", kind)
    add(engine, collection, range(200))
    engine.write(collection.batch(engine.layout, range(200, 300)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300 * 64 * 4, limits[1]))  # the vectors fit, and no more
    try:
        with pytest.raises(OSError, match=f"The index {tmp_path} cannot be written: "):
            engine.finish()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 64 * 4, limits[1]))
        with pytest.raises(OSError, match=f"The index {tmp_path} cannot be written: "):
            engine.write(collection.batch(engine.layout, range(100)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10, range(200))
    engine.finish()
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.faiss"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_building_holds_no_vectors_in_memory(tmp_path, kind, monkeypatch):
    """Once the index is written, all of it would be in memory. What is measured has no file behind it."""

    def memory() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("RssAnon:")[2].split()[0])

    collection = Collection.make(2000, 1, width=512)
    monkeypatch.setattr(faiss_parts, "SAMPLE", 1 << 20)
    engine = opened(tmp_path, collection, "64@float32>40>512@float32", kind)
    seen = []
    save = faiss_build.save
    monkeypatch.setattr(faiss_build, "save", lambda *arguments: (seen.append(memory()), save(*arguments)))
    for part in range(2):  # a new index, and one that grows
        for start in range(0, 12_000, 2000):
            engine.write(collection.batch(engine.layout, range(2000), first_key=start + part * 12_000))
        before = memory()
        engine.finish()
        assert seen[-1] - before < 15e6  # of 27 MB, and then 54 MB
    assert engine.disk_bytes() > 50e6


@pytest.mark.parametrize("text", ["16@float32>40>64@float32", "64@sign", "64@sign>40", "64@qama-2>40>64@int8"])
def test_the_printed_lines_leave_deleted_documents_of_a_graph_out(tmp_path, collection, text):
    engine = opened(tmp_path, collection, text, "hnsw")
    add(engine, collection, range(300))
    nearest = np.unique(engine.search(collection.queries, 10)[1])
    engine.delete(nearest)
    with_store = DocumentStore(tmp_path / "documents.sqlite")
    with_store.add(collection.batch(engine.layout, range(300)), {})
    with_store.close()
    for query, scores in zip(collection.queries.numpy(), engine.search(collection.queries, 10)[0], strict=True):
        names = {"query": query, "quantizer": quantizer_for(collection)}
        exec(engine.example(), names)
        assert not {f"id-{key}" for key in nearest} & {id_ for id_, _ in names["found"]}
        np.testing.assert_allclose([score for _, score in names["found"]], scores, atol=2e-5)


def test_other_files_are_refused(tmp_path, collection):
    (tmp_path / "index.faiss").write_bytes(b"something else")
    with pytest.raises(ValueError, match="index.faiss is not an index of faiss: "):
        opened(tmp_path, collection, "64@float32")
