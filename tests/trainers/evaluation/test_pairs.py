"""Scores of pairs of texts, against what they mean."""

from __future__ import annotations

import math

import pytest
import torch

from trainers.evaluation import BitextMining
from trainers.evaluation.modules import compute_metric
from trainers.evaluation.pairs import pair_cosines


def spearman(cosines, scores):
    return compute_metric("similarity_spearman", predictions=cosines, references=scores)


def pair_scores(cosines, labels):
    return compute_metric("pair_classification", predictions=cosines, references=labels)


def test_spearman_of_cosines_is_a_correlation_of_ranks():
    first, second = torch.randn(20, 5), torch.randn(20, 5)
    scores = [round(float(score), 1) for score in torch.rand(20) * 5]  # with ties

    def ranks(values):
        return torch.tensor([sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values])

    cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(first, second, strict=True)]
    expected = float(torch.corrcoef(torch.stack([ranks(cosines), ranks(scores)]))[0, 1])
    for found in (pair_cosines(first, second), pair_cosines(3 * first, second), cosines):
        assert spearman(found, scores) == pytest.approx({"spearman": expected}, abs=1e-6)


def test_the_best_threshold_is_the_best_of_all():
    cosines = [round(float(value), 1) for value in torch.randn(40)]  # with ties, which no threshold can part
    labels = [int(value > 0.3) for value in torch.rand(40)]
    best = max(
        sum((cosine >= threshold) == bool(label) for cosine, label in zip(cosines, labels, strict=True)) / 40
        for threshold in [*cosines, math.inf]
    )
    scores = pair_scores(cosines, labels)
    assert scores["accuracy"] == pytest.approx(best)
    distinct = [value + 1e-6 * row for row, value in enumerate(cosines)]
    ranking = sorted(range(40), key=lambda row: -distinct[row])
    hits = [row for row in range(40) if labels[ranking[row]]]
    average = sum((count + 1) / (row + 1) for count, row in enumerate(hits)) / len(hits)
    assert pair_scores(distinct, labels)["average_precision"] == pytest.approx(average)
    with pytest.raises(ValueError, match=r"needs labels 0 and 1; found \[1\]"):
        pair_scores(cosines, [1] * 40)


def test_bitext_accuracy_counts_nearest_translations():
    first = torch.randn(30, 8)
    second = first + 0.7 * torch.randn(30, 8)
    cosines = torch.stack([torch.cosine_similarity(one, second, dim=1) for one in first])
    expected = {
        "accuracy": (cosines.argmax(dim=1) == torch.arange(30)).double().mean().item(),
        "accuracy_reverse": (cosines.argmax(dim=0) == torch.arange(30)).double().mean().item(),
    }
    assert 0 < expected["accuracy"] < 1
    evaluator = BitextMining({"sentence1": ["a"] * 30, "sentence2": ["b"] * 30})
    assert evaluator.score({"sentence1": first, "sentence2": second}) == pytest.approx(expected)
