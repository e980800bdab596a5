"""What every engine must do: search exactly, repeat what a kill stopped, change, filter, be searched without us."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from tests.trainers.index.collection import Collection, add, check_exact, delete, make_layout, opened, quantizer_for
from trainers.index.engine import BY_HAND, ENGINES, find_engine
from trainers.index.engines.lines import with_imports


MODULES = {"faiss": "faiss", "qdrant": "qdrant_client", "lancedb": "lancedb"}
LAYOUTS = (
    "64@float32",
    "24@float32",
    "64@float16",
    "64@int8",
    "48@int4",
    "64@binary",
    "20@binary",
    "64@qama-2",
    "32@qama-0.5",
    "16@float32>40>64@float32",
    "64@binary>40>64@float32",
    "64@binary>40>64@int8",
    "32@qama-2>40",
    "64@qama-1>40>64@int8",
    "64@int8>40>64@float32",
    "48@int4>40>48@int8",
)
ROWS = 300


def supported() -> list[tuple[str, str]]:
    found = []
    for name in ENGINES:
        if find_spec(MODULES[name]) is None:
            continue
        engine = find_engine(name)
        for text in LAYOUTS:
            codes = [part.split("@")[1] for part in text.split(">") if "@" in part]
            if codes[0] in engine.codes and (len(codes) == 1 or codes[1] in engine.second_codes):
                found.append((name, text))
    return found


CASES = supported()
INSTALLED = list(dict.fromkeys(name for name, _ in CASES))
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
        scores, keys = engine.search(collection.queries, k)
        assert scores.dtype == np.float32 and keys.dtype == np.int64
        check_exact(layout, collection, scores, keys, k)
    engine.close()


@pytest.mark.parametrize("name, text", TWO_EACH)
def test_few_documents_are_all_found_and_none_are_too(tmp_path, collection, name, text):
    engine = opened(tmp_path, make_layout(collection, text), name)
    check_exact(engine.layout, collection, *engine.search(collection.queries, 8), 8, [])
    add(engine, collection, range(5))
    check_exact(engine.layout, collection, *engine.search(collection.queries, 8), 8, range(5))
    delete(engine, range(5))
    check_exact(engine.layout, collection, *engine.search(collection.queries, 8), 8, [])
    add(engine, collection, range(5, 9))
    check_exact(engine.layout, collection, *engine.search(collection.queries, 8), 8, range(5, 9))
    engine.close()


@pytest.mark.parametrize("name, text", TWO_EACH)
def test_deleting_and_adding_keep_the_rest_and_may_be_repeated(tmp_path, collection, name, text):
    """As after a kill between the engine's work and the note of it."""
    layout = make_layout(collection, text)
    engine = opened(tmp_path, layout, name)
    add(engine, collection, range(200))
    engine.add(engine.store.keys())
    check_exact(layout, collection, *engine.search(collection.queries, 10), 10, range(200))
    gone = [*range(0, 100, 3), 7777]  # the last one is not there
    for _ in range(2):
        engine.delete(np.array(gone))
    delete(engine, gone)
    kept = sorted(set(range(200)) - set(gone))
    check_exact(layout, collection, *engine.search(collection.queries, 10), 10, kept)
    engine.close()
    engine = opened(tmp_path, layout, name)
    add(engine, collection, range(200, ROWS))
    engine.close()
    engine = opened(tmp_path, layout, name)
    engine.add(engine.store.keys(200))
    check_exact(layout, collection, *engine.search(collection.queries, 10), 10, [*kept, *range(200, ROWS)])
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
        rows = [row for row, own in values if all(own[name] in wanted for name, wanted in where.items())]
        check_exact(engine.layout, collection, *engine.search(collection.queries, 10, where), 10, rows)
    engine.close()


NASTY = ["it's", "''", "' OR true --", 'a "b"', "a\\b", "a\nb", "%", "`", "ü", ""]


@pytest.mark.parametrize("name", INSTALLED)
def test_texts_and_columns_of_any_kind_are_filters(tmp_path, collection, name):
    column = "a.b `c` [d] e's"
    layout = replace(make_layout(collection, "64@float32"), columns={column: "text"})
    engine = opened(tmp_path, layout, name)
    batch = collection.batch(layout, range(len(NASTY)))
    engine.store.add(replace(batch, metadata=[{column: text} for text in NASTY]), {})
    engine.add(engine.store.keys())
    for row, text in enumerate(NASTY):
        assert engine.search(collection.queries[:1], 2, {column: [text]})[1].tolist() == [[row, -1]]
    assert set(engine.search(collection.queries[:1], 2, {column: NASTY[:2]})[1][0].tolist()) == {0, 1}
    engine.close()


