"""Metrics against what they mean, written out, and against other libraries' implementations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from trainers.evaluation import (
    alignment,
    bitext_accuracy,
    classification_scores,
    effective_rank,
    exact_search,
    feature_correlation,
    feature_covariance,
    fit_classifier,
    geometry_scores,
    pair_classification_scores,
    pair_cosines,
    prefix_residual_correlation,
    products_share,
    ranking_scores,
    rerank,
    similarity_spearman,
    uniformity,
)
from trainers.evaluation.modules import METRICS, load_metric


def naive_ranking(ranked, relevant, cutoffs):
    totals = {f"recall@{k}": 0.0 for k in cutoffs} | {"mrr@10": 0.0, "ndcg@10": 0.0}
    for rows, grades in zip(ranked, relevant, strict=True):
        for k in cutoffs:
            totals[f"recall@{k}"] += len(set(rows[:k]) & set(grades)) / len(grades)
        hits = [rank for rank, row in enumerate(rows[:10], 1) if row in grades]
        totals["mrr@10"] += 1 / hits[0] if hits else 0.0
        gain = sum(grades.get(row, 0) / math.log2(rank + 1) for rank, row in enumerate(rows[:10], 1))
        ideal = sorted(grades.values(), reverse=True)[:10]
        totals["ndcg@10"] += gain / sum(grade / math.log2(rank + 1) for rank, grade in enumerate(ideal, 1))
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
    references = [list(grades) for grades in relevant]
    grades = [list(its.values()) for its in relevant]
    found = load_metric("retrieval").compute(predictions=ranked.tolist(), references=references, grades=grades)
    assert found["ndcg@10"] == pytest.approx(expected["ndcg@10"], abs=1e-12)


def test_a_perfect_list_scores_one_and_an_empty_query_is_refused():
    scores = ranking_scores(np.array([[3, 1, 0]]), [{3: 2.0, 1: 1.0}])
    assert scores == {"recall@1": 0.5, "mrr@10": 1.0, "ndcg@10": 1.0}
    with pytest.raises(ValueError, match="leave them out"):
        ranking_scores(np.array([[0]]), [{}])


def test_ranking_scores_equal_trec_evals():
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="comes with the extra mteb")
    generator = np.random.default_rng(1)
    ranked = np.stack([generator.permutation(50)[:20] for _ in range(9)])
    relevant = [{int(row): int(generator.integers(1, 4)) for row in generator.permutation(50)[:7]} for _ in range(9)]
    evaluator = pytrec_eval.RelevanceEvaluator(
        {str(q): {str(row): grade for row, grade in grades.items()} for q, grades in enumerate(relevant)},
        {"ndcg_cut.10", "recall.10"},
    )
    run = {str(q): {str(row): float(-rank) for rank, row in enumerate(rows)} for q, rows in enumerate(ranked.tolist())}
    theirs = evaluator.evaluate(run).values()
    scores = ranking_scores(ranked, relevant, (10,))
    assert scores["ndcg@10"] == pytest.approx(np.mean([query["ndcg_cut_10"] for query in theirs]), abs=1e-9)
    assert scores["recall@10"] == pytest.approx(np.mean([query["recall_10"] for query in theirs]), abs=1e-9)


def test_exact_search_sorts_by_cosine():
    queries, documents = torch.randn(5, 6), torch.randn(17, 6) * torch.rand(17, 1)
    cosines = torch.stack([torch.cosine_similarity(query, documents, dim=1) for query in queries])
    expected = cosines.argsort(dim=1, descending=True).numpy()
    assert (exact_search(queries, documents, 4) == expected[:, :4]).all()
    assert (exact_search(queries, documents, 100) == expected).all()


def test_two_stages_rerank_what_the_first_found():
    queries, documents = torch.randn(5, 12), torch.randn(40, 12)
    shortlist = exact_search(queries[:, :3], documents[:, :3], 40)
    found = rerank(queries[:, :8], documents[:, :8], shortlist, [5, 40])
    for row, query in enumerate(queries):
        first = torch.cosine_similarity(query[:3], documents[:, :3], dim=1).argsort(descending=True)[:5]
        order = torch.cosine_similarity(query[:8], documents[first, :8], dim=1).argsort(descending=True)
        assert found[5][row].tolist() == first[order].tolist()
    # A shortlist of everything is the exact search.
    assert (found[40] == exact_search(queries[:, :8], documents[:, :8], 40)).all()
    assert products_share(40, (3, 8), 5) == (40 * 3 + 5 * 8) / (40 * 8)


def test_spearman_of_cosines_is_a_correlation_of_ranks():
    first, second = torch.randn(20, 5), torch.randn(20, 5)
    scores = [round(float(score), 1) for score in torch.rand(20) * 5]  # with ties

    def ranks(values):
        return torch.tensor([sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values])

    cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(first, second, strict=True)]
    expected = float(torch.corrcoef(torch.stack([ranks(cosines), ranks(scores)]))[0, 1])
    assert similarity_spearman(pair_cosines(first, second), scores) == pytest.approx(expected, abs=1e-6)
    assert similarity_spearman(pair_cosines(3 * first, second), scores) == pytest.approx(expected, abs=1e-6)
    metric = load_metric("similarity_spearman")
    assert metric.compute(predictions=cosines, references=scores) == pytest.approx({"spearman": expected}, abs=1e-6)


def test_the_best_threshold_is_the_best_of_all():
    cosines = [round(float(value), 1) for value in torch.randn(40)]  # with ties, which no threshold can part
    labels = [int(value > 0.3) for value in torch.rand(40)]
    best = max(
        sum((cosine >= threshold) == bool(label) for cosine, label in zip(cosines, labels, strict=True)) / 40
        for threshold in [*cosines, math.inf]
    )
    scores = pair_classification_scores(cosines, labels)
    assert scores["accuracy"] == pytest.approx(best)
    assert load_metric("pair_classification").compute(predictions=cosines, references=labels) == scores
    distinct = [value + 1e-6 * row for row, value in enumerate(cosines)]
    ranking = sorted(range(40), key=lambda row: -distinct[row])
    hits = [row for row in range(40) if labels[ranking[row]]]
    average = sum((count + 1) / (row + 1) for count, row in enumerate(hits)) / len(hits)
    assert pair_classification_scores(distinct, labels)["average_precision"] == pytest.approx(average)
    with pytest.raises(ValueError, match=r"needs labels 0 and 1; found \[1\]"):
        pair_classification_scores(cosines, [1] * 40)


def test_bitext_accuracy_counts_nearest_translations():
    first = torch.randn(30, 8)
    second = first + 0.7 * torch.randn(30, 8)
    cosines = torch.stack([torch.cosine_similarity(one, second, dim=1) for one in first])
    expected = {
        "accuracy": (cosines.argmax(dim=1) == torch.arange(30)).double().mean().item(),
        "accuracy_reverse": (cosines.argmax(dim=0) == torch.arange(30)).double().mean().item(),
    }
    assert 0 < expected["accuracy"] < 1
    assert bitext_accuracy(first, second) == pytest.approx(expected)
    metric = load_metric("bitext_accuracy")
    found = metric.compute(predictions=first.tolist(), references=second.tolist())
    assert found == pytest.approx(expected)


def test_a_classifier_learns_what_a_line_divides():
    vectors, labels = torch.randn(80, 4), [0] * 40 + [1] * 40
    vectors[40:, 1] += 8
    classifier = fit_classifier(vectors, labels)
    scores = classification_scores(classifier.predict(vectors.numpy()), labels)
    assert scores == {"macro_f1": 1.0, "accuracy": 1.0}
    with pytest.raises(ValueError, match=r"two classes at least; found \[7\]"):
        fit_classifier(vectors, [7] * 80)


def test_classification_scores_weigh_classes_equally():
    labels, predictions = [0, 0, 0, 1], [0, 0, 0, 0]
    expected = {"macro_f1": (2 * 0.75 / 1.75 + 0) / 2, "accuracy": 0.75}
    assert classification_scores(predictions, labels) == pytest.approx(expected)
    found = load_metric("classification").compute(predictions=predictions, references=labels)
    assert found == pytest.approx(expected)


def test_alignment_and_uniformity_are_what_they_mean():
    first, second = torch.randn(7, 5), torch.randn(7, 5)
    unit = [vector / vector.norm() for vector in [*first, *second]]
    expected = {
        "alignment": sum(float((a - b).norm() ** 2) for a, b in zip(unit[:7], unit[7:], strict=True)) / 7,
        "uniformity": math.log(
            sum(
                math.exp(-2 * float((a - b).norm() ** 2))
                for i, a in enumerate(unit)
                for j, b in enumerate(unit)
                if i != j
            )
            / (14 * 13)
        ),
    }
    assert alignment(first, second) == pytest.approx(expected["alignment"], abs=1e-6)
    for rows_at_once in (1, 3, 1024):
        found = uniformity(torch.cat([first, second]), rows_at_once=rows_at_once)
        assert found == pytest.approx(expected["uniformity"], abs=1e-6)
    metric = load_metric("alignment_uniformity")
    assert metric.compute(predictions=first.tolist(), references=second.tolist()) == pytest.approx(expected, abs=1e-6)
    assert alignment(first, 2 * first) == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="there is 1"):
        uniformity(first[:1])


def test_geometry_is_what_it_means():
    vectors = torch.randn(50, 6, dtype=torch.float64)
    vectors[:, 4] = vectors[:, 0] + 0.1 * vectors[:, 4]
    vectors[:, 5] = 3.0  # never varies
    covariance = feature_covariance(vectors)
    centred = vectors - vectors.mean(0)
    torch.testing.assert_close(covariance, centred.T @ centred / 49)
    correlation = feature_correlation(covariance)
    expected = torch.corrcoef(vectors[:, :5].T)
    torch.testing.assert_close(correlation[:5, :5], expected)
    assert (correlation[5] == 0).all()
    residual = torch.cat([expected[:2, 2:], torch.zeros(2, 1)], dim=1).abs().mean()
    assert prefix_residual_correlation(correlation, 2) == pytest.approx(float(residual))
    spectrum = torch.linalg.svdvals(centred[:, :3]) ** 2
    shares = spectrum / spectrum.sum()
    scores = geometry_scores(vectors, [1, 3, 6])
    assert scores[3]["effective_rank"] == pytest.approx(float(torch.exp(-(shares * shares.log()).sum())))
    off_diagonal = [abs(float(covariance[i, j])) for i in range(3) for j in range(3) if i != j]
    assert scores[3]["mean_covariance"] == pytest.approx(sum(off_diagonal) / 6)
    assert scores[1].keys() == {"effective_rank", "prefix_residual_correlation"}
    assert scores[6].keys() == {"effective_rank", "mean_covariance"}


def test_effective_rank_counts_directions():
    assert effective_rank(torch.eye(8), 5) == pytest.approx(5)
    assert effective_rank(torch.ones(8, 8), 4) == pytest.approx(1)
    assert effective_rank(torch.zeros(8, 8), 4) == 0


def test_every_module_can_be_loaded():
    assert len(METRICS) == 6
    with pytest.raises(ValueError, match="no metric 'bleu'; there are alignment_uniformity, "):
        load_metric("bleu")
