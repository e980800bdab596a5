"""An index from documents to hits, in every engine: interrupted, changed, and refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest
import torch

from m3bert.encode.coding import PackedIndex
from m3bert.encode.search import exact_search, rerank
from m3bert.evaluation import GridEncoder
from m3bert.index import ENGINES, Corpus, Index, Plan, index as module
from m3bert.index.engine import find_engine
from m3bert.index.plan import encoder_identity
from m3bert.trainers import Granularity, Grid
from tests.index.test_engines import MODULES


INSTALLED = [name for name in ENGINES if find_spec(MODULES[name]) is not None]
QUERIES = ["read the file", "join two paths", "a number"]


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("4,6x32"), prompts={"query": "find "})


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)
    monkeypatch.setattr(module, "SAMPLE", 1)


def write(file: Path, sentences: list[str], first: int = 0) -> str:
    rows = [
        {"id": f"d{number}", "text": text, "year": 1990 + number % 3, "tags": ["x"]}
        for number, text in enumerate(sentences, start=first)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def corpus(tmp_path, sentences) -> Corpus:
    return Corpus([write(tmp_path / "corpus.jsonl", sentences)])


def ids(index: Index, k: int = 10, **options) -> list[list[str]]:
    return [[hit.id for hit in hits] for hits in index.search(QUERIES, k, **options)]


def nearest(encoder: GridEncoder, sentences: list[str], plan: Plan, k: int = 10) -> list[list[str]]:
    """What our own search finds."""
    documents = encoder.encode(sentences, role="document").widest(plan.documents.layer)
    queries = encoder.encode(QUERIES, role="query").widest(plan.query.layer)
    if plan.first_dim is not None:
        shortlist = exact_search(queries[:, : plan.first_dim], documents[:, : plan.first_dim], plan.shortlist)
        rows = rerank(queries, documents, shortlist, [plan.shortlist])[plan.shortlist][:, :k]
    else:
        index = PackedIndex.pack(documents, plan.documents.code, plan.documents.dim, encoder.quantizer)
        rows = index.search(queries, k)[1]
    return [[f"d{row}" for row in line] for line in rows.tolist()]


PLANS = (
    Plan(Granularity(6, 32)),
    Plan(Granularity(6, 32), first_dim=8, shortlist=20),
    Plan(Granularity(6, 16), query_layer=4),
)


@pytest.mark.parametrize("plan", PLANS, ids=["exact", "two stages", "queries at another layer"])
@pytest.mark.parametrize("engine", INSTALLED)
def test_an_index_finds_what_our_own_search_finds(tmp_path, encoder, corpus, sentences, engine, plan):
    with Index.build(tmp_path / "index", engine, plan, encoder, corpus) as index:
        assert len(index) == len(sentences)
    with Index.open(tmp_path / "index", encoder) as index:
        assert ids(index) == nearest(encoder, sentences, plan)
        hit = index.search(QUERIES[:1], 1)[0][0]
        number = int(hit.id[1:])
        assert (hit.text, hit.metadata) == (sentences[number], {"year": 1990 + number % 3, "tags": ["x"]})


class Killed(BaseException):
    """Stands in for a kill: nothing of ours catches it."""


def stop_at(patch, engine: str, moment: str) -> None:
    """Stop the next addition in the middle of its documents, or before it says that it is finished."""
    add = find_engine(engine).add

    def stop(self, batches):
        add(self, islice(batches, 2) if moment == "in the middle" else batches)
        raise Killed

    patch.setattr(find_engine(engine), "add", stop)


@pytest.mark.parametrize("moment", ["in the middle", "at the end"])
@pytest.mark.parametrize("engine", INSTALLED)
def test_an_interrupted_build_is_no_index_and_starts_again(
    tmp_path, encoder, corpus, sentences, engine, moment, monkeypatch
):
    plan, target = Plan(Granularity(6, 32), first_dim=8, shortlist=20), (tmp_path / "index", engine)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        stop_at(patch, engine, moment)
        Index.build(*target, plan, encoder, corpus)
    with Index.open(target[0], encoder) as half:
        for call in (half.search, half.delete):
            with pytest.raises(ValueError, match="is not finished: run the command that was interrupted again"):
                call(["d1"])
    with Index.build(*target, plan, encoder, corpus) as index:
        assert len(index) == len(sentences)
        assert ids(index) == nearest(encoder, sentences, plan)


@pytest.mark.parametrize("moment", ["in the middle", "at the end"])
@pytest.mark.parametrize("engine", INSTALLED)
def test_an_interrupted_addition_leaves_nothing_behind(tmp_path, encoder, sentences, engine, moment, monkeypatch):
    plan, target = Plan(Granularity(6, 32)), (tmp_path / "index", engine)
    Index.build(*target, plan, encoder, Corpus([write(tmp_path / "first.jsonl", sentences[:20])])).close()
    with Index.open(target[0], encoder) as index, monkeypatch.context() as patch, pytest.raises(Killed):
        stop_at(patch, engine, moment)
        index.add(Corpus([write(tmp_path / "more.jsonl", sentences[20:], 20)]))
    with Index.open(target[0], encoder) as index:
        with pytest.raises(ValueError, match="is not finished"):
            index.search(QUERIES)
        assert index.add(Corpus([write(tmp_path / "fewer.jsonl", sentences[20:30], 20)])) == 10
        assert len(index) == 30 and ids(index) == nearest(encoder, sentences[:30], plan)


@pytest.mark.parametrize("engine", INSTALLED)
def test_documents_are_added_and_deleted(tmp_path, encoder, sentences, engine):
    plan = Plan(Granularity(6, 32))
    first = Corpus([write(tmp_path / "first.jsonl", sentences[:20])])
    Index.build(tmp_path / "index", engine, plan, encoder, first).close()
    with Index.open(tmp_path / "index") as index:  # deleting needs no encoder
        with pytest.raises(ValueError, match="has no document 'd99'"):
            index.delete(["d1", "d99"])
        assert len(index) == 20
        index.delete(["d3", "d5"])
        assert len(index) == 18
    with Index.open(tmp_path / "index", encoder) as index:
        added = index.add(Corpus([write(tmp_path / "more.jsonl", sentences[20:], 20)]))
        assert added == len(sentences) - 20
        kept = [row for row in range(len(sentences)) if row not in (3, 5)]
        best = exact_search(
            encoder.encode(QUERIES, role="query").widest(6),
            encoder.encode([sentences[row] for row in kept], role="document").widest(6),
            10,
        )
        assert ids(index) == [[f"d{kept[row]}" for row in line] for line in best.tolist()]
        again = Corpus([write(tmp_path / "again.jsonl", [sentences[3]], 3)])
        assert index.add(again) == 1  # a deleted id may come back
        assert len(index) == len(sentences) - 1
        with pytest.raises(ValueError, match="row 1: the id 'd3' is that of an earlier document"):
            index.add(again)


@pytest.mark.parametrize("engine", INSTALLED)
def test_filters(tmp_path, encoder, corpus, engine):
    with Index.build(tmp_path / "index", engine, Plan(Granularity(6, 32)), encoder, corpus) as index:
        found = ids(index, 5, where={"year": 1991})
        everything = ids(index, 1000)
        assert found == [[id_ for id_ in row if int(id_[1:]) % 3 == 1][:5] for row in everything]
        assert ids(index, 5, where={"year": []}) == [[]] * 3
        for where, reason in (
            ({"tags": "x"}, r"Cannot filter by tags='x'; columns: {'year': 'integer', 'tags': 'json'}"),
            ({"year": ["1991"]}, "Cannot filter by year="),
            ({"unknown": []}, "Cannot filter by unknown="),
        ):
            with pytest.raises(ValueError, match=reason):
                index.search(QUERIES, where=where)
        with pytest.raises(ValueError, match="k=0 must be at least 1"):
            index.search(QUERIES, 0)


@pytest.fixture
def engine() -> str:
    if not INSTALLED:
        pytest.skip("no engine is installed")
    return INSTALLED[0]


@pytest.mark.parametrize("first", [1, 3, 21], ids=["at once", "in a chunk", "in chunks"])
def test_repeated_ids_are_refused(tmp_path, encoder, sentences, engine, first):
    files = [write(tmp_path / "corpus.jsonl", sentences[:first]), write(tmp_path / "again.jsonl", sentences[:1])]
    with pytest.raises(ValueError, match="again.jsonl, row 1: the id 'd0' is that of an earlier document"):
        Index.build(tmp_path / "index", engine, Plan(Granularity(6, 32)), encoder, Corpus(files))


def test_a_finished_build_is_not_built_again(tmp_path, encoder, corpus, engine, monkeypatch):
    target, plan = (tmp_path / "index", engine), Plan(Granularity(6, 32))
    Index.build(*target, plan, encoder, corpus).close()
    monkeypatch.setattr(module, "embedded", None)
    Index.build(*target, plan, encoder, corpus).close()
    with pytest.raises(ValueError, match="holds an index with another plan; choose another folder"):
        Index.build(*target, replace(plan, query_layer=4), encoder, corpus)
    with pytest.raises(ValueError, match="holds an index with another engine"):
        Index.build(target[0], INSTALLED[-1], plan, encoder, corpus)


def test_another_model_is_refused(tmp_path, encoder, corpus, engine, tiny_model):
    target, plan = (tmp_path / "index", engine), Plan(Granularity(6, 32))
    Index.build(*target, plan, encoder, corpus).close()
    plan_of_it = replace(plan, encoder=encoder_identity(encoder))
    with torch.no_grad():
        tiny_model.layers[3].mlp.down_proj.weight[0, 0] += 0.01
    with pytest.raises(ValueError, match="The index .* is of another encoder: weights "):
        Index.open(target[0], encoder)
    with pytest.raises(ValueError, match="The plan is of another encoder"):
        Index.build(tmp_path / "other", engine, plan_of_it, encoder, corpus)
    assert not (tmp_path / "other").exists()


def test_folders_of_others_are_left_alone(tmp_path, encoder, corpus, engine):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(ValueError, match=r"photos is not empty and holds no index \(cat.jpg\)"):
        Index.build(tmp_path / "photos", engine, Plan(Granularity(6, 32)), encoder, corpus)
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]
    with pytest.raises(ValueError, match="holds no index: it has no index.json"):
        Index.open(tmp_path / "photos")
