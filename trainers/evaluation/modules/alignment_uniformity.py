"""Alignment of positive pairs and uniformity of all their embeddings. Lower is better."""

from __future__ import annotations

import evaluate
import torch
from datasets import Features, List, Value

from trainers.evaluation.geometry import alignment, uniformity


INPUTS = """
Args:
    predictions: embedding of the first text of each positive pair.
    references: embedding of the second text of each positive pair.
"""


class AlignmentUniformity(evaluate.Metric):
    """[`trainers.evaluation.geometry.alignment`] and `uniformity` as a metric of the library `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": List(Value("float32")), "references": List(Value("float32"))})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[list[float]], references: list[list[float]]) -> dict[str, float]:
        first, second = torch.tensor(predictions), torch.tensor(references)
        return {"alignment": alignment(first, second), "uniformity": uniformity(torch.cat([first, second]))}
