"""Hybrid search against naive references."""

from math import log
from statistics import mean, pstdev

import numpy as np
import pytest
import torch

from m3bert import evaluation
from m3bert.evaluation.evaluators import Retrieval
from m3bert.evaluation.hybrid import Ranking
from tests.conftest import assert_close


DOCUMENTS = ["zebra lion zebra", "lion tiger", "tiger tiger tiger bear", "wolf", "bear lion wolf elephant giraffe"]


def naive_bm25(query: str, documents: list[str], k1: float = 1.2, b: float = 0.75) -> list[float]:
    """BM25 as Lucene computes it: every word counts, and repeated words of a query again."""
    words = [text.split() for text in documents]
    average, scores = mean(map(len, words)), []
    for part in words:
        score = 0.0
        for word in query.split():
            actual = sum(word in other for other in words)
            count = part.count(word)
            weight = log(1 + (len(words) - actual + 0.5) / (actual + 0.5))
            score += weight * count / (count + k1 * (1 - b + b * len(part) / average))
        scores.append(score)
    return scores


@pytest.mark.parametrize("query", ["zebra", "bear elephant bear", "tiger wolf", "unknown", "the", 'a "wolf*" OR ('])
@pytest.mark.parametrize("alphabet", ["words", "characters"])
def test_bm25_equals_the_formula_and_finds_nothing_else(query, alphabet):
    documents, expected = DOCUMENTS, naive_bm25(query.replace('a "wolf*" OR (', "wolf"), DOCUMENTS)
    if alphabet == "characters":  # one for each word, without spaces
        numbers = {word: chr(0x4E00 + at) for at, word in enumerate(" ".join([*DOCUMENTS, "unknown"]).split())}
        documents = ["".join(map(numbers.__getitem__, text.split())) for text in DOCUMENTS]
        query = "".join(numbers.get(word, "") for word in query.replace('a "wolf*" OR (', "wolf").split())
    actual = evaluation.bm25_search([query], documents)
    order = sorted((row for row, score in enumerate(expected) if score), key=lambda row: -expected[row])
    assert [row for row in actual.rows[0] if row >= 0] == order and (actual.rows[0, len(order) :] == -1).all()
    assert_close(actual.scores[0], [*(expected[row] for row in order), *[0.0] * (len(documents) - len(order))])
    assert evaluation.bm25_search([query], documents, 2).rows.tolist() == actual.rows[:, :2].tolist()


def test_words_are_stemmed_and_without_accents():
    actual = evaluation.bm25_search(["the runner runs in an annee"], ["other", "runs", "Une ann\u00e9e of Running"])
    assert actual.rows[0].tolist() in ([1, 2, -1], [2, 1, -1]) and actual.scores[0, 1] > 0 == actual.scores[0, 2]


def lists(seed: int, actual: int = 7, queries: int = 3, documents: int = 20, k: int = 7) -> Ranking:
    """The best of random scores, with ties; the ranking has room for more than are found."""
    draw = np.random.default_rng(seed)
    rows = np.stack([draw.permutation(documents)[:k] for _ in range(queries)])
    scores = -np.sort(-draw.integers(1, 9, size=(queries, k)).astype(float), axis=1)
    rows[:, actual:], scores[:, actual:] = -1, 0
    return Ranking(scores, rows)


def naive_fusion(first: Ranking, second: Ranking, query: int, k: int, weight: float | None) -> list[int]:
    union = sorted({*first.rows[query].tolist(), *second.rows[query].tolist()} - {-1})
    value = dict.fromkeys(union, 0.0)
    for side, factor in ((first, 1.0), (second, weight)):
        given = side.scores[query].tolist()
        by_row = dict(zip(side.rows[query].tolist(), given, strict=True))
        scores = [by_row.get(row, min(given)) for row in union]
        for row, score in zip(union, scores, strict=True):
            if factor is None or weight is None:  # places down to the last document with this score
                value[row] += 1 / (60 + sum(other >= score for other in given))
            else:
                value[row] += factor * (score - mean(scores)) / (pstdev(scores) or 1.0)
    return sorted(union, key=lambda row: -value[row])[:k]


