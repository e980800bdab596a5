"""Accuracy at the best threshold, and average precision, of the cosines of pairs."""

from __future__ import annotations

import evaluate
from datasets import Features, Value

from trainers.evaluation.pairs import pair_classification_scores


INPUTS = """
Args:
    predictions: cosine of each pair.
    references: 1 for positive pairs, 0 for negative pairs.
"""


class PairClassificationScores(evaluate.Metric):
    """[`trainers.evaluation.pairs.pair_classification_scores`] as a metric of the library `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("float64"), "references": Value("int64")})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        return pair_classification_scores(predictions, references)
