"""Metrics against their definitions, and those of the library `evaluate`."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from m3bert.evaluation import BitextMining, library_metrics
from m3bert.evaluation.evaluators import fit_classifier
from m3bert.evaluation.metrics import (
    alignment,
    classification_scores,
    pair_cosines,
    pair_scores,
    similarity_scores,
    uniformity,
)


def test_spearman_of_cosines_is_a_correlation_of_ranks():
    first, second = torch.randn(20, 5), torch.randn(20, 5)
    scores = [round(float(score), 1) for score in torch.rand(20) * 5]  # with ties

    def ranks(values):
        return torch.tensor([sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values])

    cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(first, second, strict=True)]
    expected = float(torch.corrcoef(torch.stack([ranks(cosines), ranks(scores)]))[0, 1])
    for actual in (pair_cosines(first, second), pair_cosines(3 * first, second), cosines):
        assert similarity_scores(actual, scores) == pytest.approx({"spearman": expected}, abs=1e-6)


def test_the_best_threshold_is_the_best_of_all():
    cosines = [round(float(value), 1) for value in torch.randn(40)]  # with ties, which no threshold can part
    labels = [int(value > 0.3) for value in torch.rand(40)]
    best = max(
        sum((cosine >= threshold) == bool(label) for cosine, label in zip(cosines, labels, strict=True)) / 40
        for threshold in [*cosines, math.inf]
    )
    assert pair_scores(cosines, labels)["accuracy"] == pytest.approx(best)
    distinct = [value + 1e-6 * row for row, value in enumerate(cosines)]
    ranking = sorted(range(40), key=lambda row: -distinct[row])
    hits = [row for row in range(40) if labels[ranking[row]]]
    average = sum((count + 1) / (row + 1) for count, row in enumerate(hits)) / len(hits)
    assert pair_scores(distinct, labels)["average_precision"] == pytest.approx(average)


def test_a_classifier_learns_what_a_line_divides_and_classes_weigh_equally():
    vectors, labels = torch.randn(80, 4), [0] * 40 + [1] * 40
    vectors[40:, 1] += 8
    predicted = fit_classifier(vectors, labels).predict(vectors.numpy())
    assert classification_scores(predicted, labels) == {"macro_f1": 1.0, "accuracy": 1.0}
    for no, yes in ((0, 1), ("no", "yes")):
        actual = classification_scores([no] * 4, [no, no, no, yes])
        assert actual == pytest.approx({"macro_f1": (2 * 0.75 / 1.75 + 0) / 2, "accuracy": 0.75})


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


@pytest.mark.parametrize("count", [1, 511, 1400])  # blocks of rows, whole and in part
def test_alignment_and_uniformity_are_distances_on_the_sphere(count):
    first, second = torch.randn(count, 4), torch.randn(count, 4)
    unit = torch.nn.functional.normalize(torch.cat([first, second]).double(), dim=1)
    expected = float(torch.pdist(unit).square().mul(-2).exp().mean().log())
    assert uniformity(torch.cat([first, 3 * second])) == pytest.approx(expected, abs=1e-6)
    expected = sum(float((a - b).norm() ** 2) for a, b in zip(unit[:count], unit[count:], strict=True)) / count
    assert alignment(first, 2 * second) == pytest.approx(expected, abs=1e-6)


ERROR_RATE = """
import datasets
import evaluate

class ErrorRate(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return {"error_rate": sum(a != b for a, b in zip(predictions, references)) / len(references)}
"""


def test_a_metric_of_the_library_reads_the_labelled_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr("evaluate.config.HF_EVALUATE_CACHE", tmp_path / "cache")
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name in [name for name in sys.modules if name.startswith("evaluate_modules")]:
        monkeypatch.delitem(sys.modules, name)  # of another test, from another cache
    (tmp_path / "error_rate.py").write_text(ERROR_RATE)
    labels, logits = np.array([[1, -100, 2], [0, 2, -100]]), np.random.default_rng(0).normal(size=(2, 3, 3))
    known = labels != -100
    expected = np.mean(logits.argmax(axis=-1)[known] != labels[known])
    metrics = library_metrics(str(tmp_path / "error_rate.py"))
    assert metrics(EvalPrediction(logits, labels)) == {"error_rate": expected}
