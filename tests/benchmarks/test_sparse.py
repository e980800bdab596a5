"""The study of look-up queries: its searches, and a run on a small collection."""

import json

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, set_seed

from benchmarks.reproduction import sparse, study
from benchmarks.reproduction.tables import indexes
from benchmarks.static_query import elastic
from m3bert.evaluation import GridEncoder
from m3bert.evaluation.hybrid import bm25_search
from m3bert.trainers import Grid
from tests.conftest import save
from tests.evaluation_data import write_data


library = pytest.importorskip("sentence_transformers", reason="needs the extra sentence-transformers")
pytest.importorskip("bm25s", reason="needs the extra evaluation")


@pytest.fixture
def splade(tmp_path, tiny_tokenizer) -> str:
    """A tiny masked language model of random weights."""
    set_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(vocab_size=99, pad_token_id=1, initializer_range=0.5, **sizes))
    return str(save(tmp_path / "splade", model, tiny_tokenizer))


def test_sparse_queries_are_those_of_the_library(splade, sentences):
    """By the model, and as tokens of weight 1: the products with all dims of `SparseEncoder`'s vectors."""
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding

    model, texts, query = library.SparseEncoder(splade, device="cpu"), sentences[:9], sentences[9]
    systems, documents = sparse.splade(model, texts), model.encode_document(texts).to_dense()
    static = library.SparseEncoder(modules=[SparseStaticEmbedding(model.tokenizer, torch.ones(99))], device="cpu")
    for name, encoder in (("SPLADE, by the model", model), ("SPLADE, tokens of weight 1", static)):
        ([scores], size) = systems[name]
        expected = documents @ encoder.encode_query([query]).to_dense()[0]
        np.testing.assert_allclose(scores(query), expected.numpy(), rtol=1e-4)
        assert size == 8 * int((documents > 0).sum()) / len(texts)


def test_words_and_the_table_find_what_the_package_finds(tiny_model, tiny_tokenizer, sentences):
    texts, queries = sentences[:40], sentences[40:48]
    encoder = GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("2,6x32"))
    systems = sparse.look_ups(encoder, texts)
    by_words = bm25_search(queries, texts, 10)
    for query, scores in zip(queries, by_words.scores, strict=True):
        np.testing.assert_allclose(np.sort(systems["BM25"][0][0](query))[::-1][:10], scores, rtol=1e-5)
    first, last = encoder.grid
    asked, documents = (
        encoder.encode(queries).at(first, normalize=True),
        encoder.encode(texts).at(last, normalize=True),
    )
    nearest = torch.mm(asked, documents.T).topk(10).indices.numpy()
    assert (sparse.search(systems["table"][0], queries) == nearest).all()
    assert systems["table"][1] == 4 * 32


def test_the_study_runs_and_is_a_table(splade, minilm, sentences, tmp_path, monkeypatch):
    def fitted(source, folder, texts, options):
        assert texts == {"news": sentences[:8:4]} and options.layers == [0]
        folder.parent.mkdir()
        elastic(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("M3BERT_DATA", str(write_data(tmp_path / "data", sentences)))
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    replaced = {"ROUNDS": 1, "fit": fitted, "sources": lambda data: {"news": sentences[:8]}}
    for name, value in replaced.items():
        monkeypatch.setattr(sparse, name, value)
    sparse.main(["--model", splade])
    content = json.loads((tmp_path / "sparse.json").read_text())
    alone = {"BM25", "table", "SPLADE, tokens of weight 1", "SPLADE, tokens by idf", "SPLADE, by the model"}
    assert {*content["scores"]} == alone | {f"{name} + BM25" for name in alone - {"BM25"}}
    values = {name: its["cranfield"]["search"] for name, its in content["scores"].items()}
    assert all(0 <= its["ndcg@10"] <= 1 and its["cpu_ms"] > 0 for its in values.values())
    assert values["table + BM25"]["bytes"] == pytest.approx(4 * 384 + values["BM25"]["bytes"], abs=1e-4)
    monkeypatch.setattr(indexes, "results", lambda name: content)
    assert "| queries | cranfield | mean | CPU ms per query | bytes per document |" in indexes.sparse()
