"""The spectrum of embeddings, which the papers report next to their scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def feature_covariance(vectors: torch.Tensor) -> torch.Tensor:
    """
    Covariance of the dims over texts, `(dim, dim)` in float64 (IBKD,
    [2311.05472](https://huggingface.co/papers/2311.05472), section 4.7), of embeddings `(texts, dim)`, which are not
    normalised. Its leading block is that of a prefix.
    """
    return torch.cov(vectors.double().T).reshape(vectors.shape[1], vectors.shape[1])


def feature_correlation(covariance: torch.Tensor) -> torch.Tensor:
    """Correlation matrix of a covariance matrix `(dim, dim)`. Correlations of a constant dim are 0."""
    deviations = covariance.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(deviations > 0, 1 / deviations, 0.0)
    return covariance * inverse[:, None] * inverse[None, :]


def effective_rank(covariance: torch.Tensor, dim: int) -> float:
    """Effective rank of a prefix of this length, in 1..dim, from [`feature_covariance`]: the exponential of the
    entropy of the normalised eigenvalues (Roy and Vetterli, 2007). 0 if all embeddings are equal."""
    spectrum = torch.linalg.eigvalsh(covariance[:dim, :dim]).clamp(min=0)
    if spectrum.sum() == 0:
        return 0.0
    return float(torch.special.entr(spectrum / spectrum.sum()).sum().exp())


def prefix_residual_correlation(correlation: torch.Tensor, dim: int) -> float:
    """Mean absolute correlation between the dims of a prefix of this length and the dims after it, in 0..1, from
    [`feature_correlation`]. It measures redundancy (MIC, [2605.29987](https://huggingface.co/papers/2605.29987),
    section 2; here over texts, of pooled embeddings)."""
    return float(correlation[:dim, dim:].abs().mean())


def geometry_scores(vectors: torch.Tensor, dims: Sequence[int]) -> dict[int, dict[str, float]]:
    """
    Geometry of the prefixes of embeddings `(texts, width)` of one layer, from one covariance matrix: dim ->
    `effective_rank`, `mean_covariance` (mean absolute value off the diagonal, for dims above 1), and
    `prefix_residual_correlation` (for dims below the hidden size).
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
