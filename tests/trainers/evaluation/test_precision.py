"""Vectors in fewer bits: what is found equals a naive search of what the bits stand for, and the bytes are counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainers import Granularity, Grid
from trainers.evaluation import GridEncoder
from trainers.evaluation.precision import PackedIndex, Setting, search_at


pytest.importorskip("sentence_transformers", reason="vectors in 8 bits or 1 need sentence-transformers")
DIMS = (5, 8, 13, 32, 64)  # faiss has code of its own for multiples of 8, 16, 32 and 64


def unit_vectors(rows: int, dim: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(rows, dim), dim=1)


def naive_scores(query: np.ndarray, documents: np.ndarray, bits: int) -> np.ndarray:
    """The score of every document, number by number."""
    if bits == 1:
        return ((query > 0) == (documents > 0)).mean(axis=1) * 2 - 1
    if bits == 8:
        low = documents.min(axis=0)
        step = (documents.max(axis=0) - low) / 255
        documents = low + (np.floor((documents - low) / step).clip(0, 255) + 0.5) * step
    return documents @ query


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", [32, 8, 1])
def test_a_search_equals_comparing_with_every_document(bits, dim):
    documents, queries = unit_vectors(200, dim), unit_vectors(3, dim)
    scores, rows = PackedIndex.pack(documents, bits).search(queries, 10)
    for query, found, order in zip(queries.numpy(), scores, rows, strict=True):
        expected = naive_scores(query, documents.numpy(), bits)
        assert len(set(order)) == 10
        np.testing.assert_allclose(found, expected[order], atol=1e-6)
        np.testing.assert_allclose(found, np.sort(expected)[::-1][:10], atol=1e-6)


def test_eight_bits_are_nearer_to_the_cosine_than_one():
    documents, queries = unit_vectors(200, 64), unit_vectors(20, 64)
    cosines = (queries @ documents.T).numpy()
    errors = {}
    for bits in (32, 8, 1):
        scores, rows = PackedIndex.pack(documents, bits).search(queries, 200)
        errors[bits] = np.abs(scores - np.take_along_axis(cosines, rows, axis=1)).max()
    assert errors[32] < 1e-6 < errors[8] < 0.01 < errors[1]


@pytest.mark.parametrize(("bits", "a_vector"), [(32, 52), (8, 13), (1, 2)])
def test_bytes_are_those_of_the_stored_numbers(bits, a_vector):
    index = PackedIndex.pack(unit_vectors(7, 13), bits)
    ranges = 2 * 13 * 4 if bits == 8 else 0
    assert index.bytes_per_vector == a_vector and index.nbytes == 7 * a_vector + ranges


@pytest.mark.parametrize("bits", [32, 8, 1])
def test_a_single_document_keeps_its_numbers(bits):
    documents = unit_vectors(1, 32)
    queries = torch.cat([documents, -documents, unit_vectors(1, 32)])
    scores, rows = PackedIndex.pack(documents, bits).search(queries, 5)
    expected = [naive_scores(query, documents.numpy(), 1 if bits == 1 else 32) for query in queries.numpy()]
    assert rows.tolist() == [[0]] * 3
    np.testing.assert_allclose(scores, expected, atol=0.01)


def test_a_dim_in_which_all_documents_agree_keeps_its_number():
    documents = unit_vectors(20, 16)
    documents[:, 3] = 0.5
    query = torch.zeros(1, 16)
    query[0, 3] = 1
    scores, _ = PackedIndex.pack(documents, 8).search(query, 20)
    np.testing.assert_allclose(scores, 0.5, atol=0.01)


def test_what_cannot_be_packed_is_named():
    with pytest.raises(ValueError, match="bits=4 is not available; legal values: 32, 8, 1"):
        PackedIndex.pack(unit_vectors(2, 8), 4)
    with pytest.raises(ValueError, match="There is no document to search"):
        PackedIndex.pack(torch.empty(0, 8), 8)


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("2,4,6x8,16,32"), prompts={"query": "find "})


SETTINGS = [Setting(Granularity(2, 8), 1), Setting(Granularity(4, 16), 8), Setting(Granularity(6, 32), 32)]


def test_each_setting_finds_what_its_own_granularity_and_bits_find(encoder, sentences):
    documents = encoder.encode(sentences, role="document")
    results = search_at(encoder, documents, "read the file", SETTINGS, k=4, rounds=1)
    assert [result.setting for result in results] == SETTINGS
    query = encoder.encode(["read the file"], role="query")
    for result, (g, bits) in zip(results, ((s.granularity, s.bits) for s in SETTINGS), strict=True):
        index = PackedIndex.pack(documents.at(g, normalize=True), bits)
        scores, rows = index.search(query.at(g, normalize=True), 4)
        assert result.rows == rows[0].tolist()
        assert result.scores == pytest.approx(scores[0].tolist(), abs=1e-5)
        assert (result.bytes_per_vector, result.index_bytes) == (index.bytes_per_vector, index.nbytes)
        assert result.encode_ms > 0 and result.search_ms > 0


def test_the_query_runs_no_layer_beyond_the_chosen_one(encoder, sentences):
    documents = encoder.encode(sentences)
    ran: list[int] = []
    for number, layer in enumerate(encoder.model.layers, start=1):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    search_at(encoder, documents, "read the file", SETTINGS[:2], rounds=3)
    turns = 1 + 1 + 3  # for the search, uncounted, counted
    assert [ran.count(number) for number in range(1, 7)] == [2 * turns, 2 * turns, turns, turns, 0, 0]


def test_a_query_that_is_not_finite_is_refused(encoder, sentences):
    documents = encoder.encode(sentences)
    with torch.no_grad():
        encoder.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        search_at(encoder, documents, "read the file", SETTINGS, rounds=1)
