"""MIC's losses where dims do not vary, of padding and in half precision; their values are in test_objectives.py."""

import pytest
import torch

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


WIDTH, DIMS, LENGTHS = 13, (1, 5, 12), (7, 4, 3, 1, 0)
PADDINGS = ("right", "left", "gaps")


def mask_of(padding):
    """Real tokens of texts of LENGTHS."""
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    if padding == "gaps":
        mask = mask[:, torch.tensor([3, 0, 5, 1, 6, 2, 4])]
    return (mask.flip(1) if padding == "left" else mask).long()


def random_states(dtype=torch.float64):
    return 3 + 2 * torch.randn(len(LENGTHS), max(LENGTHS), WIDTH, dtype=dtype)


def penalties(states, mask, threshold=0.1):
    """The functions as they are used together."""
    products = prefix_residual_products(standardized(states, mask)[0], mask, DIMS)
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
        losses = torch.cat([penalties(inputs, mask), variance_floor(deviations.mean(dim=0), DIMS)])
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
    states, mask = torch.randn(2, 3, WIDTH), torch.ones(2, 3)
    for dims in ((), (0, 2), (2, 1), (2, 2), (2, 13), (14,)):
        refused(r"must be ascending and within 1\.\.12", prefix_residual_products, states, mask, dims)
        refused(r"must be ascending and within 1\.\.12", variance_floor, torch.ones(WIDTH), dims)
    for dims in ((), (0, 2), (2, 1), (2, 2), (2, 14)):
        for function in (variance_variation, nested_uniformity):
            refused(r"must be ascending and within 1\.\.13", function, states[:, 0], dims)
    for rows in (0, 1):
        refused(f"a batch of {rows} has none", nested_uniformity, states[:rows, 0], DIMS)


def token_losses(states):
    outputs, deviations = standardized(states, mask_of("right"))
    losses = torch.cat([penalties(states, mask_of("right")), variance_floor(deviations.mean(dim=0), DIMS)])
    return torch.cat([losses, outputs.flatten(), deviations.flatten()])


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (token_losses, random_states),
        (lambda vectors: variance_variation(vectors, DIMS), lambda: torch.randn(5, WIDTH)),
        (lambda vectors: nested_uniformity(vectors, DIMS), lambda: torch.randn(5, WIDTH)),
    ],
    ids=["tokens", "variation", "uniformity"],
)
def test_half_precision_and_autocast_are_computed_in_float32(function, inputs):
    assert_computed_in_float32(function, [inputs()])
