"""The spectrum of embeddings, against the definitions of its numbers."""

from __future__ import annotations

import pytest
import torch

from m3bert.evaluation.geometry import (
    effective_rank,
    feature_correlation,
    feature_covariance,
    geometry_scores,
    prefix_residual_correlation,
)


def test_geometry_is_what_it_means():
    vectors = torch.randn(50, 6, dtype=torch.float64)
    vectors[:, 4] = vectors[:, 0] + 0.1 * vectors[:, 4]
    vectors[:, 5] = 3.0  # never varies
    covariance = feature_covariance(vectors)
    centred = vectors - vectors.mean(0)
    torch.testing.assert_close(covariance, centred.T @ centred / 49)
    correlation = feature_correlation(covariance)
    expected = torch.corrcoef(vectors[:, :5].T)
    torch.testing.assert_close(correlation[:5, :5], expected)
    assert (correlation[5] == 0).all()
    residual = torch.cat([expected[:2, 2:], torch.zeros(2, 1)], dim=1).abs().mean()
    assert prefix_residual_correlation(correlation, 2) == pytest.approx(float(residual))
    spectrum = torch.linalg.svdvals(centred[:, :3]) ** 2
    shares = spectrum / spectrum.sum()
    scores = geometry_scores(vectors, [1, 3, 6])
    assert scores[3]["effective_rank"] == pytest.approx(float(torch.exp(-(shares * shares.log()).sum())))
    off_diagonal = [abs(float(covariance[i, j])) for i in range(3) for j in range(3) if i != j]
    assert scores[3]["mean_covariance"] == pytest.approx(sum(off_diagonal) / 6)
    assert scores[1].keys() == {"effective_rank", "prefix_residual_correlation"}
    assert scores[6].keys() == {"effective_rank", "mean_covariance"}


def test_effective_rank_counts_directions():
    assert effective_rank(torch.eye(8), 5) == pytest.approx(5)
    assert effective_rank(torch.ones(8, 8), 4) == pytest.approx(1)
    assert effective_rank(torch.zeros(8, 8), 4) == 0
