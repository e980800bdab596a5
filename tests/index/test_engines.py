"""What every engine must do: search exactly, repeat what a kill stopped, change, and filter."""

from dataclasses import replace
from importlib.util import find_spec

import pytest

from m3bert.index.engine import ENGINES, find_engine
from tests.index.collection import Collection, add, check_exact, make_layout, opened


INSTALLED = [name for name in ENGINES if find_spec(find_engine(name).module) is not None]
LAYOUTS = (
    "64@float32", "24@float32", "64@float16", "64@int8", "48@int4", "64@binary", "20@binary", "64@qama-2",
    "32@qama-0.5", "16@float32>40>64@float32", "64@binary>40>64@float32", "64@binary>40>64@int8", "32@qama-2>40",
    "64@qama-1>40>64@int8", "64@int8>40>64@float32", "48@int4>40>48@int8",
)  # fmt: skip
ROWS = 300


def supported() -> list[tuple[str, str]]:
    actual = []
    for name in INSTALLED:
        engine = find_engine(name)
        for text in LAYOUTS:
            codes = [part.split("@")[1] for part in text.split(">") if "@" in part]
            if codes[0] in engine.codes and (len(codes) == 1 or codes[1] in engine.second_codes):
                actual.append((name, text))
    return actual


CASES = supported()
TWO_EACH = [case for case in CASES if case[1] in ("64@binary", "16@float32>40>64@float32")]


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection.make(ROWS)


@pytest.mark.parametrize("name, text", CASES)
def test_a_flat_index_finds_exactly_the_nearest(tmp_path, collection, name, text):
    layout = make_layout(collection, text)
    engine = opened(tmp_path, layout, name)
    add(engine, collection, range(ROWS))
    engine.close()
    engine = opened(tmp_path, layout, name)
    for k in (1, 10):
        check_exact(layout, collection, engine.search(collection.queries, k), k)
    engine.close()


@pytest.mark.parametrize("name, text", TWO_EACH)
def test_few_documents_are_all_found_and_none_are_too(tmp_path, collection, name, text):
    engine = opened(tmp_path, make_layout(collection, text), name)
    engine.truncate(0)
    check_exact(engine.layout, collection, engine.search(collection.queries, 8), 8, [])
    engine.add([collection.batch(engine.layout, range(5))])
    check_exact(engine.layout, collection, engine.search(collection.queries, 8), 8, range(5))
    engine.delete(range(5))
    check_exact(engine.layout, collection, engine.search(collection.queries, 8), 8, [])
    add(engine, collection, range(5, 9))
    check_exact(engine.layout, collection, engine.search(collection.queries, 8), 8, range(5, 9))
    engine.close()


@pytest.mark.parametrize("name, text", TWO_EACH)
def test_deleting_adding_and_truncating_keep_the_rest(tmp_path, collection, name, text):
    """Also repeated, as after a kill."""
    layout = make_layout(collection, text)
    engine = opened(tmp_path, layout, name)
    add(engine, collection, range(100))
    add(engine, collection, range(200))
    gone = [*range(0, 100, 3), 7777]  # the last one is not there
    for _ in range(2):
        engine.delete(gone)
    remaining = sorted(set(range(200)) - set(gone))
    check_exact(layout, collection, engine.search(collection.queries, 10), 10, remaining)
    engine.close()
    engine = opened(tmp_path, layout, name)
    add(engine, collection, range(200, ROWS))
    check_exact(layout, collection, engine.search(collection.queries, 10), 10, [*remaining, *range(200, ROWS)])
    for _ in range(2):
        engine.truncate(200)
    check_exact(layout, collection, engine.search(collection.queries, 10), 10, remaining)
    add(engine, collection, range(200, 250))
    check_exact(layout, collection, engine.search(collection.queries, 10), 10, [*remaining, *range(200, 250)])
    assert engine.count() == len(remaining) + 50
    engine.close()


@pytest.mark.parametrize("name, text", TWO_EACH)
def test_a_filter_finds_the_nearest_of_those_that_pass(tmp_path, collection, name, text):
    engine = opened(tmp_path, make_layout(collection, text), name)
    add(engine, collection, range(200))
    for where in (
        {"topic": ["the sea's"]},
        {"topic": ['a "quoted" one'], "open": [True]},
        {"year": [1991, 1994]},
        {"score": [2.5, 3, 4.25], "open": [False]},
        {"topic": ["nothing has it"]},
    ):
        values = ((row, collection.metadata(row)) for row in range(200))
        rows = [row for row, metadata in values if all(metadata[name] in asked for name, asked in where.items())]
        check_exact(engine.layout, collection, engine.search(collection.queries, 10, where), 10, rows)
    engine.close()


NASTY = ["it's", "''", "' OR true --", 'a "b"', "a\\b", "a\nb", "%", "`", "ü", ""]


@pytest.mark.parametrize("name", INSTALLED)
def test_texts_and_columns_of_any_kind_are_filters(tmp_path, collection, name):
    column = "a.b `c` [d] e's"
    layout = replace(make_layout(collection, "64@float32"), columns={column: "text"})
    engine = opened(tmp_path, layout, name)
    batch = collection.batch(layout, range(len(NASTY)))
    rows = [replace(row, metadata={column: text}) for row, text in zip(batch.documents, NASTY, strict=True)]
    engine.truncate(0)
    engine.add([replace(batch, documents=rows)])
    for row, text in enumerate(NASTY):
        (actual,) = engine.search(collection.queries[:1], 2, {column: [text]})
        assert [hit.id for hit in actual] == [f"id-{row}"]
    assert {hit.id for hit in engine.search(collection.queries[:1], 2, {column: NASTY[:2]})[0]} == {"id-0", "id-1"}
    engine.close()


@pytest.mark.parametrize("name, text", [case for case in CASES if case[1] == "64@float32"])
def test_ids_texts_and_metadata_are_kept(tmp_path, collection, name, text):
    engine = opened(tmp_path, make_layout(collection, text), name)
    add(engine, collection, range(200))
    assert engine.keys_of(["id-7", "none", "id-199"]) == {"id-7": 7, "id-199": 199} and engine.count() == 200
    for hit in engine.search(collection.queries[:1], 5)[0]:
        row = int(hit.id.removeprefix("id-"))
        assert (hit.text, hit.metadata) == (f"text of {row}", collection.metadata(row))
    engine.close()


@pytest.mark.parametrize(
    ("name", "text", "options", "reason"),
    [
        *((name, "64@float32", {"kind": "tree"}, f"{name} has no index type tree; it has flat") for name in INSTALLED),
        ("qdrant", "48@int4", {}, "qdrant has no precision int4; it has float32"),
        ("qdrant", "64@binary>40>64@int8", {}, "qdrant has no precision for rescoring int8; it has float32"),
        ("faiss", "64@float32", {"url": "http://x"}, "is for Qdrant"),
        ("lancedb", "64@binary", {"kind": "hnsw"}, "lancedb has no index type hnsw for binary"),
        ("qdrant", "64@float32", {"kind": "hnsw"}, "qdrant has the index type hnsw on a server"),
    ],
)
def test_what_an_engine_does_not_have_is_refused(collection, name, text, options, reason):
    pytest.importorskip(find_engine(name).module)
    with pytest.raises(ValueError, match=reason):
        find_engine(name).require(make_layout(collection, text, **options))