RUN_ALL = """
import json
import numpy

for case in json.load(open("cases.json")):
    values = {}
    if case["quantizer"]:
        from transformers import AutoModel

        values["quantizer"] = AutoModel.from_pretrained(case["quantizer"], trust_remote_code=True)
    results = []
    for query in numpy.load("queries.npy"):
        values["query"] = query
        exec(case["lines"], values)
        results.append([(id_, float(score)) for id_, score in values["found"]])
    print("RESULTS", json.dumps(results))
"""


@pytest.mark.parametrize("name", INSTALLED)
def test_the_printed_lines_search_without_this_package(tmp_path, collection, name, run_bare):
    """One process for all layouts of an engine."""
    quantizer_for(collection).save_pretrained(tmp_path / "quantizer")
    np.save(tmp_path / "queries.npy", collection.queries.numpy())
    texts = [text for engine, text in CASES if engine == name]
    expected, cases = {}, []
    for number, text in enumerate(texts):
        layout, folder = make_layout(collection, text), tmp_path / f"an index {number}"
        engine = opened(folder, layout, name)
        add(engine, collection, range(ROWS))
        (folder / "index.json").write_text(json.dumps({"layout": layout.to_dict()}))
        expected[text] = engine.search(collection.queries, 10)
        quantizer = str(tmp_path / "quantizer") if "qama" in text else None
        cases.append({"lines": with_imports(engine.example()), "quantizer": quantizer})
        engine.close()
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    said = run_bare(RUN_ALL)
    results = [json.loads(line.removeprefix("RESULTS")) for line in said.splitlines() if line.startswith("RESULTS")]
    for text, result in zip(texts, results, strict=True):
        scores, keys = expected[text]
        for row, found in enumerate(result):
            assert len(found) == 10, text
            np.testing.assert_allclose([score for _, score in found], scores[row], atol=2e-5, err_msg=text)
            ours = {f"id-{key}" for key in keys[row].tolist()}
            ties = scores[row] <= scores[row, -1] + 2e-5  # the last ones may be others with the same score
            assert len({id_ for id_, _ in found} & ours) >= 10 - ties.sum(), text


@pytest.mark.parametrize("name", INSTALLED)
def test_an_engine_that_is_not_installed_is_named_with_its_extra(collection, name, monkeypatch):
    engine = find_engine(name)
    monkeypatch.setitem(__import__("sys").modules, engine.module, None)
    with pytest.raises(
        ValueError, match=rf"^The vector store {name} needs the package .*pip install 'm3bert\[{name}\]'\.$"
    ):
        engine.require(make_layout(collection, "64@float32"))


@pytest.mark.parametrize(
    ("name", "text", "options", "reason"),
    [
        *(
            (name, "64@float32", {"kind": "tree"}, rf"^--index_type tree: the vector store {name} has flat")
            for name in INSTALLED
        ),
        ("qdrant", "48@int4", {}, "The vector store qdrant has no int4; it has float32"),
        ("lancedb", "48@int4", {}, "The vector store lancedb has no int4; it has float32"),
        (
            "qdrant",
            "64@binary>40>64@int8",
            {},
            "The vector store qdrant cannot score a shortlist by int8; it can by float32",
        ),
        ("faiss", "64@float32", {"url": "http://x"}, "--url is for Qdrant; the vector store faiss has no server"),
        (
            "lancedb",
            "64@binary",
            {"kind": "hnsw"},
            "^--index_type hnsw: the vector store lancedb has flat, ivf for binary",
        ),
        (
            "qdrant",
            "64@float32",
            {"kind": "hnsw"},
            r"^--index_type hnsw: the vector store qdrant has it on a server \(--url\)",
        ),
    ],
)
def test_what_an_engine_does_not_have_is_refused(collection, name, text, options, reason):
    pytest.importorskip(MODULES[name])
    with pytest.raises(ValueError, match=reason):
        find_engine(name).require(make_layout(collection, text, **options))


def test_other_engines_are_refused():
    with pytest.raises(ValueError, match="--vector_store annoy is unknown; legal values: faiss, qdrant, lancedb"):
        find_engine("annoy")
    for name in BY_HAND:
        with pytest.raises(
            ValueError, match=rf"^--vector_store {name}: m3bert builds no index there; docs/deploy.md, 'Other"
        ):
            find_engine(name)
