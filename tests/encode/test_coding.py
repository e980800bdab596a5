"""Embeddings in a code: packed bytes, an index of them, and the float vectors that compare as they do."""

import numpy as np
import pytest
import torch

from m3bert.encode.coding import Coder, PackedIndex, require_quantizer, vectors_in_precision
from m3bert.encode.precisions import PRECISIONS, bytes_per_vector
from m3bert.evaluation.search import exact_search
from m3bert.modeling.quantization_m3bert import M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers import Granularity, Grid
from tests.conftest import assert_close, refused


pytest.importorskip("sentence_transformers", reason="vectors in 8 bits or 1 need sentence-transformers")
faiss = pytest.importorskip("faiss")
DIMS = (5, 8, 13, 32, 64)  # faiss has code of its own for multiples of 8, 16, 32 and 64
PLAIN = [name for name, code in PRECISIONS.items() if not code.learned]
LEARNED = [name for name, code in PRECISIONS.items() if code.learned]


def unit_vectors(rows: int, dim: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(rows, dim), dim=1)


def quantizer_of(width: int, layers: tuple[int, ...] = ()) -> M3BertQuantizer:
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=width, layers=list(layers)))
    quantizer.initialize(unit_vectors(300, width))
    return quantizer


def naive_scores(query: np.ndarray, documents: np.ndarray, code: str) -> np.ndarray:
    """The score of every document, number by number."""
    if code == "binary":
        return ((query > 0) == (documents > 0)).mean(axis=1) * 2 - 1
    if code == "float16":
        documents = documents.astype(np.float16).astype(np.float32)
    if code in ("int8", "int4"):
        low, width = documents.min(axis=0), np.ptp(documents, axis=0)
        if code == "int8":
            step = width / 255
            level = np.floor((documents - low) / step).clip(0, 255)
        else:
            step = width / 15
            level = np.floor((documents - low) / width * 15)
        documents = low + (level + 0.5) * step
    return documents @ query


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("code", PLAIN)
def test_a_search_equals_comparing_with_every_document(code, dim):
    documents, queries = unit_vectors(200, dim), unit_vectors(3, dim)
    scores, rows = PackedIndex.pack(documents, code).search(queries, 10)
    for query, actual, order in zip(queries.numpy(), scores, rows, strict=True):
        expected = naive_scores(query, documents.numpy(), code)
        assert len(set(order)) == 10
        assert_close(actual, expected[order])
        assert_close(actual, np.sort(expected)[::-1][:10])


@pytest.mark.parametrize("dim", [5, 16, 32])
@pytest.mark.parametrize("code", LEARNED)
def test_a_learned_code_is_searched_by_hamming_distance(code, dim):
    quantizer, documents, queries = quantizer_of(32), unit_vectors(200, 32), unit_vectors(3, 32)
    scores, rows = PackedIndex.pack(documents, code, dim, quantizer).search(queries, 200)
    codes, others = (quantizer.encode(vectors, code, dim) for vectors in (queries, documents))
    expected = 2 * quantizer.hamming(codes, others).numpy() - 1
    assert_close(scores, np.take_along_axis(expected, rows, axis=1))
    assert_close(scores, np.sort(expected, axis=1)[:, ::-1])


@pytest.mark.parametrize("dim", [5, 32])
@pytest.mark.parametrize("code", PRECISIONS)
def test_float_vectors_rank_as_the_index_of_stored_bytes(code, dim):
    """Every rank has the score of the index at this rank; only documents of equal scores may be swapped."""
    quantizer, documents, queries = quantizer_of(32), 3 * torch.randn(200, 32) + 1, torch.randn(7, 32)
    vectors = {"documents": documents, "queries": queries}
    compared = vectors_in_precision(vectors, ["documents"], Granularity(1, dim, code), quantizer)
    ranked = exact_search(compared["queries"], compared["documents"], 200)
    scores, rows = PackedIndex.pack(documents, code, dim, quantizer).search(queries, 200)
    by_row = np.empty_like(scores)
    np.put_along_axis(by_row, rows, scores, axis=1)
    np.testing.assert_allclose(np.take_along_axis(by_row, ranked, axis=1), scores, atol=2e-6)
    assert len(np.unique(scores[0].round(4))) > 3, "not all scores are equal"


