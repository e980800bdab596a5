"""Naive references of losses, and how a loss is compared with one and with itself in half precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}
EPSILON = 1e-8


def divergence(first_scores: torch.Tensor, second_scores: torch.Tensor) -> torch.Tensor:
    """KL(softmax(first) || softmax(second)) of two vectors of scores, written out."""
    p, q = (scores.exp() / scores.exp().sum() for scores in (first_scores, second_scores))
    return (p * (p / q).log()).sum()


def assert_equal_with_gradients(
    function: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """A function of inputs in `dtype` against the reference in float64 of the same numbers, with upstream gradients of
    both signs. Gradients are compared by the largest entry. Returns those of the function."""
    ours = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    actual, expected = function(*ours), reference(*theirs)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    upstream = torch.randn_like(actual)  # different for every entry
    gradients = torch.autograd.grad(actual, ours, upstream)
    wanted = torch.autograd.grad(expected, theirs, upstream.double())
    largest = max(float(gradient.abs().amax()) for gradient in wanted)
    for own, other in zip(gradients, wanted, strict=True):
        assert other.abs().sum() > 0
        torch.testing.assert_close(own.double(), other, atol=TOLERANCES[dtype] * largest, rtol=0)
    return list(gradients)


def assert_computed_in_float32(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Of inputs in bfloat16, and of float32 under autocast, a function has the values and gradients of float32."""
    halves = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().float().requires_grad_() for tensor in halves]
    losses, expected = function(*halves), function(*exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = function(*exact)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, expected) and torch.equal(cast, expected)
    upstream = torch.randn_like(expected)
    found, wanted, after_cast = (
        torch.autograd.grad(value, its, upstream, allow_unused=True)
        for value, its in ((losses, halves), (expected, exact), (cast, exact))
    )
    assert wanted[0].abs().sum() > 0
    for own, other, again in zip(found, wanted, after_cast, strict=True):
        if other is not None:
            assert own.dtype == torch.bfloat16 and torch.equal(again, other)
            torch.testing.assert_close(own.float(), other, atol=2**-7 * float(other.abs().amax()), rtol=2**-7)


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
