"""Naive references of losses, and how a loss is compared with one and with itself in half precision."""

from collections.abc import Callable, Sequence

import torch


TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}


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
