"""A classifier on frozen embeddings, and its scores."""

from __future__ import annotations

import pytest
import torch

from trainers.evaluation.evaluators import fit_classifier
from trainers.evaluation.modules import compute_metric


def test_a_classifier_learns_what_a_line_divides():
    vectors, labels = torch.randn(80, 4), [0] * 40 + [1] * 40
    vectors[40:, 1] += 8
    classifier = fit_classifier(vectors, labels)
    scores = compute_metric("classification", predictions=classifier.predict(vectors.numpy()), references=labels)
    assert scores == {"macro_f1": 1.0, "accuracy": 1.0}
    with pytest.raises(ValueError, match=r"at least two classes; found \[7\]"):
        fit_classifier(vectors, [7] * 80)


def test_classification_scores_weigh_classes_equally():
    labels, predictions = [0, 0, 0, 1], [0, 0, 0, 0]
    expected = {"macro_f1": (2 * 0.75 / 1.75 + 0) / 2, "accuracy": 0.75}
    for names in ((0, 1), ("no", "yes")):
        named = {"predictions": [names[it] for it in predictions], "references": [names[it] for it in labels]}
        assert compute_metric("classification", **named) == pytest.approx(expected)
