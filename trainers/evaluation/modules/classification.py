"""Macro F1 and accuracy of predicted labels."""

from __future__ import annotations

import evaluate
from datasets import Features, Value

from trainers.evaluation.classification import classification_scores


INPUTS = """
Args:
    predictions: label of each text.
    references: its gold label.
"""


class ClassificationScores(evaluate.Metric):
    """See [`trainers.evaluation`]."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("int64"), "references": Value("int64")})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return classification_scores(predictions, references)
