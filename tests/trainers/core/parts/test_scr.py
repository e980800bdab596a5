"""SCR as its paper says."""

from __future__ import annotations

import pytest
import torch

from tests.trainers.core.parts.token_texts import DIMS, GRID, WIDTH, assert_same, make_batch
from trainers import SCR, NestedBatch


def naive_scr(batch: NestedBatch, threshold: float, weight: float) -> torch.Tensor:
    """Section 2.1 and 2.3 of MIC, a text and a pair of dims at a time."""
    total = 0
    for layer in (2, 3):
        standard, deviations = [], []
        for text in batch.texts.values():
            for tokens, real in zip(text.layers[layer], text.attention_mask, strict=True):
                kept = tokens[real.bool()]
                variance = (kept - kept.mean(dim=0)).square().mean(dim=0)
                # The root of 0 has no slope: a text of one token.
                deviation = variance.sqrt() if len(kept) > 1 else torch.zeros_like(variance)
                standard.append((kept - kept.mean(dim=0)) / (deviation + 1e-8))
                deviations.append(deviation)
        mean_deviation = torch.stack(deviations).mean(dim=0)
        for dim in DIMS:
            matrix = sum(x[:, :dim].T @ x[:, dim:] / len(x) for x in standard) / len(standard)
            excess = (matrix.abs() - threshold).clamp(min=0).square()
            total = total + excess.sum() / (dim * (WIDTH - dim))
            floors = [(1 - part.mean()).clamp(min=0) for part in (mean_deviation[:dim], mean_deviation[dim:])]
            total = total + weight * (floors[0] + 0.5 * floors[1])
    return total / (2 * (len(DIMS) + 1))


@pytest.mark.parametrize(("threshold", "weight"), [(0.1, 0.1), (0.0, 1.0), (0.4, 0.0)])
def test_scr_equals_its_equations(threshold, weight):
    objective, batch = SCR(GRID, threshold=threshold, variance_weight=weight), make_batch()
    found = assert_same(objective, batch, naive_scr(batch, threshold, weight))
    assert not found["view 1 2"][2].any(), "one token has no correlation"
    assert not found["view 1 1"].any()
