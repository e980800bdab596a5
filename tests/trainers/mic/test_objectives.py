"""SCR and SIR as their paper says."""

from __future__ import annotations

import pytest
import torch

from m3bert.trainers import SCR, SIR, NestedBatch
from tests.trainers.naive import (
    naive_correlation,
    naive_penalty,
    naive_standardized,
    naive_uniformity,
    naive_variation,
)
from tests.trainers.token_texts import DIMS, GRID, WIDTH, assert_same, make_batch


def naive_scr(batch: NestedBatch, threshold: float, weight: float) -> torch.Tensor:
    """Section 2.1 and 2.3 of MIC, a text and a pair of dims at a time."""
    total = 0
    for layer in (2, 3):
        columns = [naive_standardized(text.layers[layer], text.attention_mask) for text in batch.texts.values()]
        masks, deviation = [text.attention_mask for text in batch.texts.values()], [own for _, own in columns]
        deviation = torch.cat(deviation).mean(dim=0)
        for dim in DIMS:
            matrices = [naive_correlation(states, mask, dim) for (states, _), mask in zip(columns, masks, strict=True)]
            floors = [(1 - part.mean()).clamp(min=0) for part in (deviation[:dim], deviation[dim:])]
            total = total + naive_penalty(sum(matrices) / len(matrices), threshold)
            total = total + weight * (floors[0] + 0.5 * floors[1])
    return total / (2 * (len(DIMS) + 1))


@pytest.mark.parametrize(("threshold", "weight"), [(0.1, 0.1), (0.0, 1.0), (0.4, 0.0)])
def test_scr_equals_its_equations(threshold, weight):
    objective, batch = SCR(GRID, threshold=threshold, variance_weight=weight), make_batch()
    found = assert_same(objective, batch, naive_scr(batch, threshold, weight))
    assert not found["view 1 2"][2].any(), "one token has no correlation"
    assert not found["view 1 1"].any()


def naive_sir(batch: NestedBatch, scale: float) -> torch.Tensor:
    dims, total = (*DIMS, WIDTH), 0
    for text in batch.texts.values():
        for layer in (2, 3):
            rows = zip(text.layers[layer], text.attention_mask, strict=True)
            pooled = torch.stack([tokens[real.bool()].mean(dim=0) for tokens, real in rows])
            total = total + 0.5 * (naive_variation(pooled, dims) + naive_uniformity(pooled, dims, scale)).sum()
    return total / (2 * len(dims) * len(batch.texts))


@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_sir_equals_its_equations(scale):
    objective, batch = SIR(GRID, scale=scale), make_batch()
    assert_same(objective, batch, naive_sir(batch, scale))


def test_sir_without_one_of_its_terms():
    batch, both = make_batch(), SIR(GRID)
    variation, uniformity = SIR(GRID, uniformity_weight=0.0), SIR(GRID, variation_weight=0.0)
    assert set(variation(batch)) | set(uniformity(batch)) == set(both(batch))
    halves = variation.total(variation(batch)) + uniformity.total(uniformity(batch))
    torch.testing.assert_close(halves, both.total(both(batch)))
