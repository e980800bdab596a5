"""Metrics against their definitions, those of the library `evaluate`, and the spectrum of embeddings."""

import math
import sys

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from m3bert.evaluation import BitextMining, library_metrics, metrics
from m3bert.evaluation.evaluators import fit_classifier


def test_spearman_of_cosines_is_a_correlation_of_ranks():
    first, second = torch.randn(20, 5), torch.randn(20, 5)
    cosines = torch.cosine_similarity(first, second)
    torch.testing.assert_close(
        torch.as_tensor(metrics.pair_cosines(3 * first, second)).float(), cosines, atol=1e-6, rtol=0
    )
    assert metrics.similarity_scores([0.1, 0.2, 0.9], [1.0, 1.0, 5.0]) == pytest.approx(
        {"spearman": 0.75**0.5}
    )  # with ties
    assert metrics.similarity_scores([0.1, 0.5, 0.2, 0.9], [0.0, 2.0, 4.0, 5.0]) == pytest.approx({"spearman": 0.8})


def test_the_best_threshold_is_the_best_of_all():
    cosines = [round(float(value), 1) for value in torch.randn(40)]  # with ties, which no threshold can part
    labels = [int(value > 0.3) for value in torch.rand(40)]
    best = max(
        sum((cosine >= threshold) == bool(label) for cosine, label in zip(cosines, labels, strict=True)) / 40
        for threshold in [*cosines, math.inf]
    )
    assert metrics.pair_scores(cosines, labels)["accuracy"] == pytest.approx(best)
    assert metrics.pair_scores([0.9, 0.8, 0.7, 0.1], [1, 0, 1, 0])["average_precision"] == pytest.approx(
        (1 + 2 / 3) / 2
    )


def test_a_classifier_learns_what_a_line_divides_and_classes_weigh_equally():
    vectors, labels = torch.randn(80, 4), [0] * 40 + [1] * 40
    vectors[40:, 1] += 8
    predicted = fit_classifier(vectors, labels).predict(vectors.numpy())
    assert metrics.classification_scores(predicted, labels) == {"macro_f1": 1.0, "accuracy": 1.0}
    for no, yes in ((0, 1), ("no", "yes")):
        actual = metrics.classification_scores([no] * 4, [no, no, no, yes])
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
    assert metrics.uniformity(torch.cat([first, 3 * second])) == pytest.approx(expected, abs=1e-6)
    expected = sum(float((a - b).norm() ** 2) for a, b in zip(unit[:count], unit[count:], strict=True)) / count
    assert metrics.alignment(first, 2 * second) == pytest.approx(expected, abs=1e-6)


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
    error_rate = library_metrics(str(tmp_path / "error_rate.py"))
    assert error_rate(EvalPrediction(logits, labels)) == {"error_rate": expected}


def test_geometry_is_what_it_means():
    vectors = torch.randn(50, 6, dtype=torch.float64)
    vectors[:, 4] = vectors[:, 0] + 0.1 * vectors[:, 4]
    vectors[:, 5] = 3.0  # never varies
    covariance = metrics.feature_covariance(vectors)
    centred = vectors - vectors.mean(0)
    torch.testing.assert_close(covariance, centred.T @ centred / 49)
    correlation = metrics.feature_correlation(covariance)
    expected = torch.corrcoef(vectors[:, :5].T)
    torch.testing.assert_close(correlation[:5, :5], expected)
    assert (correlation[5] == 0).all()
    residual = torch.cat([expected[:2, 2:], torch.zeros(2, 1)], dim=1).abs().mean()
    assert metrics.prefix_residual_correlation(correlation, 2) == pytest.approx(float(residual))
    spectrum = torch.linalg.svdvals(centred[:, :3]) ** 2
    shares = spectrum / spectrum.sum()
    scores = metrics.geometry_scores(vectors, [1, 3, 6])
    assert scores[3]["effective_rank"] == pytest.approx(float(torch.exp(-(shares * shares.log()).sum())))
    off_diagonal = [abs(float(covariance[i, j])) for i in range(3) for j in range(3) if i != j]
    assert scores[3]["mean_covariance"] == pytest.approx(sum(off_diagonal) / 6)
    assert scores[1].keys() == {"effective_rank", "prefix_residual_correlation"}
    assert scores[6].keys() == {"effective_rank", "mean_covariance"}


def test_effective_rank_counts_directions():
    assert metrics.effective_rank(torch.eye(8), 5) == pytest.approx(5)
    assert metrics.effective_rank(torch.ones(8, 8), 4) == pytest.approx(1)
    assert metrics.effective_rank(torch.zeros(8, 8), 4) == 0
