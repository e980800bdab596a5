"""Macro F1 and accuracy of predicted labels."""

from __future__ import annotations

import evaluate
from datasets import Features, Value

from trainers.core.extras import require_extra


INPUTS = """
Args:
    predictions: predicted label of each text, a number or a name.
    references: gold label of each text.
"""


class ClassificationScores(evaluate.Metric):
    """`macro_f1`, the unweighted mean over classes, and `accuracy`."""

    def _info(self) -> evaluate.MetricInfo:
        features = [Features({"predictions": Value(kind), "references": Value(kind)}) for kind in ("int64", "string")]
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        metrics = require_extra("sklearn.metrics", "evaluation", "Classification")
        return {
            "macro_f1": float(metrics.f1_score(references, predictions, average="macro")),
            "accuracy": float(metrics.accuracy_score(references, predictions)),
        }
