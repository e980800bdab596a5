"""Hybrid search against naive references."""

from __future__ import annotations

from math import log
from statistics import mean, pstdev

import numpy as np
import pytest

from m3bert.encode.hybrid import Ranking
from m3bert.evaluation import HybridSearch, bm25_search, evaluate_grid, find_tasks, fuse_ranks, fuse_scores
from tests.conftest import assert_close


DOCUMENTS = ["zebra lion zebra", "lion tiger", "tiger tiger tiger bear", "wolf", "bear lion wolf elephant giraffe"]


def naive_bm25(query: str, k1: float = 1.2, b: float = 0.75) -> list[float]:
    """BM25 of Robertson, as SQLite computes it: no word counts less than 1e-6, and repeated words count again."""
    words = [text.split() for text in DOCUMENTS]
    average, scores = mean(map(len, words)), []
    for its in words:
        score = 0.0
        for word in query.split():
            found = sum(word in other for other in words)
            weight = max(1e-6, log((len(words) - found + 0.5) / (found + 0.5)))
            count = its.count(word)
            score += weight * count * (k1 + 1) / (count + k1 * (1 - b + b * len(its) / average))
        scores.append(score)
    return scores


@pytest.mark.parametrize("query", ["zebra", "bear elephant bear", "tiger wolf", "unknown", "the", 'a "wolf*" OR ('])
def test_bm25_equals_the_formula(query):
    found = bm25_search([query], DOCUMENTS)
    expected = naive_bm25(query.replace('a "wolf*" OR (', "wolf"))
    assert sorted(found.rows[0]) == list(range(len(DOCUMENTS)))
    assert_close(found.scores[0], [expected[row] for row in found.rows[0]])
    assert list(found.scores[0]) == sorted(found.scores[0], reverse=True)
    assert bm25_search([query], DOCUMENTS, 2).rows.tolist() == found.rows[:, :2].tolist()


def test_words_are_stemmed_and_without_accents():
    found = bm25_search(["the runner runs in an annee"], ["other", "runs", "Une ann\u00e9e of Running"])
    assert set(found.rows[0, :2]) == {1, 2} and found.scores[0, 1] > 0 == found.scores[0, 2]


def lists(seed: int, queries: int = 3, documents: int = 20, k: int = 7) -> Ranking:
    draw = np.random.default_rng(seed)
    rows = np.stack([draw.permutation(documents)[:k] for _ in range(queries)])
    return Ranking(-np.sort(-draw.normal(size=(queries, k)), axis=1), rows)


def naive_fusion(first: Ranking, second: Ranking, query: int, k: int, weight: float | None) -> list[int]:
    sides = [
        dict(zip(side.rows[query].tolist(), side.scores[query].tolist(), strict=True)) for side in (first, second)
    ]
    union = sorted({*sides[0], *sides[1]})
    if weight is None:
        ranks = [side.rows[query].tolist() for side in (first, second)]
        value = {
            row: sum(1 / (61 + (its.index(row) if row in its else len(its) - 1)) for its in ranks) for row in union
        }
    else:
        value = dict.fromkeys(union, 0.0)
        for side, factor in zip(sides, (1.0, weight), strict=True):
            scores = [side.get(row, min(side.values())) for row in union]
            for row, score in zip(union, scores, strict=True):
                value[row] += factor * (score - mean(scores)) / pstdev(scores)
    return sorted(union, key=lambda row: -value[row])[:k]


@pytest.mark.parametrize("weight", [None, 0.5, 2.0])
def test_fusions_equal_a_loop_over_documents(weight):
    first, second = lists(0), lists(1)
    fused = fuse_ranks(first, second, 5) if weight is None else fuse_scores(first, second, 5, weight)
    assert fused.tolist() == [naive_fusion(first, second, query, 5, weight) for query in range(3)]


def test_equal_scores_do_not_count():
    first, second = lists(0), Ranking(np.ones((3, 7)), lists(1).rows)
    fused = fuse_scores(first, second, 3)
    np.testing.assert_array_equal(fused[:, 0], first.rows[:, 0])


def test_an_evaluation_measures_bm25_alone_and_beside_every_shared_layer(encoder_with_exits, data):
    tasks = find_tasks(["cranfield", "stsb"])
    results = evaluate_grid(encoder_with_exits, tasks, data, hybrid=True)
    rows = {
        (search.query_layer, search.document_layer, search.dim, search.fusion) for search in results.hybrid_searches
    }
    measured = {(layer, 6, dim, fusion) for layer in (0, 2, 6) for dim in (8, 32) for fusion in ("scores", "ranks")}
    assert rows == measured | {(None, None, None, None)}
    assert all(isinstance(search, HybridSearch) and 0 <= search.value <= 1 for search in results.hybrid_searches)
    assert not evaluate_grid(encoder_with_exits, tasks, data).hybrid_searches
