"""Spearman correlation between the cosines of pairs and their gold scores."""

from __future__ import annotations

import evaluate
from datasets import Features, Value

from trainers.core.extras import require_extra


INPUTS = """
Args:
    predictions: cosine of each pair.
    references: gold score of each pair, on any scale.
"""


class SimilaritySpearman(evaluate.Metric):
    """`spearman`, in -1..1; NaN (undefined) if all cosines or all scores are equal."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("float64"), "references": Value("float64")})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        stats = require_extra("scipy.stats", "evaluation", "Semantic textual similarity")
        return {"spearman": float(stats.spearmanr(predictions, references).statistic)}
