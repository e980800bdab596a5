"""The benchmark of quantised search: every search against a naive one, and the distribution of its documents."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from m3bert.modeling.quantization_m3bert import unpack_bits


pytest.importorskip("faiss")

from benchmarks import quantised_search as benchmark


ROOT = Path(__file__).parents[2]
TOP, SHORTLIST, DIM = 5, 20, 24


@pytest.fixture(scope="module")
def documents() -> torch.Tensor:
    torch.manual_seed(0)
    return normalize(torch.randn(300, DIM), dim=1)


@pytest.fixture(scope="module")
def queries() -> torch.Tensor:
    torch.manual_seed(1)
    return normalize(torch.randn(7, DIM), dim=1)


@pytest.fixture(scope="module")
def collection(documents) -> benchmark.Collection:
    collection = benchmark.Collection(documents)
    collection.add(documents[:200])
    collection.add(documents[200:])
    return collection


def top_rows(scores: torch.Tensor) -> np.ndarray:
    return scores.topk(TOP, dim=1).indices.numpy()


def test_float_searches_find_the_highest_dot_products(collection, queries, documents):
    expected = top_rows(queries @ documents.T)
    searches = collection.searches(TOP, SHORTLIST)
    for name in ("float32", "float32, torch"):
        assert (searches[name](queries) == expected).all(), name
    assert benchmark.recall(searches["int8"](queries), expected) > 0.9


def test_binary_searches_find_the_smallest_hamming_distances(collection, queries, documents):
    searches = collection.searches(TOP, SHORTLIST)
    codes, own = (collection.quantizer.encode(its, benchmark.CODE) for its in (queries, documents))
    bits, others = (unpack_bits(its.packed, its.bits) for its in (codes, own))
    of_bits, of_signs = (
        (one[:, None] != other).sum(dim=2) for one, other in ((bits, others), (queries > 0, documents > 0))
    )
    for name, distances in {"2-bit": of_bits, "sign": of_signs}.items():
        smallest = distances.sort(dim=1).values[:, :TOP].tolist()
        rows = torch.from_numpy(searches[name](queries))  # where distances are equal, either row may be found
        assert distances.gather(1, rows).tolist() == smallest, name


def test_a_shortlist_of_all_documents_is_sorted_by_the_float_query(collection, queries, documents):
    searches = collection.searches(TOP, len(documents))
    decoded = torch.from_numpy(collection.int8.reconstruct_n(0, len(documents)))
    assert (searches["2-bit, by int8"](queries) == top_rows(queries @ decoded.T)).all()


@pytest.mark.parametrize("noise", [0.0, 0.5, 2.0])
def test_drawn_embeddings_have_the_mean_and_covariance_of_the_sample(noise):
    torch.manual_seed(0)
    sample = torch.randn(50, 3) @ torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 0.2]]) + 1
    drawn = benchmark.Distribution(sample, noise).draw(200_000)
    torch.testing.assert_close(drawn.mean(dim=0), sample.mean(dim=0), atol=0.03, rtol=0)
    torch.testing.assert_close(drawn.T.cov(), sample.T.cov(correction=0), atol=0.06, rtol=0.02)
    repeats = len(drawn.round(decimals=3).unique(dim=0))
    assert repeats == len(sample) if noise == 0 else repeats > 10 * len(sample)


def test_the_prose_has_the_figures_of_the_results_file():
    found = json.loads((ROOT / "benchmarks" / "results" / "quantised_search.json").read_text(encoding="utf-8"))
    section = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8").partition("## Search in two bits")[2]
    assert found["quick"] is False
    assert f"`qama-2` is {found['batch_speedup_over_torch']:.1f} times faster" in section
    slower = [1 / found[f"{kind}_speedup_over_sign"] for kind in ("batch", "single_query")]
    assert f"{slower[0]:.1f} times as long in batches, and {slower[1]:.1f} times one query at a time" in section
