"""What every engine must do: search exactly, write twice, delete, add, filter, be searched without this package."""

from __future__ import annotations

import json
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainers.index.collection import Collection, check_exact, final_scores, make_layout, quantizer_for
from trainers.index.documents import DocumentStore
from trainers.index.engine import ENGINES, Engine, find_engine


MODULES = {
    "faiss": "faiss",
    "qdrant": "qdrant_client",
    "lancedb": "lancedb",
    "usearch": "usearch",
    "sqlite-vec": "sqlite_vec",
}
LAYOUTS = (
    "64@float32",
    "24@float32",
    "64@float16",
    "64@int8",
    "48@int4",
    "64@sign",
    "20@sign",
    "64@qama-2",
    "16@float32>40>64@float32",
    "16@float32>40>48@float16",
    "64@sign>40>64@float32",
    "64@sign>40>64@int8",
    "32@qama-2>40",
    "64@qama-1>40>64@int8",
    "64@int8>40>64@float32",
)


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
ONE_EACH = list({name: (name, text) for name, text in reversed(CASES) if text == "16@float32>40>64@float32"}.values())


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection.make()


def opened(folder: Path, collection: Collection, name: str, text: str) -> Engine:
    engine = find_engine(name)
    return engine(folder, make_layout(collection, text, one_range=engine.one_range))


def filled_engine(folder: Path, collection: Collection, name: str, text: str, rows: range = range(300)) -> Engine:
    engine = opened(folder, collection, name, text)
    for start in range(rows.start, rows.stop, 128):
        engine.write(collection.batch(engine.layout, range(start, min(start + 128, rows.stop))))
    engine.finish()
    return engine


def is_exact(name: str, text: str) -> bool:
    """Engines that multiply int8 with int8 round the query, too."""
    return not (find_engine(name).one_range and "int8" in text)


@pytest.mark.parametrize("name, text", CASES)
def test_a_flat_index_finds_exactly_the_nearest(tmp_path, collection, name, text):
    filled_engine(tmp_path, collection, name, text).close()
    engine = opened(tmp_path, collection, name, text)
    for k in (1, 10):
        scores, keys = engine.search(collection.queries, k)
        assert scores.dtype == np.float32 and keys.dtype == np.int64
        if is_exact(name, text):
            check_exact(engine.layout, collection, scores, keys, k)
    if not is_exact(name, text):
        best = np.argsort(-final_scores(engine.layout, collection), axis=1)[:, :10]
        overlap = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(best.tolist(), keys.tolist(), strict=True)])
        assert overlap >= 0.9
    engine.close()


@pytest.mark.parametrize("name, text", ONE_EACH)
def test_more_than_all_documents_are_all_documents(tmp_path, collection, name, text):
    engine = filled_engine(tmp_path, collection, name, text, range(5))
    scores, keys = engine.search(collection.queries, 8)
    check_exact(engine.layout, collection, scores, keys, 8, range(5))
    engine.close()


@pytest.mark.parametrize("name, text", ONE_EACH)
def test_a_batch_may_be_written_twice(tmp_path, collection, name, text):
    """As after a kill between the engine's write and the note of it."""
    engine = opened(tmp_path, collection, name, text)
    engine.write(collection.batch(engine.layout, range(0, 200)))
    engine.close()
    engine = opened(tmp_path, collection, name, text)
    engine.write(collection.batch(engine.layout, range(0, 200)))
    engine.write(collection.batch(engine.layout, range(200, 300)))
    engine.finish()
    engine.finish()
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10)
    engine.close()


@pytest.mark.parametrize("name, text", [case for case in CASES if case[1] in ("64@sign", "16@float32>40>64@float32")])
def test_deleting_and_adding_keep_the_rest(tmp_path, collection, name, text):
    engine = filled_engine(tmp_path, collection, name, text, range(200))
    engine.delete(np.arange(0, 100, 3))
    engine.delete(np.array([0, 3, 10_000]))  # which are not there
    kept = sorted(set(range(200)) - set(range(0, 100, 3)))
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10, kept)
    engine.close()
    engine = opened(tmp_path, collection, name, text)
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10, kept)
    engine.write(collection.batch(engine.layout, range(200, 300)))
    engine.finish()
    check_exact(engine.layout, collection, *engine.search(collection.queries, 10), 10, [*kept, *range(200, 300)])
    engine.close()