@pytest.mark.parametrize("actual", [7, 2, 0])
@pytest.mark.parametrize("weight", [None, 0.5, 2.0])
def test_fusions_equal_a_loop_over_documents(weight, actual):
    first, second = lists(0), lists(1, actual)
    fused = (
        evaluation.fuse_ranks(first, second, 9) if weight is None else evaluation.fuse_scores(first, second, 9, weight)
    )
    expected = [naive_fusion(first, second, query, 9, weight) for query in range(3)]
    assert fused.tolist() == [rows + [-1] * (9 - len(rows)) for rows in expected]


def test_the_order_of_the_file_does_not_count():
    """Documents that BM25 does not find, or finds with one score, are fused alike."""
    draw = torch.Generator().manual_seed(0)
    documents, queries = torch.randn(60, 8, generator=draw), torch.randn(9, 8, generator=draw)
    texts, asked = [f"text w{row % 20}" for row in range(60)], [f"w{row}" for row in range(8)] + ["nothing"]
    best = {}
    for order in (torch.arange(60), torch.randperm(60, generator=draw)):
        task = Retrieval({"queries": asked, "documents": [texts[row] for row in order]}, [{0: 1.0}] * 9)
        vectors = {"queries": queries, "documents": documents[order]}
        for fusion in ("scores", "ranks"):
            actual = order[task.bm25_ranked(vectors, fusion)[:, :10]].tolist()
            assert best.setdefault(fusion, actual) == actual
            assert actual[-1] == order[evaluation.exact_search(queries[-1:], vectors["documents"], 10)[0]].tolist()


def test_a_query_that_is_a_document_is_left_out_of_its_own_searches():
    draw = torch.Generator().manual_seed(0)
    documents, texts = torch.randn(30, 8, generator=draw), [f"w{row} w{row % 7} w{row % 5}" for row in range(30)]
    vectors = {"queries": documents[:6] + torch.randn(6, 8, generator=draw) / 9, "documents": documents}
    sides = {"queries": texts[:6], "documents": texts}
    relevant, selves = [{row + 7: 1.0, row + 14: 2.0} for row in range(6)], [0, 1, 2, 3, -1, -1]
    task, plain = Retrieval(sides, relevant, self_rows=selves), Retrieval(sides, relevant)
    similar = torch.cosine_similarity(vectors["queries"][:, None], documents[None], dim=2)
    similar[range(4), range(4)] = -torch.inf
    expected = evaluation.ranking_scores(similar.argsort(dim=1, descending=True).numpy(), relevant)
    assert task.score(vectors) == pytest.approx(expected) != pytest.approx(plain.score(vectors))
    assert task.reachable == 29

    def ranked(retrieval: Retrieval) -> list[np.ndarray]:
        exact, bm25 = retrieval.nearest(vectors, 29).rows, retrieval.bm25_ranked
        return [exact, bm25(), *(bm25(vectors, name) for name in ("scores", "ranks"))]

    for with_self, without in zip(ranked(plain), ranked(task), strict=True):
        assert all(row in rows for row, rows in enumerate(with_self)) and 4 in without[4] and 5 in without[5]
        assert not any(row in rows for row, rows in enumerate(without[:4]))
    bm25 = [
        [row for row in rows if row not in (-1, selves[at])] for at, rows in enumerate(plain.bm25_ranked().tolist())
    ]
    assert [[row for row in rows if row >= 0] for rows in task.bm25_ranked().tolist()] == bm25


def test_an_evaluation_measures_bm25_alone_and_beside_every_shared_layer(encoder_with_exits, data):
    tasks = evaluation.find_tasks(["cranfield", "stsb"])
    results = evaluation.evaluate_grid(encoder_with_exits, tasks, data, hybrid=True)
    rows = {
        (search.query_layer, search.document_layer, search.dim, search.fusion) for search in results.hybrid_searches
    }
    measured = {(layer, 6, dim, fusion) for layer in (0, 2, 6) for dim in (8, 32) for fusion in ("scores", "ranks")}
    assert rows == measured | {(None, 0, 0, None)}
    assert all(0 <= search.value <= 1 for search in results.hybrid_searches)
    assert not evaluation.evaluate_grid(encoder_with_exits, tasks, data).hybrid_searches
