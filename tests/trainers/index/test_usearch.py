"""usearch: graphs, files that survive a killed process, and exact search in blocks."""

from __future__ import annotations

import resource

import numpy as np
import pytest
import torch

from tests.trainers.index.collection import Collection, check_exact, final_scores, make_layout
from trainers.evaluation.coding import PackedIndex
from trainers.index.documents import DocumentStore
from trainers.index.engines import rows as rows_module
from trainers.index.engines import usearch_engine
from trainers.index.engines.rows import Rows


pytest.importorskip("usearch.index")
GRAPHS = ("64@float32", "64@float16", "64@int8", "64@qama-2", "64@sign>40>64@int8", "32@qama-2>40")


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection.make()


def opened(folder, collection, text, kind="hnsw"):
    layout = make_layout(collection, text, one_range=True, kind=kind)
    return usearch_engine.USearchEngine(folder, layout)


def written(folder, collection, text, rows=range(300), kind="hnsw"):
    engine = opened(folder, collection, text, kind)
    engine.write(collection.batch(engine.layout, rows))
    engine.finish()
    return engine


def check_nearly_exact(engine, collection, kept):
    """Almost all of the best are found, with their scores, and none of those that are not there."""
    scores, keys = engine.search(collection.queries, 10)
    assert set(keys.ravel().tolist()) <= set(kept)
    final = final_scores(engine.layout, collection)
    np.testing.assert_allclose(scores, np.take_along_axis(final, keys, axis=1), atol=2e-5)
    best = np.sort(final[:, list(kept)], axis=1)[:, ::-1][:, :10]
    assert (scores >= best - 2e-5).mean() >= 0.9


@pytest.mark.parametrize("text", GRAPHS)
def test_a_graph_finds_the_nearest_after_deleting_and_adding(tmp_path, collection, text):
    engine = written(tmp_path, collection, text, range(200))
    check_nearly_exact(engine, collection, range(200))
    engine.delete(np.array([*range(0, 200, 3), 10_000]))
    kept = sorted(set(range(200)) - set(range(0, 200, 3)))
    check_nearly_exact(engine, collection, kept)
    engine.write(collection.batch(engine.layout, range(200, 300)))
    engine.finish()
    engine = opened(tmp_path, collection, text)
    check_nearly_exact(engine, collection, [*kept, *range(200, 300)])
    assert engine.disk_bytes() >= 233 * engine.layout.bytes_per_document
    scores, keys = engine.search(collection.queries[:1], 400)
    assert (keys >= 0).sum() <= 233 and np.isneginf(scores[keys < 0]).all()


@pytest.mark.parametrize("text", GRAPHS[2:5:2])
def test_the_printed_lines_search_the_graph(tmp_path, collection, text):
    engine = written(tmp_path, collection, text)
    store = DocumentStore(tmp_path / "documents.sqlite")
    store.add(collection.batch(engine.layout, range(300)), {})
    scores, keys = engine.search(collection.queries, 10)
    for row, query in enumerate(collection.queries.numpy()):
        names = {"query": query}
        exec(engine.example(), names)
        assert [id_ for id_, _ in names["found"]] == [f"id-{key}" for key in keys[row]]
        np.testing.assert_allclose([score for _, score in names["found"]], scores[row], atol=1e-5)
    store.close()


def test_a_graph_that_was_saved_before_a_kill_gets_no_document_twice(tmp_path, collection, monkeypatch):
    engine = opened(tmp_path, collection, "64@float32")
    engine.write(collection.batch(engine.layout, range(300)))

    def killed_before(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(Rows, "clear", killed_before)
        engine.finish()
    engine = opened(tmp_path, collection, "64@float32")
    engine.finish()
    check_nearly_exact(engine, collection, range(300))
    for row in engine.search(collection.queries, 300)[1]:
        found = row[row >= 0]
        assert len(np.unique(found)) == len(found)


def test_a_graph_reaches_all_copies_of_a_document(tmp_path):
    """Among them, a graph that threads built at the same time loses its way, by a few percent."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(30, 64, generator=generator).repeat_interleave(60, dim=0)
    copies = Collection(vectors[torch.randperm(len(vectors), generator=generator)], vectors[::60])
    engine = written(tmp_path, copies, "8@float32", range(len(vectors)))
    np.testing.assert_allclose(engine.search(copies.queries, 60)[0], 1, atol=1e-5)


def test_half_a_batch_of_a_killed_process_does_not_count(tmp_path, collection, monkeypatch):
    engine = written(tmp_path, collection, "16@float32>40>64@float32", range(100), "flat")
    put = rows_module._put

    def killed_at_the_keys(path, *others):
        if path.stem == "keys":
            raise KeyboardInterrupt
        put(path, *others)

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(rows_module, "_put", killed_at_the_keys)
        engine.write(collection.batch(engine.layout, range(100, 200)))
    engine = opened(tmp_path, collection, "16@float32>40>64@float32", "flat")
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10, range(100))
    engine.write(collection.batch(engine.layout, range(100, 300)))
    engine.write(collection.batch(engine.layout, range(50, 150)))  # again, in the middle
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10)
    assert len(np.load(tmp_path / "first.npy")) == len(np.load(tmp_path / "keys.npy")) == 300


def test_a_deletion_that_was_killed_is_completed(tmp_path, collection, monkeypatch):
    engine = written(tmp_path, collection, "16@float32>40>64@float32", kind="flat")
    with monkeypatch.context() as killed:
        killed.setattr(Rows, "_install", lambda self: None)
        engine.delete(np.arange(100))
    (tmp_path / "kept" / "first.npy").replace(tmp_path / "first.npy")  # one of the files was in its place already
    engine = opened(tmp_path, collection, "16@float32>40>64@float32", "flat")
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10, range(100, 300))
    assert not (tmp_path / "kept").exists()


def test_all_documents_can_be_deleted(tmp_path, collection):
    engine = written(tmp_path, collection, "64@sign", kind="flat")
    engine.delete(np.arange(300))
    assert (engine.search(collection.queries, 3)[1] == -1).all()


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_a_full_disk_is_an_os_error_and_keeps_what_was_there(tmp_path, collection, kind):
    engine = written(tmp_path, collection, "64@float32", range(200), kind)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(file.stat().st_size for file in tmp_path.iterdir())
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, hard))
        with pytest.raises(OSError, match=f"^.*The index {tmp_path} cannot be written: .+$"):
            engine.write(collection.batch(engine.layout, range(200, 300)))
            engine.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.glob("*.draft"))
    check_nearly_exact(opened(tmp_path, collection, "64@float32", kind), collection, range(200))


def test_exact_search_goes_through_blocks(tmp_path, collection, monkeypatch):
    monkeypatch.setattr(usearch_engine, "QUERIES_AT_ONCE", 3)
    monkeypatch.setattr(usearch_engine, "PAIRS_AT_ONCE", 70)
    engine = written(tmp_path, collection, "64@float32", kind="flat")
    for k in (1, 10, 50):
        check_exact(engine.layout, collection, *engine.search(collection.queries, k), k)


def test_rounding_of_float16_queries_does_not_change_the_result(tmp_path):
    """Scores of these documents differ by less than the rounding."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, 64, generator=generator) + 2e-3 * torch.randn(60, 64, generator=generator)
    close = Collection(vectors, torch.randn(5, 64, generator=generator))
    engine = written(tmp_path, close, "64@float16", range(60), "flat")
    scores, keys = engine.search(close.queries, 10)
    expected = PackedIndex.pack(close.vectors, "float16").search(close.queries, 10)
    np.testing.assert_allclose(scores, expected[0], atol=1e-6)
