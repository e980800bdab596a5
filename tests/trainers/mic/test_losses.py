"""MIC's losses against naive references: a text, a token and a pair of dims at a time."""

from __future__ import annotations

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
from tests.trainers.naive import (
    TOLERANCES,
    assert_computed_in_float32,
    assert_equal_with_gradients,
    naive_correlation,
    naive_penalty,
    naive_standardized,
    naive_uniformity,
    naive_variation,
)


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


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_standardized_equals_the_naive_loop(dtype, padding):
    mask = mask_of(padding)

    def flat(results):
        return torch.cat([result.flatten() for result in results])

    (gradient,) = assert_equal_with_gradients(
        lambda s: flat(standardized(s, mask)), lambda s: flat(naive_standardized(s, mask)), [random_states()], dtype
    )
    assert (gradient[~mask.bool()] == 0).all()
    assert (gradient[mask.sum(dim=1) < 2] == 0).all()


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


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("dims", [DIMS, (4,), (2, 3, 7)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_prefix_residual_products_are_the_new_rows_of_the_correlations(dtype, dims, padding):
    mask = mask_of(padding)
    shapes = [rows.shape for rows in prefix_residual_products(random_states(), mask, dims)]
    assert shapes == [(dim - before, WIDTH - dim) for before, dim in zip((0, *dims), dims, strict=False)]

    def naive(states):
        blocks = [
            len(states) * naive_correlation(states, mask, dim)[before:]
            for before, dim in zip((0, *dims), dims, strict=False)
        ]
        return torch.cat([block.flatten() for block in blocks])

    def ours(states):
        return torch.cat([block.flatten() for block in prefix_residual_products(states, mask, dims)])

    assert_equal_with_gradients(ours, naive, [torch.randn(*mask.shape, WIDTH) * mask[:, :, None]], dtype)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_correlation_penalty_equals_the_double_sum(dtype, threshold, padding):
    mask = mask_of(padding)

    def naive(states):
        outputs, _ = naive_standardized(states, mask)
        return torch.stack([naive_penalty(naive_correlation(outputs, mask, dim), threshold) for dim in DIMS])

    (gradient,) = assert_equal_with_gradients(
        lambda s: penalties(s, mask, threshold=threshold), naive, [random_states()], dtype
    )
    assert (gradient[~mask.bool()] == 0).all()
    assert (gradient[mask.sum(dim=1) < 2] == 0).all()


@pytest.mark.parametrize("dims", [DIMS, (4,)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_variance_floor_equals_the_formula(dtype, dims):
    def naive(deviations):
        numbers = list(deviations)
        return torch.stack(
            [
                torch.relu(1 - sum(numbers[:dim]) / dim) + 0.5 * torch.relu(1 - sum(numbers[dim:]) / (WIDTH - dim))
                for dim in dims
            ]
        )

    for deviations in (torch.rand(WIDTH), torch.rand(WIDTH) + torch.arange(13) / 13):
        assert_equal_with_gradients(lambda x: variance_floor(x, dims), naive, [deviations], dtype)


@pytest.mark.parametrize(("batch", "dims"), [(3, DIMS), (5, (2, 13)), (4, (7,))])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_variance_variation_equals_the_formula(dtype, batch, dims):
    vectors = torch.randn(batch, WIDTH) + torch.randn(WIDTH)
    (gradient,) = assert_equal_with_gradients(
        lambda x: variance_variation(x, dims), lambda x: naive_variation(x, dims), [vectors], dtype
    )
    assert (gradient[:, dims[-1] :] == 0).all()


@pytest.mark.parametrize("row", [(0.0, 0.0, 0.0), (0.5, 2.0, -3.0), (0.1, 3.7, -0.3), None])
def test_dims_that_vary_alike_or_not_at_all_have_no_variation_and_a_finite_gradient(row):
    signs = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
    vectors = (signs if row is None else torch.tensor([row]).repeat(7, 1)).requires_grad_()
    losses = variance_variation(vectors, (1, 2, 3))
    torch.testing.assert_close(losses, torch.zeros(3), atol=1e-4, rtol=0)
    assert torch.isfinite(torch.autograd.grad(losses.sum(), vectors)[0]).all()


@pytest.mark.parametrize("scale", [0.5, 2.0])
@pytest.mark.parametrize(("batch", "dims"), [(3, DIMS), (5, (2, 13)), (2, (7,))])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_nested_uniformity_equals_the_formula(dtype, batch, dims, scale):
    (gradient,) = assert_equal_with_gradients(
        lambda x: nested_uniformity(x, dims, scale=scale),
        lambda x: naive_uniformity(x, dims, scale),
        [3 * torch.randn(batch, WIDTH)],
        dtype,
    )
    assert (gradient[:, dims[-1] :] == 0).all()


@pytest.mark.parametrize("zeros", [1, 2, 4])
def test_vectors_of_zeros_are_orthogonal_to_all_and_finite(zeros):
    vectors = torch.cat([torch.zeros(zeros, 4), torch.eye(4)[zeros:]]).requires_grad_()
    losses = nested_uniformity(vectors, (1, 4))
    torch.testing.assert_close(losses, torch.full((2,), -4.0))
    assert torch.isfinite(torch.autograd.grad(losses.sum(), vectors)[0]).all()


def test_bad_input_is_refused():
    states, mask = torch.randn(2, 3, WIDTH), torch.ones(2, 3)
    for dims in ((), (0, 2), (2, 1), (2, 2), (2, 13), (14,)):
        with pytest.raises(ValueError, match=r"must be ascending and within 1\.\.12"):
            prefix_residual_products(states, mask, dims)
        with pytest.raises(ValueError, match=r"must be ascending and within 1\.\.12"):
            variance_floor(torch.ones(WIDTH), dims)
    for dims in ((), (0, 2), (2, 1), (2, 2), (2, 14)):
        for function in (variance_variation, nested_uniformity):
            with pytest.raises(ValueError, match=r"must be ascending and within 1\.\.13"):
                function(states[:, 0], dims)
    for rows in (0, 1):
        with pytest.raises(ValueError, match=f"a batch of {rows} has none"):
            nested_uniformity(states[:rows, 0], DIMS)


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
