"""Spearman correlation between the cosines of pairs and their gold scores."""

from __future__ import annotations

import evaluate
from datasets import Features, Value

from trainers.evaluation.pairs import similarity_spearman


INPUTS = """
Args:
    predictions: cosine of each pair.
    references: gold score of each pair.
"""


class SimilaritySpearman(evaluate.Metric):
    """[`trainers.evaluation.pairs.similarity_spearman`] as a metric of the library `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("float64"), "references": Value("float64")})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return {"spearman": similarity_spearman(predictions, references)}
