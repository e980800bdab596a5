"""Share of sentences whose nearest sentence in the other language is their translation, in both directions."""

from __future__ import annotations

import evaluate
import torch
from datasets import Features, List, Value

from trainers.evaluation.pairs import bitext_accuracy


INPUTS = """
Args:
    predictions: embedding of each sentence of one language.
    references: embedding of the translation of each sentence.
"""


class BitextAccuracy(evaluate.Metric):
    """[`trainers.evaluation.pairs.bitext_accuracy`] as a metric of the library `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": List(Value("float32")), "references": List(Value("float32"))})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[list[float]], references: list[list[float]]) -> dict[str, float]:
        return bitext_accuracy(torch.tensor(predictions), torch.tensor(references))
