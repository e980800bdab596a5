"""Share of sentences whose nearest sentence in the other language is their translation."""

from __future__ import annotations

import evaluate
import numpy as np
from datasets import Features, Value


INPUTS = """
Args:
    predictions: row of the sentence that is nearest to each sentence.
    references: row of the translation of each sentence.
"""


class BitextAccuracy(evaluate.Metric):
    """`accuracy` in one direction (the Tatoeba test of LASER, [1812.10464](https://huggingface.co/papers/1812.10464))."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": Value("int64"), "references": Value("int64")})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": float((np.array(predictions) == np.array(references)).mean())}
