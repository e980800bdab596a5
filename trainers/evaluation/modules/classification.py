"""Macro F1 and accuracy of predicted labels."""

from __future__ import annotations

import evaluate
from datasets import Features, Value

from trainers.evaluation.classification import classification_scores


INPUTS = """
Args:
    predictions: predicted label of each text.
    references: gold label of each text.
"""


class ClassificationScores(evaluate.Metric):
    """[`trainers.evaluation.classification.classification_scores`] as a metric of the library `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("int64"), "references": Value("int64")})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return classification_scores(predictions, references)
