"""An index from documents to hits, in every engine: interrupted, changed, and refused."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from m3bert.encode.coding import PackedIndex
from m3bert.evaluation import GridEncoder
from m3bert.evaluation.search import exact_search, rerank
from m3bert.index import Corpus, Index, Plan, index as module, read_manifest, rows as rows_module
from m3bert.index.engine import find_engine
from m3bert.index.plan import encoder_identity
from m3bert.trainers import Granularity, Grid
from tests.conftest import refused
from tests.index.test_engines import INSTALLED


QUERIES = ["read the file", "join two paths", "a number"]


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("4,6x32"), prompts={"query": "find "})


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(rows_module, "CHUNK", 8)
    monkeypatch.setattr(rows_module, "SAMPLE", 1)


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


def kill_at(patch, step: int) -> None:
    """Stop after one of the writes of a change, which are calls of the vector store and replaced files."""
    writes = 0

    def stopping(function):
        def write(*args, **options):
            nonlocal writes
            actual = function(*args, **options)
            writes += 1
            if writes == step:
                raise Killed
            return actual

        return write

    owners = dict.fromkeys(map(find_engine, INSTALLED), ("add", "delete", "truncate", "destroy"))
    for owner, names in {**owners, GridEncoder: ("encode",), os: ("replace",)}.items():
        for name in names:
            patch.setattr(owner, name, stopping(getattr(owner, name)))


@pytest.mark.parametrize("engine", INSTALLED)
def test_an_interrupted_build_is_no_index_and_starts_again(tmp_path, encoder, corpus, sentences, engine, monkeypatch):
    plan, target = Plan(Granularity(6, 32), first_dim=8, shortlist=20), (tmp_path / "index", engine)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 4)
        Index.build(*target, plan, encoder, corpus)
    with Index.open(target[0], encoder) as half:
        for call in (half.search, half.delete):
            refused("is not finished: run the command that was interrupted again", call, ["d1"])
    with Index.build(*target, plan, encoder, corpus) as index:
        assert len(index) == len(sentences)
        assert ids(index) == nearest(encoder, sentences, plan)


PLAN = Plan(Granularity(6, 32))
CHANGES = {
    "add": lambda folder, engine, encoder, more: open_and_change(folder, encoder, add=more),
    "delete": lambda folder, engine, encoder, more: open_and_change(folder, encoder, ["d1", "d4"]),
    "replace": lambda folder, engine, encoder, more: open_and_change(folder, encoder, ["d1", "d2"], more),
    "overwrite": lambda folder, engine, encoder, more: Index.build(
        folder, engine, PLAN, encoder, more, overwrite=True
    ).close(),
}


def open_and_change(folder: Path, encoder: GridEncoder, delete=(), add: Corpus | None = None) -> None:
    with Index.open(folder, encoder) as index:
        index.change(delete, add)


def state(folder: Path, encoder: GridEncoder) -> tuple[int, list[list[tuple[str, str]]]]:
    with Index.open(folder, encoder) as index:
        actual = index.search(QUERIES, 40, {"year": [1990, 1991, 1992]})
        assert [[hit.id for hit in hits] for hits in actual] == ids(index, 40), "filters find the same documents"
        return len(index), [[(hit.id, hit.text) for hit in hits] for hits in actual]


@pytest.fixture
def built(tmp_path, encoder, sentences):
    """A function that copies an index of ten documents."""

    def copy(engine: str, folder: str = "index") -> Path:
        source = tmp_path / f"{engine}-source"
        if not source.is_dir():
            first = Corpus([write(tmp_path / "first.jsonl", sentences[:10])])
            Index.build(source, engine, PLAN, encoder, first).close()
        return shutil.copytree(source, tmp_path / folder)

    return copy


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("engine", INSTALLED)
def test_a_killed_change_takes_place_whole_or_not_at_all(
    tmp_path, encoder, sentences, built, engine, change, monkeypatch
):
    """It is killed at every write. Documents d1 and d2 come again with other texts."""
    rows = ([1, 2] if change in ("replace", "overwrite") else []) + list(range(10, 20))
    lines = [{"id": f"d{row}", "text": sentences[row + 20], "year": 1990, "tags": []} for row in rows]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = Corpus([str(tmp_path / "more.jsonl")])
    later = Corpus([write(tmp_path / "later.jsonl", sentences[:1], 99)])
    CHANGES[change](done := built(engine, "done"), engine, encoder, more)
    before, after = state(built(engine, "before"), encoder), state(done, encoder)
    assert before != after
    actual, ended = [], False
    while not ended:
        folder = built(engine, f"killed-{len(actual)}")
        with monkeypatch.context() as patch:
            kill_at(patch, len(actual) + 1)
            try:
                CHANGES[change](folder, engine, encoder, more)
                ended = True
            except Killed:
                pass
        now = state(folder, encoder)
        assert now in (before, after)
        actual.append(now == after)
        open_and_change(folder, encoder, add=later)
        assert (
            read_manifest(folder)["finished"] and state(folder, encoder)[0] == (after if actual[-1] else before)[0] + 1
        )
        names = {path.name for path in (folder / read_manifest(folder)["data"]).iterdir()} - {"index.json"}
        assert names == {path.name for path in (done / read_manifest(done)["data"]).iterdir()} - {"index.json"}
    assert actual == sorted(actual) and len(actual) > 3


BAD_ROWS = {
    "the id 'd3' is that of an earlier document": {"id": "d3"},
    "the id 'n0' is that of an earlier document": {"id": "n0"},
    "the document has no text": {"text": " "},
    "the document has no id": {"id": None},
    "column 'year' of the index is integer: 'new' is not a number": {"year": "new"},
}


@pytest.mark.parametrize("engine", INSTALLED)
def test_a_refused_change_changes_nothing(tmp_path, encoder, sentences, built, engine):
    folder = built(engine)
    before, manifest = state(folder, encoder), (folder / "index.json").read_bytes()
    for reason, bad in BAD_ROWS.items():
        good = [{"id": f"n{row}", "text": text, "year": 1990, "tags": []} for row, text in enumerate(sentences[:9])]
        file = tmp_path / "bad.jsonl"
        # A file of one type per column, as readers of tables need it.
        file.write_text("".join(json.dumps({**row, **bad} if row is good[-1] else row) + "\n" for row in good))
        for delete in ([], ["d5"]):
            refused(reason, open_and_change, folder, encoder, delete, Corpus([str(file)]))
    refused("has no document 'd99'", open_and_change, folder, encoder, ["d1", "d99"])
    assert (folder / "index.json").read_bytes() == manifest and state(folder, encoder) == before


@pytest.mark.parametrize("engine", INSTALLED)
def test_documents_are_added_and_deleted(tmp_path, encoder, sentences, engine):
    plan = Plan(Granularity(6, 32))
    first = Corpus([write(tmp_path / "first.jsonl", sentences[:20])])
    Index.build(tmp_path / "index", engine, plan, encoder, first).close()
    with Index.open(tmp_path / "index") as index:  # deleting needs no encoder
        index.delete(["d3", "d5"])
        assert len(index) == 18
    with Index.open(tmp_path / "index", encoder) as index:
        added = index.add(Corpus([write(tmp_path / "more.jsonl", sentences[20:], 20)]))
        assert added == len(sentences) - 20
        remaining = [row for row in range(len(sentences)) if row not in (3, 5)]
        best = exact_search(
            encoder.encode(QUERIES, role="query").widest(6),
            encoder.encode([sentences[row] for row in remaining], role="document").widest(6),
            10,
        )
        assert ids(index) == [[f"d{remaining[row]}" for row in line] for line in best.tolist()]
        again = Corpus([write(tmp_path / "again.jsonl", [sentences[3]], 3)])
        assert index.add(again) == 1  # a deleted id may come back
        assert len(index) == len(sentences) - 1


@pytest.mark.parametrize("engine", INSTALLED)
def test_filters(tmp_path, encoder, corpus, engine):
    with Index.build(tmp_path / "index", engine, Plan(Granularity(6, 32)), encoder, corpus) as index:
        actual = ids(index, 5, where={"year": 1991})
        everything = ids(index, 1000)
        assert actual == [[id_ for id_ in row if int(id_[1:]) % 3 == 1][:5] for row in everything]
        assert ids(index, 5, where={"year": []}) == [[]] * 3
        for where, reason in (
            ({"tags": "x"}, r"Cannot filter by tags='x'; columns: {'year': 'integer', 'tags': 'json'}"),
            ({"year": ["1991"]}, "Cannot filter by year="),
            ({"unknown": []}, "Cannot filter by unknown="),
        ):
            refused(reason, index.search, QUERIES, where=where)
        refused("k=0 must be at least 1", index.search, QUERIES, 0)


@pytest.fixture
def engine() -> str:
    if not INSTALLED:
        pytest.skip("no engine is installed")
    return INSTALLED[0]


def test_a_build_is_run_again(tmp_path, encoder, corpus, sentences, engine, monkeypatch):
    """The same documents are not embedded again; others, or another plan, are refused without `overwrite`."""
    folder, plan = tmp_path / "index", Plan(Granularity(6, 32))
    Index.build(folder, engine, plan, encoder, corpus).close()
    with monkeypatch.context() as patch:
        patch.setattr(module, "embedded", None)
        Index.build(folder, engine, plan, encoder, corpus).close()
    other = INSTALLED[-1]
    fewer, edited = Corpus([write(tmp_path / "fewer.jsonl", sentences[:20])]), sentences[:-1] + ["the last text"]
    for store, part, rows, reason in (
        (engine, replace(plan, query_layer=4), corpus, "an index with another plan: "),
        (other, plan, corpus, "an index with another engine: "),
        (engine, plan, fewer, "an index of other documents: add to it, or overwrite it"),
        (engine, plan, Corpus([write(tmp_path / "edited.jsonl", edited)]), "an index of other documents: "),
    ):
        refused(f"index holds {reason}", Index.build, folder, store, part, encoder, rows)
    with Index.open(folder, encoder) as old:
        with Index.build(folder, other, PLANS[2], encoder, fewer, overwrite=True) as index:
            assert ids(index) == nearest(encoder, sentences[:20], PLANS[2])
        refused("was replaced: open it again", old.search, QUERIES)
    more = Corpus([write(tmp_path / "more.jsonl", sentences[20:], 20)])
    open_and_change(folder, encoder, add=more)
    Index.build(folder, other, PLANS[2], encoder, corpus).close()  # which are these documents
    open_and_change(folder, encoder, ["d3"])
    refused("other documents", Index.build, folder, other, PLANS[2], encoder, corpus)


def test_another_model_is_refused(tmp_path, encoder, corpus, engine, tiny_model):
    target, plan = (tmp_path / "index", engine), Plan(Granularity(6, 32))
    Index.build(*target, plan, encoder, corpus).close()
    plan_of_it = replace(plan, encoder=encoder_identity(encoder))
    with torch.no_grad():
        tiny_model.layers[3].mlp.down_proj.weight[0, 0] += 0.01
    refused("The index .* is of another encoder: weights ", Index.open, target[0], encoder)
    refused("The plan is of another encoder", Index.build, tmp_path / "other", engine, plan_of_it, encoder, corpus)
    assert not (tmp_path / "other").exists()


def test_folders_of_others_are_left_alone(tmp_path, encoder, corpus, engine):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    with pytest.raises(ValueError, match=r"photos is not empty and holds no index \(cat.jpg\)"):
        Index.build(tmp_path / "photos", engine, Plan(Granularity(6, 32)), encoder, corpus)
    assert os.listdir(tmp_path / "photos") == ["cat.jpg"]
    refused("holds no index: it has no index.json", Index.open, tmp_path / "photos")


def test_a_single_text_is_no_list_of_texts_and_a_search_needs_an_encoder(tmp_path, encoder, corpus, sentences):
    refused("texts must be a list of texts", encoder.encode, "a text")
    with Index.build(tmp_path / "index", INSTALLED[0], Plan(Granularity(6, 32)), encoder, corpus) as index:
        refused("queries must be a list of texts", index.search, "a question")
    more = Corpus([write(tmp_path / "more.jsonl", sentences, 1000)])
    with Index.open(tmp_path / "index") as index:
        refused("was opened without an encoder", index.search, ["a question"])
        refused("was opened without an encoder", index.add, more)
