"""SIR as its paper says."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.trainers.core.parts.token_texts import DIMS, GRID, WIDTH, assert_same, make_batch
from trainers import SIR, NestedBatch


def naive_sir(batch: NestedBatch, scale: float) -> torch.Tensor:
    total = 0
    for text in batch.texts.values():
        for layer in (2, 3):
            pooled = torch.stack(
                [t[r.bool()].mean(dim=0) for t, r in zip(text.layers[layer], text.attention_mask, strict=True)]
            )
            for dim in (*DIMS, WIDTH):
                short = pooled[:, :dim]
                variances = (short - short.mean(dim=0)).square().mean(dim=0)
                variation = (variances - variances.mean()).square().mean().sqrt() / (variances.mean() + 1e-8)
                unit = functional.normalize(short, dim=1)
                kernels = [
                    torch.exp(-2 * scale * (1 - unit[i] @ unit[j]))
                    for i in range(len(unit))
                    for j in range(len(unit))
                    if i != j
                ]
                total = total + 0.5 * (variation + torch.log(torch.stack(kernels).mean() + 1e-8))
    return total / (2 * 3 * len(batch.texts))


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