@pytest.mark.parametrize("code", PRECISIONS)
def test_a_single_document_and_equal_ones_are_found(code):
    """And an index has as many bytes as the precision says."""
    document, quantizer = unit_vectors(1, 32), quantizer_of(32)
    index = PackedIndex.pack(document, code, None, quantizer)
    scores, rows = index.search(torch.cat([document, unit_vectors(2, 32)]), 5)
    assert rows.tolist() == [[0]] * 3 and scores[0] == pytest.approx(1, abs=0.01)
    compared = vectors_in_precision({"documents": document}, ["documents"], Granularity(1, 32, code), quantizer)
    assert len(compared["documents"]) == 1 and compared["documents"].isfinite().all()
    for dim in (5, 13, 32):
        index = PackedIndex.pack(document.expand(20, 32), code, dim, quantizer)
        scores, rows = index.search(unit_vectors(2, 32), 20)
        assert (np.sort(rows, axis=1) == np.arange(20)).all() and np.ptp(scores, axis=1).max() < 1e-6
        ranges = 2 * dim * 4 if code in ("int8", "int4") else 0
        assert index.nbytes == 20 * bytes_per_vector(code, dim) + ranges


@pytest.mark.parametrize("code", ["int8", "int4"])
def test_a_dim_in_which_all_documents_agree_keeps_its_number(code):
    documents = torch.tensor([[0.6, 0.8, 0.0], [0.6, -0.8, 0.0], [0.6, 0.0, 0.8]])
    coder = Coder.fit(documents, code)
    assert coder.decode(coder.pack(documents))[:, 0].tolist() == pytest.approx([0.6] * 3, abs=1e-6)


def test_pairs_are_both_stored_in_one_range():
    sides = {"sentence1": unit_vectors(30, 8), "sentence2": unit_vectors(30, 8)}
    coded = vectors_in_precision(sides, list(sides), Granularity(1, 8, "int8"))
    both = torch.cat(list(sides.values()))
    coder = Coder.fit(both, "int8")
    assert torch.equal(torch.cat(list(coded.values())), coder.decode(coder.pack(both)))
    assert torch.allclose(torch.cat(list(coded.values())), both, atol=0.01)


@pytest.mark.parametrize("code", ["binary", "int8", "qama-2", "qama-0.5"])
def test_a_float_query_is_compared_with_decoded_documents(code):
    quantizer, documents, queries = quantizer_of(32), torch.randn(50, 32), torch.randn(7, 32)
    vectors = {"documents": documents, "queries": queries}
    compared = vectors_in_precision(vectors, ["documents"], Granularity(1, 16, code), quantizer, float_queries=True)
    cosines = torch.nn.functional.cosine_similarity(compared["queries"].unsqueeze(1), compared["documents"], dim=2)
    if code == "int8":
        _, rows = PackedIndex.pack(documents, code, 16).search(queries, 50)
        assert (cosines.argsort(dim=1, descending=True).numpy() == rows).all()
    elif code == "binary":
        signs = torch.where(documents[:, :16] > 0, 0.25, -0.25)
        assert torch.allclose(cosines, torch.nn.functional.normalize(queries[:, :16], dim=1) @ signs.T, atol=1e-5)
    else:
        assert torch.allclose(cosines, quantizer.scores(queries, quantizer.encode(documents, code, 16)), atol=1e-5)


def test_what_cannot_be_packed_is_named():
    vectors = unit_vectors(2, 8)
    refused("'int2' is not a precision; legal values: float32", PackedIndex.pack, vectors, "int2")
    refused(r"dim=9 must be within 1\.\.8", PackedIndex.pack, vectors, "int8", 9)
    refused("The precision qama-2 needs a quantizer, and there is none", PackedIndex.pack, vectors, "qama-2")


def test_a_grid_needs_a_quantizer_for_its_embeddings():
    quantizer, grid = quantizer_of(16, (4,)), Grid.parse("2x8@int8,4x8,4x8@qama-1,4x16@qama-2")
    require_quantizer(quantizer, grid, 16)
    require_quantizer(None, Grid.parse("2x8@binary"), 16)
    with pytest.raises(
        ValueError, match="4x8@qama-1, 4x16@qama-2: these precisions need a quantizer, and the encoder has"
    ):
        require_quantizer(None, grid, 16)
    refused("the quantizer reads 16 dims, and the embeddings have 32", require_quantizer, quantizer, grid, 32)
    with pytest.raises(ValueError, match="2x8@qama-1: the quantizer is for embeddings of layer 4"):
        require_quantizer(quantizer, Grid.parse("2,4x8@qama-1"), 16)
