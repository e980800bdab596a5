"""Exact search, search in two stages, and metrics of ranked lists, against what they mean and other libraries."""

import math

import numpy as np
import pytest
import torch

from m3bert.evaluation import exact_search, ranking_scores, rerank, search
from m3bert.evaluation.search import products_share


def naive_ranking(ranked, relevant, cutoffs):
    totals = {f"recall@{k}": 0.0 for k in cutoffs} | {"mrr@10": 0.0, "ndcg@10": 0.0, "ndcg_exp@10": 0.0}
    for rows, grades in zip(ranked, relevant, strict=True):
        for k in cutoffs:
            totals[f"recall@{k}"] += len(set(rows[:k]) & set(grades)) / len(grades)
        hits = [rank for rank, row in enumerate(rows[:10], 1) if row in grades]
        totals["mrr@10"] += 1 / hits[0] if hits else 0.0
        for name, gain_of in (("ndcg@10", lambda grade: grade), ("ndcg_exp@10", lambda grade: 2**grade - 1)):
            actual = [gain_of(grades.get(row, 0)) for row in rows[:10]]
            ideal = sorted(map(gain_of, grades.values()), reverse=True)[:10]
            gain, best = (sum(g / math.log2(rank + 1) for rank, g in enumerate(gs, 1)) for gs in (actual, ideal))
            totals[name] += gain / best
    return {name: total / len(ranked) for name, total in totals.items()}


@pytest.mark.parametrize(("length", "cutoffs"), [(30, (1, 10)), (12, (1, 5)), (4, (1, 4)), (1, (1,))])
def test_ranking_scores_are_what_they_mean(length, cutoffs):
    generator = np.random.default_rng(0)
    ranked = np.stack([generator.permutation(30)[:length] for _ in range(25)])
    relevant = [
        {int(row): float(generator.integers(1, 4)) for row in generator.permutation(30)[: generator.integers(1, 20)]}
        for _ in range(25)
    ]
    expected = naive_ranking(ranked.tolist(), relevant, cutoffs)
    assert ranking_scores(ranked, relevant, cutoffs) == pytest.approx(expected, abs=1e-12)


def test_a_perfect_list_scores_one_and_an_empty_query_is_refused():
    scores = ranking_scores(np.array([[3, 1, 0]]), [{3: 2.0, 1: 1.0}])
    assert scores == {"recall@1": 0.5, "mrr@10": 1.0, "ndcg@10": 1.0, "ndcg_exp@10": 1.0}
    with pytest.raises(ValueError, match="leave them out"):
        ranking_scores(np.array([[0]]), [{}])


def test_half_precision_and_zeros_can_be_searched():
    documents = torch.cat([torch.zeros(1, 8), torch.eye(8)]).half()
    cosines, rows = search.nearest(torch.eye(8)[2:3], documents, 2)
    assert rows[0].tolist() == [3, 0] and cosines[0].tolist() == [1.0, 0.0]


def tied_vectors(count: int, dim: int = 4) -> torch.Tensor:
    """Vectors of 1 and -1, whose cosines are exact and mostly equal to others."""
    return torch.randint(0, 2, (count, dim)).float() * 2 - 1


@pytest.mark.parametrize("k", [1, 10, 57, 300])
@pytest.mark.parametrize("rows_at_once", [7, 64, 1000])
def test_a_search_in_blocks_is_one_search(monkeypatch, rows_at_once, k):
    """Of documents with the same cosine, those of the lowest rows are found, however large the blocks are."""
    queries, documents = tied_vectors(9), tied_vectors(300)
    cosines = torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(documents).T
    expected = cosines.sort(dim=1, descending=True, stable=True)
    monkeypatch.setattr(search, "ROWS_AT_ONCE", rows_at_once)
    monkeypatch.setattr(search, "QUERIES_AT_ONCE", 4)
    assert (exact_search(queries, documents, k) == expected.indices[:, :k].numpy()).all()
    actual, rows = search.nearest(queries, documents, k)
    assert (actual == expected.values[:, :k].numpy()).all() and (rows == expected.indices[:, :k].numpy()).all()
    queries, documents = torch.randn(6, 12), torch.randn(300, 12)
    cosines = torch.nn.functional.normalize(queries) @ torch.nn.functional.normalize(documents).T
    assert (exact_search(queries, documents, k) == cosines.argsort(dim=1, descending=True)[:, :k].numpy()).all()


def test_two_stages_rerank_what_the_first_found():
    queries, documents = torch.randn(5, 12), torch.randn(40, 12)
    shortlist = exact_search(queries[:, :3], documents[:, :3], 40)
    actual = rerank(queries[:, :8], documents[:, :8], shortlist, [5, 40])
    for row, query in enumerate(queries):
        first = torch.cosine_similarity(query[:3], documents[:, :3], dim=1).argsort(descending=True)[:5]
        order = torch.cosine_similarity(query[:8], documents[first, :8], dim=1).argsort(descending=True)
        assert actual[5][row].tolist() == first[order].tolist()
    # A shortlist of everything is the exact search.
    assert (actual[40] == exact_search(queries[:, :8], documents[:, :8], 40)).all()
    assert products_share(40, (3, 8), 5) == (40 * 3 + 5 * 8) / (40 * 8)