@pytest.mark.parametrize("name, text", CASES)
def test_stored_bytes_come_back(tmp_path, collection, name, text):
    engine = filled_engine(tmp_path, collection, name, text, range(50))
    if engine.layout.shortlist is not None:
        batch = collection.batch(engine.layout, [41, 2, 7])
        expected = batch.first if batch.second is None else batch.second
        np.testing.assert_array_equal(engine.packed(np.array([41, 2, 7])), expected)
    assert engine.disk_bytes() >= 50 * engine.layout.bytes_per_document
    engine.close()


WHERE = (
    {"topic": "the sea's"},
    {"topic": 'a "quoted" one', "open": True},
    {"year": [1991, 1994]},
    {"topic": "nothing has it"},
)


@pytest.mark.parametrize("where", WHERE, ids=["text", "two columns", "several values", "nothing"])
@pytest.mark.parametrize("name, text", [case for case in CASES if case[1] in ("64@sign", "16@float32>40>64@float32")])
def test_a_filter_finds_the_nearest_of_those_that_pass(tmp_path, collection, name, text, where):
    engine = filled_engine(tmp_path, collection, name, text, range(200))
    if not engine.filters:
        engine.close()
        pytest.skip(f"{name} has no filters")
    rows = []
    for row in range(200):
        values = collection.metadata(row)
        if all(values[name] in (wanted if isinstance(wanted, list) else [wanted]) for name, wanted in where.items()):
            rows.append(row)
    if engine.holds_documents:
        scores, keys = engine.search(collection.queries, 10, where=where)
    else:
        scores, keys = engine.search(collection.queries, 10, allowed=np.array(rows, dtype=np.int64))
    check_exact(engine.layout, collection, scores, keys, 10, rows)
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
        folder = tmp_path / f"an index {number}"
        folder.mkdir()
        engine = filled_engine(folder, collection, name, text)
        with closing(DocumentStore(folder / "documents.sqlite", not engine.holds_documents)) as store:
            for start in range(0, 300, 128):
                store.add(collection.batch(engine.layout, range(start, min(start + 128, 300))), {})
        expected[text] = engine.search(collection.queries, 10)
        quantizer = str(tmp_path / "quantizer") if "qama" in text else None
        cases.append({"lines": engine.example(), "quantizer": quantizer})
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


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_is_not_installed_is_named_with_its_extra(tmp_path, collection, name, monkeypatch):
    pytest.importorskip(MODULES[name])
    engine = find_engine(name)
    monkeypatch.setitem(__import__("sys").modules, engine.module, None)
    with pytest.raises(ValueError, match=rf"^The engine {name} needs the package .*pip install 'm3bert\[{name}\]'\.$"):
        engine(tmp_path, make_layout(collection, "64@float32"))


@pytest.mark.parametrize("name", ENGINES)
def test_what_an_engine_does_not_have_is_refused(tmp_path, collection, name):
    pytest.importorskip(MODULES[name])
    engine = find_engine(name)
    layout = make_layout(collection, "64@float32")
    with pytest.raises(ValueError, match=rf"--kind tree: the engine {name} has "):
        engine(tmp_path, make_layout(collection, "64@float32", kind="tree"))
    if "int4" not in engine.codes:
        with pytest.raises(ValueError, match=rf"The engine {name} has no int4; it has float32"):
            engine(tmp_path, make_layout(collection, "48@int4"))
    assert engine.require(layout) is None


def test_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="--engine annoy is unknown; legal values: faiss, qdrant, lancedb, usearch"):
        find_engine("annoy")


def test_a_document_of_any_width_is_scored_again(collection):
    """The second stage of the base class: a key that was not found stays last."""

    class Plain(Engine):
        write = finish = delete = search = disk_bytes = example = close = None

        def __init__(self, layout):
            self.layout = layout

        def packed(self, keys):
            return self.layout.second.pack(collection.vectors[keys])

    Plain.__abstractmethods__ = frozenset()
    layout = make_layout(collection, "16@float32>4>64@float32")
    keys = np.array([[3, 1, -1, 8]])
    scores, found = Plain(layout).scored_again(collection.queries[:1], keys, 4)
    cosines = torch.nn.functional.cosine_similarity(collection.queries[:1], collection.vectors[[3, 1, 8]])
    order = cosines.argsort(descending=True)
    np.testing.assert_allclose(scores[0, :3], cosines[order], atol=1e-6)
    assert found[0].tolist() == [*np.array([3, 1, 8])[order].tolist(), -1] and np.isneginf(scores[0, 3])
