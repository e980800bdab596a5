"""SCR and SIR as their paper says, a text, a token and a pair of dims at a time, and their losses at the edges."""

from collections.abc import Sequence

import pytest
import torch

from m3bert.trainers import SCR, SIR, Grid, NestedBatch
from m3bert.trainers.mic.losses import (
    correlation_penalty,
    nested_uniformity,
    prefix_residual_products,
    standardized,
    variance_floor,
    variance_variation,
)
from tests.conftest import refused
from tests.trainers.naive import assert_computed_in_float32
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


ODD_WIDTH, ODD_DIMS, LENGTHS = 13, (1, 5, 12), (7, 4, 3, 1, 0)


def mask_of(padding):
    """Real tokens of texts of LENGTHS."""
    return PADDINGS[padding](torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()


def random_states(dtype=torch.float64):
    return 3 + 2 * torch.randn(len(LENGTHS), max(LENGTHS), ODD_WIDTH, dtype=dtype)


def penalties(states, mask, threshold=0.1):
    """The functions as they are used together."""
    products = prefix_residual_products(standardized(states, mask)[0], mask, ODD_DIMS)
    return correlation_penalty([rows / len(states) for rows in products], threshold=threshold)


@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_a_dim_that_does_not_vary_is_0_and_has_no_gradient(length):
    """Whatever the number, and whatever other texts want of it."""
    states = torch.randn(3, length, 64)
    states[:, :, 2:] = torch.randn(1, 1, 62)
    states.requires_grad_()
    outputs, deviations = results = standardized(states, torch.ones(states.shape[:2]))
    assert not outputs[:, :, 2:].any() and not deviations[:, 2:].any()
    assert (deviations[:, :2] > 0).all() == (length > 1)
    gradient = torch.autograd.grad(results, states, [torch.randn_like(result) for result in results])[0]
    assert torch.isfinite(gradient).all() and not gradient[:, :, 2:].any()


@pytest.mark.parametrize("length", [1, 7])
def test_one_text_in_which_a_dim_does_not_vary_does_not_take_all_of_the_gradient(length):
    """The correlation of the other texts is above the threshold, so that the loss has a slope at its 0."""
    states = random_states()
    states[:, :, 12] = -2 * states[:, :, 0]
    states[1, :, 12] = 0.5
    mask = torch.ones(states.shape[:2])
    mask[1, length:] = 0
    states.requires_grad_()
    gradient = torch.autograd.grad(penalties(states, mask).sum(), states)[0]
    assert gradient[0].abs().max() > 0
    assert gradient[1].abs().max() < 100 * gradient[0].abs().max()


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("content", [0.0, -1e10, 1e30])
def test_padding_counts_for_nothing(padding, content):
    mask = mask_of(padding)
    found = []
    states = random_states(torch.float32)
    for inputs in (states, states.masked_fill(~mask.bool()[:, :, None], content)):
        inputs.requires_grad_()
        outputs, deviations = standardized(inputs, mask)
        losses = torch.cat([penalties(inputs, mask), variance_floor(deviations.mean(dim=0), ODD_DIMS)])
        upstream = torch.arange(1.0, 1 + len(losses))
        found.append((outputs, losses, *torch.autograd.grad(losses, inputs, upstream)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert (found[1][2][~mask.bool()] == 0).all()
    assert found[1][2].abs().sum() > 0


@pytest.mark.parametrize("row", [(0.0, 0.0, 0.0), (0.5, 2.0, -3.0), (0.1, 3.7, -0.3), None])
def test_dims_that_vary_alike_or_not_at_all_have_no_variation_and_a_finite_gradient(row):
    signs = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    vectors = (signs if row is None else torch.tensor([row]).repeat(7, 1)).requires_grad_()
    losses = variance_variation(vectors, (1, 2, 3))
    torch.testing.assert_close(losses, torch.zeros(3), atol=1e-4, rtol=0)
    assert torch.isfinite(torch.autograd.grad(losses.sum(), vectors)[0]).all()


@pytest.mark.parametrize("zeros", [1, 2, 4])
def test_vectors_of_zeros_are_orthogonal_to_all_and_finite(zeros):
    vectors = torch.cat([torch.zeros(zeros, 4), torch.eye(4)[zeros:]]).requires_grad_()
    losses = nested_uniformity(vectors, (1, 4))
    torch.testing.assert_close(losses, torch.full((2,), -4.0))
    assert torch.isfinite(torch.autograd.grad(losses.sum(), vectors)[0]).all()


def test_bad_input_is_refused():
    states, mask = torch.randn(2, 3, ODD_WIDTH), torch.ones(2, 3)
    for dims in ((), (0, 2), (2, 1), (2, 2), (2, 13), (14,)):
        refused(r"must be ascending and within 1\.\.12", prefix_residual_products, states, mask, dims)
        refused(r"must be ascending and within 1\.\.12", variance_floor, torch.ones(ODD_WIDTH), dims)
    for dims in ((), (0, 2), (2, 1), (2, 2), (2, 14)):
        for function in (variance_variation, nested_uniformity):
            refused(r"must be ascending and within 1\.\.13", function, states[:, 0], dims)
    for rows in (0, 1):
        refused(f"a batch of {rows} has none", nested_uniformity, states[:rows, 0], ODD_DIMS)


def token_losses(states):
    outputs, deviations = standardized(states, mask_of("right"))
    losses = torch.cat([penalties(states, mask_of("right")), variance_floor(deviations.mean(dim=0), ODD_DIMS)])
    return torch.cat([losses, outputs.flatten(), deviations.flatten()])


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (token_losses, random_states),
        (lambda vectors: variance_variation(vectors, ODD_DIMS), lambda: torch.randn(5, ODD_WIDTH)),
        (lambda vectors: nested_uniformity(vectors, ODD_DIMS), lambda: torch.randn(5, ODD_WIDTH)),
    ],
    ids=["tokens", "variation", "uniformity"],
)
def test_half_precision_and_autocast_are_computed_in_float32(function, inputs):
    assert_computed_in_float32(function, [inputs()])
