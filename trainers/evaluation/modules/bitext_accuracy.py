"""How often the nearest sentence of the other language is the translation, both ways."""

from __future__ import annotations

import evaluate
import torch
from datasets import Features, List, Value

from trainers.evaluation.pairs import bitext_accuracy


INPUTS = """
Args:
    predictions: embedding of each sentence of one language.
    references: embedding of its translation.
"""


class BitextAccuracy(evaluate.Metric):
    """See [`trainers.evaluation`]."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": List(Value("float32")), "references": List(Value("float32"))})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[list[float]], references: list[list[float]]) -> dict[str, float]:
        return bitext_accuracy(torch.tensor(predictions), torch.tensor(references))
