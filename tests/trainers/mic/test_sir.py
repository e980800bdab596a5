"""SIR as its paper says."""

from __future__ import annotations

import pytest
import torch

from m3bert.trainers import SIR, NestedBatch
from tests.trainers.naive import naive_uniformity, naive_variation
from tests.trainers.token_texts import DIMS, GRID, WIDTH, assert_same, make_batch


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
