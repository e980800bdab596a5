"""The cosines of text pairs, and the labels that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def pair_cosines(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Cosine of each pair, `(pairs,)` in float64. The embeddings `(pairs, dim)` need not be normalised."""
    return nn.functional.cosine_similarity(first.double(), second.double(), dim=1)


def require_both_labels(labels: Sequence[int]) -> None:
    """
    Check the labels of pairs.

    Raises:
        ValueError: if there are labels other than 0 and 1, or only one of the two.
    """
    if set(labels) != {0, 1}:
        raise ValueError(f"pair classification needs labels 0 and 1; found {sorted(set(labels))}.")
