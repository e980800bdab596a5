"""Semantic textual similarity."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.stats import spearmanr
from torch import nn


def similarity_spearman(first: torch.Tensor, second: torch.Tensor, scores: Sequence[float]) -> float:
    """
    Spearman correlation of the cosines of pairs with what people say of them.

    Args:
        first (`torch.Tensor` of shape `(pairs, dim)`): Need not be normalised.
        second (`torch.Tensor` of shape `(pairs, dim)`): Their partners.
        scores (`Sequence[float]`): Of each pair, on any scale.

    Returns:
        `float`: in -1..1.

    Raises:
        ValueError: if an embedding is not finite.
    """
    if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
        raise ValueError("Some embeddings are not finite.")
    cosines = nn.functional.cosine_similarity(first.double(), second.double(), dim=1)
    return float(spearmanr(cosines.numpy(), list(scores)).statistic)
