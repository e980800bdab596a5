"""How embeddings lie in space: what the papers plot beside their scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn


def alignment(first: torch.Tensor, second: torch.Tensor) -> float:
    """
    Mean squared distance of positive pairs on the unit sphere (Wang and Isola,
    [2005.10242](https://huggingface.co/papers/2005.10242); IBKD, Eq. 12). Lower is better.

    Args:
        first (`torch.Tensor` of shape `(pairs, dim)`): Need not be normalised.
        second (`torch.Tensor` of shape `(pairs, dim)`): Their partners.

    Returns:
        `float`: in 0..4.
    """
    first, second = (nn.functional.normalize(side.double(), dim=1) for side in (first, second))
    return float((first - second).square().sum(dim=1).mean())


def uniformity(vectors: torch.Tensor, temperature: float = 2.0, rows_at_once: int = 1024) -> float:
    """
    `log mean exp(-t |x - y|^2)` over pairs of different texts on the unit sphere (Wang and Isola; IBKD, Eq. 13).
    Lower is better. The matrix of distances is never held whole.

    Args:
        vectors (`torch.Tensor` of shape `(texts, dim)`): Need not be normalised.
        temperature (`float`, *optional*, defaults to 2.0): t.
        rows_at_once (`int`, *optional*, defaults to 1024): Rows of distances in memory.

    Returns:
        `float`: in `-4 t`..0.

    Raises:
        ValueError: if there are fewer than two texts.
    """
    count = len(vectors)
    if count < 2:
        raise ValueError(f"Uniformity is of pairs of texts; there is {count}.")
    vectors = nn.functional.normalize(vectors.float(), dim=1)
    total = 0.0
    for start in range(0, count, rows_at_once):
        cosines = vectors[start : start + rows_at_once] @ vectors.T
        kernel = torch.exp(2 * temperature * (cosines - 1))
        kernel.diagonal(offset=start).zero_()
        total += float(kernel.sum(dtype=torch.float64))
    return float(np.log(total / (count * (count - 1))))


def feature_covariance(vectors: torch.Tensor) -> torch.Tensor:
    """
    Covariance of the dims over texts (IBKD, [2311.05472](https://huggingface.co/papers/2311.05472), section 4.7). Its
    diagonal is the variance spectrum (MIC, Figure 1), its leading block that of a prefix.

    Args:
        vectors (`torch.Tensor` of shape `(texts, dim)`): As they are: not normalised.

    Returns:
        `torch.Tensor` of shape `(dim, dim)`, float64.

    Raises:
        ValueError: if there are fewer than two texts.
    """
    if len(vectors) < 2:
        raise ValueError(f"A covariance is over several texts; there is {len(vectors)}.")
    return torch.cov(vectors.double().T).reshape(vectors.shape[1], vectors.shape[1])


def feature_correlation(covariance: torch.Tensor) -> torch.Tensor:
    """The correlations that belong to a covariance `(dim, dim)`; those of a dim that never varies are 0."""
    deviations = covariance.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(deviations > 0, 1 / deviations, 0.0)
    return covariance * inverse[:, None] * inverse[None, :]


def effective_rank(covariance: torch.Tensor, dim: int) -> float:
    """
    Exponential of the entropy of a prefix' spectrum: how many dims it really uses (Roy and Vetterli, 2007, of the
    eigenvalues of the covariance).

    Args:
        covariance (`torch.Tensor` of shape `(width, width)`): From [`feature_covariance`].
        dim (`int`): Length of the prefix.

    Returns:
        `float`: in 1..dim; 0 where nothing varies.
    """
    spectrum = torch.linalg.eigvalsh(covariance[:dim, :dim]).clamp(min=0)
    if spectrum.sum() == 0:
        return 0.0
    return float(torch.special.entr(spectrum / spectrum.sum()).sum().exp())


def prefix_residual_correlation(correlation: torch.Tensor, dim: int) -> float:
    """
    Mean absolute correlation of a prefix' dims with those behind it: what the prefix says that the rest repeats (MIC,
    [2605.29987](https://huggingface.co/papers/2605.29987), section 2; over texts, of pooled embeddings).

    Args:
        correlation (`torch.Tensor` of shape `(width, width)`): From [`feature_correlation`].
        dim (`int`): Length of the prefix, below the width.

    Returns:
        `float`: in 0..1.
    """
    return float(correlation[:dim, dim:].abs().mean())


def geometry_scores(vectors: torch.Tensor, dims: Sequence[int]) -> dict[int, dict[str, float]]:
    """
    What can be said of every prefix from one covariance matrix.

    Args:
        vectors (`torch.Tensor` of shape `(texts, width)`): Embeddings of one layer.
        dims (`Sequence[int]`): Prefixes.

    Returns:
        `dict[int, dict[str, float]]`: dim -> `effective_rank`, `mean_covariance` (mean absolute value off the
        diagonal), and `prefix_residual_correlation`, where something is behind the prefix.
    """
    covariance = feature_covariance(vectors)
    correlation = feature_correlation(covariance)
    scores: dict[int, dict[str, float]] = {}
    for dim in dims:
        scores[dim] = {"effective_rank": effective_rank(covariance, dim)}
        if dim > 1:
            block = covariance[:dim, :dim].abs()
            scores[dim]["mean_covariance"] = float((block.sum() - block.trace()) / (dim * (dim - 1)))
        if dim < vectors.shape[1]:
            scores[dim]["prefix_residual_correlation"] = prefix_residual_correlation(correlation, dim)
    return scores
