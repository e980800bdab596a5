"""Accuracy at the best threshold, and average precision, of the cosines of pairs."""

from __future__ import annotations

import evaluate
from datasets import Features, Value

from trainers.core.extras import require_extra
from trainers.evaluation.pairs import require_both_labels


INPUTS = """
Args:
    predictions: cosine of each pair.
    references: 1 for positive pairs, 0 for negative pairs.
"""


class PairClassificationScores(evaluate.Metric):
    """`accuracy` at the threshold that is best for these pairs (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374),
    A.4), and `average_precision`. A ValueError says that all labels are equal."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("float64"), "references": Value("int64")})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        require_both_labels(references)
        metrics = require_extra("sklearn.metrics", "evaluation", "Pair classification")
        false_positive_rate, true_positive_rate, _ = metrics.roc_curve(
            references, predictions, drop_intermediate=False
        )
        positives = sum(references) / len(references)
        accuracies = true_positive_rate * positives + (1 - false_positive_rate) * (1 - positives)
        return {
            "accuracy": float(accuracies.max()),
            "average_precision": float(metrics.average_precision_score(references, predictions)),
        }
