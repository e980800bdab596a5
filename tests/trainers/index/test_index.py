"""An index from documents to hits, in every engine: interrupted, changed, and refused."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainers.index.collection import quantizer_for
from tests.trainers.index.test_engines import MODULES
from trainers import Granularity, Grid
from trainers.evaluation import GridEncoder, bm25_search
from trainers.evaluation.coding import PackedIndex
from trainers.evaluation.search import exact_search, rerank
from trainers.index import ENGINES, Corpus, Index, Plan, Target, index as module, manifest
from trainers.index.engine import find_engine
from trainers.index.plan import encoder_identity
from trainers.index.store import Store


INSTALLED = [name for name in ENGINES if find_spec(MODULES[name]) is not None]
QUERIES = ["read the file", "join two paths", "a number"]


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("4,6x32"), prompts={"query": "find "})


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 8)
    monkeypatch.setattr(manifest, "CHUNK", 8)
    monkeypatch.setattr(manifest, "SAMPLE", 1)


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
    with Index.build(Target(tmp_path / "index", engine, "flat"), plan, encoder, corpus) as index:
        assert len(index) == len(sentences)
    with Index.open(tmp_path / "index", encoder) as index:
        assert ids(index) == nearest(encoder, sentences, plan)
        hit = index.search(QUERIES[:1], 1)[0][0]
        number = int(hit.id[1:])
        assert (hit.text, hit.metadata) == (sentences[number], {"year": 1990 + number % 3, "tags": ["x"]})


@pytest.mark.parametrize("engine", [name for name in ("faiss", "lancedb") if name in INSTALLED])
def test_learned_codes(tmp_path, encoder, corpus, sentences, engine):
    documents = encoder.encode(sentences, role="document").widest(6)
    quantizer = quantizer_for(type("Vectors", (), {"vectors": documents}))
    plan = Plan(Granularity(6, 16, "qama-2"))
    encoder = replace(encoder, grid=plan.grid(), quantizer=quantizer)
    with Index.build(Target(tmp_path / "index", engine), plan, encoder, corpus) as index:
        found = index.search(QUERIES, 10)
    packed = PackedIndex.pack(documents, "qama-2", 16, quantizer)
    scores, _ = packed.search(encoder.encode(QUERIES, role="query").widest(6), 10)
    np.testing.assert_allclose([[hit.score for hit in hits] for hits in found], scores, atol=1e-6)


class Killed(BaseException):
    """Stands in for a kill: nothing of ours catches it."""


@pytest.mark.parametrize("moment", ["before a note", "after a note", "before the engine", "after the engine"])
@pytest.mark.parametrize("engine", INSTALLED)
def test_an_interrupted_build_goes_on_from_what_was_embedded(
    tmp_path, encoder, corpus, sentences, engine, moment, monkeypatch
):
    plan, target = Plan(Granularity(6, 32), first_dim=8, shortlist=20), Target(tmp_path / "index", engine, "flat")
    encoded, notes = [], []
    note, embedded, build = Store.add, module.embedded, find_engine(engine).add

    def counted(encoder, plan, chunk):
        encoded.extend(document.id for document in chunk)
        return embedded(encoder, plan, chunk)

    def note_or_stop(self, batch, state):
        notes.append(batch)
        if moment == "before a note" and len(notes) == 3:
            raise Killed
        note(self, batch, state)
        if moment == "after a note" and len(notes) == 3:
            raise Killed

    def build_or_stop(self, keys):
        if moment == "after the engine":
            build(self, keys)
        raise Killed

    monkeypatch.setattr(module, "embedded", counted)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Store, "add", note_or_stop)
        patch.setattr(find_engine(engine), "add", build_or_stop)
        Index.build(target, plan, encoder, corpus)
    with Index.open(target.folder, encoder) as half:
        with pytest.raises(ValueError, match="is not finished: run the command that was interrupted again"):
            half.search(QUERIES)
        with pytest.raises(ValueError, match="is not finished"):
            half.delete(["d1"])
    with Index.build(target, plan, encoder, corpus) as index:
        assert len(index) == len(sentences) and index.pending is None
        assert ids(index) == nearest(encoder, sentences, plan)
    assert len(encoded) == len(sentences) + (8 if moment == "before a note" else 0)  # which was one chunk


@pytest.mark.parametrize("engine", INSTALLED)
def test_an_interrupted_addition_goes_on(tmp_path, encoder, sentences, engine, monkeypatch):
    plan, target = Plan(Granularity(6, 32)), Target(tmp_path / "index", engine, "flat")
    Index.build(target, plan, encoder, Corpus([write(tmp_path / "first.jsonl", sentences[:20])])).close()
    more = Corpus([write(tmp_path / "more.jsonl", sentences[20:], 20)])
    with Index.open(target.folder, encoder) as index:
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(index.engine, "add", lambda keys: (_ for _ in ()).throw(Killed))
            index.add(more)
        with pytest.raises(ValueError, match="is not finished"):
            index.search(QUERIES)
        monkeypatch.setattr(module, "embedded", None)
        assert index.add(more) == 0  # nothing is embedded or stored again
        assert ids(index) == nearest(encoder, sentences, plan)


@pytest.mark.parametrize("engine", INSTALLED)
def test_documents_are_added_and_deleted(tmp_path, encoder, sentences, engine):
    plan = Plan(Granularity(6, 32))
    first = Corpus([write(tmp_path / "first.jsonl", sentences[:20])])
    Index.build(Target(tmp_path / "index", engine, "flat"), plan, encoder, first).close()
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
        assert "d3" in {hit.id for hit in index.search([sentences[3]], 3)[0]} or len(index) == len(sentences) - 1


@pytest.mark.parametrize("engine", INSTALLED)
def test_filters(tmp_path, encoder, corpus, engine):
    with Index.build(Target(tmp_path / "index", engine, "flat"), Plan(Granularity(6, 32)), encoder, corpus) as index:
        found = ids(index, 5, where={"year": 1991})
        everything = ids(index, 1000)
        assert found == [[id_ for id_ in row if int(id_[1:]) % 3 == 1][:5] for row in everything]
        assert ids(index, 5, where={"year": []}) == [[]] * 3
        for where, reason in (
            ({"tags": "x"}, "Cannot filter by 'tags'; columns of the index: year"),
            ({"year": ["1991"]}, "Cannot filter by year='1991': the column has the type integer"),
            ({"year": True}, "Cannot filter by year=True: the column has the type integer"),
        ):
            with pytest.raises(ValueError, match=reason):
                index.search(QUERIES, where=where)


@pytest.fixture
def engine() -> str:
    if not INSTALLED:
        pytest.skip("no engine is installed")
    return INSTALLED[0]


def test_rows_that_are_mended_or_added_after_an_error_are_indexed(tmp_path, encoder, sentences, engine):
    """The rows before them are not embedded again."""
    file = tmp_path / "corpus.jsonl"
    write(file, [*sentences[:20], " ", *sentences[20:30]])
    target, plan = Target(tmp_path / "index", engine), Plan(Granularity(6, 32))
    with pytest.raises(ValueError, match="row 21: the document has no text"):
        Index.build(target, plan, encoder, Corpus([str(file)]))
    write(file, sentences)
    with Index.build(target, plan, encoder, Corpus([str(file)])) as index:
        assert ids(index) == nearest(encoder, sentences, plan)


def test_other_rows_than_those_that_were_read_are_refused(tmp_path, encoder, sentences, engine):
    file = tmp_path / "corpus.jsonl"
    write(file, [*sentences[:20], " "])
    target, plan = Target(tmp_path / "index", engine), Plan(Granularity(6, 32))
    with pytest.raises(ValueError, match="no text"):
        Index.build(target, plan, encoder, Corpus([str(file)]))
    for rows in (["a new first row", *sentences], sentences[:3]):
        write(file, rows)
        with pytest.raises(ValueError, match="is half built, and the first 16 rows of .* are not those"):
            Index.build(target, plan, encoder, Corpus([str(file)]))


@pytest.mark.parametrize("place", [3, 21], ids=["in the same chunk", "in a later chunk"])
def test_repeated_ids_are_refused(tmp_path, encoder, sentences, engine, place):
    rows = [{"id": f"d{number}", "text": text} for number, text in enumerate(sentences[:24])]
    rows[place]["id"] = "d1"
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=rf"row {place + 1}: the id 'd1' is that of an earlier document"):
        Index.build(
            Target(tmp_path / "index", engine),
            Plan(Granularity(6, 32)),
            encoder,
            Corpus([str(tmp_path / "corpus.jsonl")]),
        )


def test_a_finished_build_is_not_built_again(tmp_path, encoder, corpus, engine, monkeypatch):
    target, plan = Target(tmp_path / "index", engine), Plan(Granularity(6, 32))
    Index.build(target, plan, encoder, corpus).close()
    monkeypatch.setattr(module, "embedded", None)
    Index.build(target, plan, encoder, corpus).close()
    with pytest.raises(ValueError, match="holds an index with another plan; choose another --output_dir"):
        Index.build(target, replace(plan, query_layer=4), encoder, corpus)
    with pytest.raises(ValueError, match="holds an index with another engine"):
        Index.build(replace(target, engine=INSTALLED[-1]), plan, encoder, corpus)


def test_another_model_is_refused(tmp_path, encoder, corpus, engine, tiny_model):
    target, plan = Target(tmp_path / "index", engine), Plan(Granularity(6, 32))
    Index.build(target, plan, encoder, corpus).close()
    plan_of_it = replace(plan, encoder=encoder_identity(encoder))
    with torch.no_grad():
        tiny_model.layers[3].mlp.down_proj.weight[0, 0] += 0.01
    with pytest.raises(ValueError, match="The index .* is of another model: its weights have the digest"):
        Index.open(target.folder, encoder)
    with pytest.raises(ValueError, match="The plan is of another model"):
        Index.build(replace(target, folder=tmp_path / "other"), plan_of_it, encoder, corpus)
    assert not (tmp_path / "other").exists()


def test_folders_of_others_are_left_alone(tmp_path, encoder, corpus, engine):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(ValueError, match=r"photos is not empty and holds no index \(cat.jpg\)"):
        Index.build(Target(tmp_path / "photos", engine), Plan(Granularity(6, 32)), encoder, corpus)
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]
    with pytest.raises(ValueError, match="holds no index: it has no index.json"):
        Index.open(tmp_path / "photos")


def test_embeddings_that_are_not_finite_are_refused(tmp_path, encoder, corpus, engine, tiny_model):
    with torch.no_grad():
        tiny_model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="row 1: the embedding is not finite"):
        Index.build(Target(tmp_path / "index", engine), Plan(Granularity(6, 32)), encoder, corpus)


def naive_hybrid(encoder: GridEncoder, sentences: list[str], k: int) -> list[list[str]]:
    """Exact search by vectors and BM25, fused document by document."""
    documents = torch.nn.functional.normalize(encoder.encode(sentences, role="document").widest(6))
    queries = torch.nn.functional.normalize(encoder.encode(QUERIES, role="query").widest(6))
    found, words = [], bm25_search(QUERIES, sentences)
    for near, rows, scores in zip((queries @ documents.T).double().numpy(), words.rows, words.scores, strict=True):
        by_words = np.empty(len(sentences))
        by_words[rows] = scores
        by_words[by_words == 0] = min(by_words[by_words > 0], default=0)  # the lowest score that the search gave
        fused = (near - near.mean()) / near.std() + 0.5 * (by_words - by_words.mean()) / (by_words.std() or 1)
        found.append([f"d{row}" for row in np.argsort(-fused, kind="stable")[:k]])
    return found


@pytest.mark.parametrize("engine", INSTALLED)
def test_a_hybrid_search_is_that_of_an_evaluation(engine, encoder, corpus, sentences, tmp_path):
    """After a build, and after documents came and went."""
    plan = Plan(Granularity(6, 32))
    with Index.build(Target(tmp_path / "index", engine, words=True), plan, encoder, corpus) as index:
        found = [[hit.id for hit in hits] for hits in index.search(QUERIES, 10, hybrid=True)]
        assert found == naive_hybrid(encoder, sentences, 10)
        index.delete([f"d{row}" for row in range(20, 48)])
        index.add(Corpus([write(tmp_path / "more.jsonl", sentences[20:30], first=100)]))
        kept = {f"d{row}" for row in (*range(20), *range(100, 110))}
        some = [[hit.id for hit in hits] for hits in index.search(QUERIES, 30, hybrid=True)]
        assert all(set(hits) == kept for hits in some)
    rest = [*sentences[:20], *sentences[20:30]]
    names = [*(f"d{row}" for row in range(20)), *(f"d{row}" for row in range(100, 110))]
    again = Corpus([write(tmp_path / "again.jsonl", rest)])
    with Index.build(Target(tmp_path / "fresh", engine, words=True), plan, encoder, again) as fresh:
        expected = [[names[int(hit.id[1:])] for hit in hits] for hits in fresh.search(QUERIES, 30, hybrid=True)]
    assert some == expected
    with Index.open(tmp_path / "index", encoder) as index:
        years = index.search(QUERIES, 30, {"year": 1991}, hybrid=True)
        assert all({hit.metadata["year"] for hit in hits} == {1991} for hits in years)


def test_words_are_searched_only_where_they_are_indexed(encoder, corpus, tmp_path):
    target = Target(tmp_path / "index", "faiss")
    with Index.build(target, Plan(Granularity(6, 32)), encoder, corpus) as index:
        with pytest.raises(ValueError, match="has no words to search by: build it with --hybrid"):
            index.search(QUERIES, hybrid=True)
    with pytest.raises(ValueError, match="holds an index without words"):
        Index.build(replace(target, words=True), Plan(Granularity(6, 32)), encoder, corpus)


def test_documents_that_cannot_be_opened_are_one_line(corpus, encoder, tmp_path):
    """As on a full disk, where SQLite cannot make its file."""
    plan = Plan(Granularity(6, 32))
    Index.build(Target(tmp_path / "index", "faiss"), plan, encoder, corpus).close()
    (tmp_path / "index" / "documents.sqlite").write_text("no database" * 99)
    with pytest.raises(OSError, match="documents.sqlite: file is not a database"):
        Index.open(tmp_path / "index")
