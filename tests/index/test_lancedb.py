"""LanceDB: its indexes find nearly all, its table stays small, and other processes read it."""

from importlib.util import find_spec

import pytest

from tests.index.collection import Collection, add, check_exact, make_layout, numbers, opened


pytestmark = pytest.mark.skipif(find_spec("lancedb") is None, reason="needs lancedb, whose import takes seconds")


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection.make(1200, 20)


@pytest.mark.parametrize(
    "text, kind",
    [
        ("64@float32", "ivf"), ("64@binary", "ivf"), pytest.param("64@float32", "hnsw", marks=pytest.mark.slow),
        pytest.param("64@float16", "hnsw", marks=pytest.mark.slow), ("16@float32>100>64@float32", "hnsw"),
    ],
)  # fmt: skip
def test_an_index_finds_nearly_all_and_takes_up_changes(tmp_path, collection, text, kind):
    flat, engine = (
        opened(tmp_path / which, make_layout(collection, text, which), "lancedb") for which in ("flat", kind)
    )
    for rows in (range(800), range(800, 1200)):
        for one in (flat, engine):
            add(one, collection, rows)
            one.delete(range(rows.start, rows.stop, 7))
        for where in (None, {"topic": ["the sea's"]}):
            expected, scores = (numbers(one.search(collection.queries, 10, where), 10)[0] for one in (flat, engine))
            assert (scores >= expected[:, -1:] - 1e-5).mean() >= 0.98
    (index,) = engine._table.list_indices()
    assert engine._table.index_stats(index.name).num_unindexed_rows == 0
    for one in (flat, engine):
        one.close()


def test_a_table_holds_documents_once_and_in_few_files(tmp_path, collection):
    """Also after documents were added again, as after a kill."""
    engine = opened(tmp_path, make_layout(collection, "64@float32"), "lancedb")
    for start in range(0, 1200, 200):
        add(engine, collection, range(start, start + 200))
    engine.truncate(1000)
    add(engine, collection, range(1000, 1200))
    engine.delete(range(50))
    assert engine._table.count_rows() == 1150
    assert len(list((tmp_path / "lancedb" / "documents.lance" / "data").iterdir())) <= 3
    row = engine._table.search().where("key = 61").to_list()[0]
    metadata = {**collection.metadata(61), "tags": '[1, "x"]'}
    assert (row["id"], row["text"], row["metadata"]) == ("id-61", "text of 61", metadata)
    engine.close()


def test_a_table_that_is_open_elsewhere_is_read_again(tmp_path, collection):
    layout = make_layout(collection, "64@float32")
    engine, reader = (opened(tmp_path, layout, "lancedb") for _ in range(2))
    add(engine, collection, range(100))
    reader.search(collection.queries, 10)
    engine.delete(range(50))
    add(engine, collection, range(100, 1200))
    check_exact(layout, collection, reader.search(collection.queries, 10), 10, range(50, 1200))
    for one in (engine, reader):
        one.close()


def test_errors_of_the_disk_name_the_folder(tmp_path, collection, monkeypatch):
    engine = opened(tmp_path, make_layout(collection, "64@float32"), "lancedb")

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("lance error: LanceError(IO): No space left on device (os error 28), /root/x.rs:1\nmore")

    monkeypatch.setattr(engine._table, "optimize", full)
    with pytest.raises(OSError, match=r"lancedb cannot be written; the disk may be full: .*No space left on device"):
        engine.delete(range(3))
    engine.close()
