"""SCR and SIR as their paper says, a text, a token and a pair of dims at a time."""

from collections.abc import Sequence

import pytest
import torch

from m3bert.trainers import SCR, SIR, Grid, NestedBatch
from tests.trainers.token_texts import GRID, MASKS, WIDTH, assert_same, make_batch


EPSILON = 1e-8
PADDINGS = {
    "right": lambda mask: mask,
    "left": lambda mask: mask.flip(1),
    "gaps": lambda mask: mask[:, torch.arange(mask.shape[1]) * 3 % mask.shape[1]],
}


def naive_standardized(states: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Standardised states and deviations, a column of real tokens at a time; one token does not vary."""
    texts, deviations = [], []
    for text, real in zip(states, mask.bool(), strict=True):
        columns, own = [], []
        for column in text.T:
            kept = column[real]
            if len(kept) < 2:
                columns.append(0 * column)
                own.append(column.new_zeros(()))
                continue
            mean = kept.sum() / len(kept)
            deviation = ((kept - mean).square().sum() / len(kept)).sqrt()
            columns.append(torch.where(real, (column - mean) / (deviation + EPSILON), 0.0))
            own.append(deviation)
        texts.append(torch.stack(columns, dim=1))
        deviations.append(torch.stack(own))
    return torch.stack(texts), torch.stack(deviations)


def naive_correlation(standardized_states: torch.Tensor, mask: torch.Tensor, dim: int) -> torch.Tensor:
    """C of section 2.1, `(dim, width - dim)`."""
    total = 0
    for text, real in zip(standardized_states, mask.tolist(), strict=True):
        products = sum(m * torch.outer(token[:dim], token[dim:]) for m, token in zip(real, text, strict=True))
        total = total + products / max(1, sum(real))
    return total / len(standardized_states)


def naive_penalty(correlation: torch.Tensor, threshold: float) -> torch.Tensor:
    """What exceeds the threshold, a pair of dims at a time."""
    dim, behind = correlation.shape
    total = 0
    for u in range(dim):
        for v in range(behind):
            total = total + torch.relu(correlation[u, v].abs() - threshold) ** 2
    return total / (dim * behind)


def naive_variation(vectors: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The coefficient of variation of the variances of each prefix."""
    losses = []
    for dim in dims:
        variances = [((column - column.sum() / len(column)) ** 2).sum() / len(column) for column in vectors[:, :dim].T]
        mean = sum(variances) / dim
        square = sum((variance - mean) ** 2 for variance in variances) / dim
        losses.append(square.sqrt() / (mean + EPSILON) if dim > 1 else 0 * mean)
    return torch.stack(losses)


def naive_uniformity(vectors: torch.Tensor, dims: Sequence[int], scale: float) -> torch.Tensor:
    """Of each prefix, a pair of vectors at a time."""
    losses = []
    for dim in dims:
        unit = [vector[:dim] / vector[:dim].norm() for vector in vectors]
        kernel = [(-2 * scale * (1 - a @ b)).exp() for i, a in enumerate(unit) for j, b in enumerate(unit) if i != j]
        losses.append((sum(kernel) / (len(unit) * (len(unit) - 1)) + EPSILON).log())
    return torch.stack(losses)


def naive_scr(batch: NestedBatch, dims: Sequence[int], threshold: float, weight: float) -> torch.Tensor:
    """Section 2.1 and 2.3 of MIC, a text and a pair of dims at a time."""
    total = 0
    for layer in (2, 3):
        columns = [naive_standardized(text.layers[layer], text.attention_mask) for text in batch.texts.values()]
        masks, deviation = [text.attention_mask for text in batch.texts.values()], [own for _, own in columns]
        deviation = torch.cat(deviation).mean(dim=0)
        for dim in dims:
            matrices = [naive_correlation(states, mask, dim) for (states, _), mask in zip(columns, masks, strict=True)]
            floors = [(1 - part.mean()).clamp(min=0) for part in (deviation[:dim], deviation[dim:])]
            total = total + naive_penalty(sum(matrices) / len(matrices), threshold)
            total = total + weight * (floors[0] + 0.5 * floors[1])
    return total / (2 * (len(dims) + 1))


@pytest.mark.parametrize("padding", list(PADDINGS))
@pytest.mark.parametrize(
    ("dims", "threshold", "weight"),
    [((2, 5), 0.1, 0.1), ((1, 5, 11), 0.0, 1.0), ((4,), 0.4, 0.0), ((2, 3, 7), 0.3, 0.5)],
)
def test_scr_equals_its_equations(dims, threshold, weight, padding):
    objective = SCR(Grid.product([2, 3], [*dims, WIDTH]), threshold=threshold, variance_weight=weight)
    batch = make_batch({name: PADDINGS[padding](mask) for name, mask in MASKS.items()})
    for text in batch.texts.values():  # of means apart from 0, and of deviations on both sides of 1
        text.layers.update({layer: 3 + 1.1 * state for layer, state in text.layers.items()})
    found = assert_same(objective, batch, naive_scr(batch, dims, threshold, weight))
    assert not found["view 1 2"][2].any(), "one token has no correlation"
    assert not found["view 1 1"].any()


def naive_sir(batch: NestedBatch, dims: Sequence[int], scale: float) -> torch.Tensor:
    total = 0
    for text in batch.texts.values():
        for layer in (2, 3):
            rows = zip(text.layers[layer], text.attention_mask, strict=True)
            pooled = torch.stack([tokens[real.bool()].mean(dim=0) for tokens, real in rows])
            total = total + 0.5 * (naive_variation(pooled, dims) + naive_uniformity(pooled, dims, scale)).sum()
    return total / (2 * len(dims) * len(batch.texts))


@pytest.mark.parametrize(("dims", "scale"), [((2, 5, WIDTH), 2.0), ((1, WIDTH), 0.5), ((2, 3, 7), 1.0)])
def test_sir_equals_its_equations(dims, scale):
    objective, batch = SIR(Grid.product([2, 3], dims), scale=scale), make_batch()
    assert_same(objective, batch, naive_sir(batch, dims, scale))


def test_sir_without_one_of_its_terms():
    batch, both = make_batch(), SIR(GRID)
    variation, uniformity = SIR(GRID, uniformity_weight=0.0), SIR(GRID, variation_weight=0.0)
    assert set(variation(batch)) | set(uniformity(batch)) == set(both(batch))
    halves = variation.total(variation(batch)) + uniformity.total(uniformity(batch))
    torch.testing.assert_close(halves, both.total(both(batch)))
