"""Alignment of positive pairs and uniformity of all their embeddings. Lower is better."""

from __future__ import annotations

from collections.abc import Sequence

import evaluate
import numpy as np
import torch
from datasets import Features, List, Value
from torch import nn


TEMPERATURE = 2.0  # t of uniformity
ROWS_AT_ONCE = 1024  # rows of the matrix of distances that are in memory together
INPUTS = """
Args:
    predictions: embedding of the first text of each pair; need not be normalised.
    references: embedding of the second text of each pair; need not be normalised.
    positives: rows of the positive pairs, whose alignment is measured. Default: all.
"""


class AlignmentUniformity(evaluate.Metric):
    """
    `alignment`, in 0..4: mean squared distance of positive pairs on the unit sphere. `uniformity`, in -8..0:
    `log mean exp(-2 |x - y|^2)` over pairs of different texts there (Wang and Isola,
    [2005.10242](https://huggingface.co/papers/2005.10242); IBKD, Eq. 12 and 13).
    """

    def _info(self) -> evaluate.MetricInfo:
        features = Features({"predictions": List(Value("float32")), "references": List(Value("float32"))})
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(
        self, predictions: list[list[float]], references: list[list[float]], positives: Sequence[int] | None = None
    ) -> dict[str, float]:
        first, second = torch.tensor(predictions), torch.tensor(references)
        rows = slice(None) if positives is None else list(positives)
        return {
            "alignment": alignment(first[rows], second[rows]),
            "uniformity": uniformity(torch.cat([first, second])),
        }


def alignment(first: torch.Tensor, second: torch.Tensor) -> float:
    """Mean squared distance of pairs of embeddings `(pairs, dim)`, normalised first."""
    first, second = (nn.functional.normalize(side.double(), dim=1) for side in (first, second))
    return float((first - second).square().sum(dim=1).mean())


def uniformity(vectors: torch.Tensor) -> float:
    """Uniformity of at least two embeddings `(texts, dim)`, normalised first. Distances come in blocks of rows."""
    count, total = len(vectors), 0.0
    vectors = nn.functional.normalize(vectors.float(), dim=1)
    for start in range(0, count, ROWS_AT_ONCE):
        cosines = vectors[start : start + ROWS_AT_ONCE] @ vectors.T
        kernel = torch.exp(2 * TEMPERATURE * (cosines - 1))
        kernel.diagonal(offset=start).zero_()
        total += float(kernel.sum(dtype=torch.float64))
    return float(np.log(total / (count * (count - 1))))
