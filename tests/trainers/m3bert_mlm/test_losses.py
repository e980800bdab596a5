"""The nested masked-LM loss against a naive reference written here, in value and gradient."""

import pytest
import torch
from torch import nn

from m3bert.trainers.m3bert_mlm import losses as masked_lm
from m3bert.trainers.m3bert_mlm.losses import nested_cross_entropy
from tests.conftest import refused


@pytest.fixture(autouse=True, params=["on a CPU", "on a GPU"])
def kind(request, monkeypatch):
    """What runs on a GPU, here without the compiler."""
    if request.param == "on a GPU":
        monkeypatch.setattr(masked_lm, "is_compiled", lambda states: True)
        monkeypatch.setattr(masked_lm, "compiled", lambda function: function)
    return request.param


def naive_nested(states, weight, bias, targets, *, dims):
    """A product and a cross-entropy for every prefix."""
    columns = []
    for dim in dims:
        logits = states[:, :dim] @ weight[:, :dim].T
        columns.append(
            nn.functional.cross_entropy(logits if bias is None else logits + bias, targets, reduction="none")
        )
    return torch.stack(columns, dim=1)


def random_head(rows, vocab, width, dtype=torch.float64, bias=True):
    states = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    offset = torch.randn(vocab, dtype=dtype, requires_grad=True) if bias else None
    return states, weight, offset, torch.randint(vocab, (rows,))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("block_size", [None, 1, 7, 31, 1000])
@pytest.mark.parametrize(
    ("rows", "vocab", "width", "dims"),
    [
        (5, 31, 13, (1, 4, 13)), (3, 31, 13, (2, 5)), (1, 2, 1, (1,)), (8, 47, 16, (16,)), (9, 10, 4, (1, 2, 3, 4)),
        (9, 10, 4, (1, 3)),
    ],
)  # fmt: skip
def test_nested_cross_entropy_equals_the_naive_loop(rows, vocab, width, dims, block_size, bias):
    states, weight, offset, targets = random_head(rows, vocab, width, bias=bias)
    inputs = [tensor for tensor in (states, weight, offset) if tensor is not None]
    losses = nested_cross_entropy(states, weight, offset, targets, dims=dims, block_size=block_size)
    expected = naive_nested(states, weight, offset, targets, dims=dims)
    torch.testing.assert_close(losses, expected, atol=1e-12, rtol=1e-12)
    upstream = torch.randn_like(expected)  # of both signs, and different for every row and dim
    upstream[0, -1] = 0
    for actual, wanted in zip(
        torch.autograd.grad(losses, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(actual, wanted, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_of_words_that_are_switched_off(dtype):
    states, weight, offset, targets = random_head(6, 31, 12, dtype=dtype)
    offset.data[7:21] = -torch.inf
    targets = targets % 7
    losses = nested_cross_entropy(states, weight, offset, targets, dims=(3, 12), block_size=7)
    expected = naive_nested(states, weight, offset, targets, dims=(3, 12))
    torch.testing.assert_close(losses, expected)
    found, wanted = (torch.autograd.grad(its.sum(), (states, weight)) for its in (losses, expected))
    torch.testing.assert_close(found, wanted)


def test_nested_cross_entropy_in_float32_with_large_scores():
    states, weight, offset, targets = random_head(6, 301, 24, dtype=torch.float32)
    losses = nested_cross_entropy(states * 30, weight, offset, targets, dims=(3, 24), block_size=50)
    expected = naive_nested(states.double() * 30, weight.double(), offset.double(), targets, dims=(3, 24))
    assert torch.isfinite(losses).all()
    torch.testing.assert_close(losses.double(), expected, atol=1e-3, rtol=1e-5)


def test_nested_cross_entropy_of_no_rows_has_zero_gradients():
    states, weight, offset, targets = random_head(0, 11, 6)
    losses = nested_cross_entropy(states, weight, offset, targets, dims=(2, 6))
    assert losses.shape == (0, 2)
    for gradient in torch.autograd.grad(losses.sum(), (states, weight, offset)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_nested_cross_entropy_can_be_differentiated_twice_in_a_row():
    states, weight, offset, targets = random_head(5, 31, 6)
    losses = nested_cross_entropy(states, weight, offset, targets, dims=(2, 6), block_size=4)
    inputs = (states, weight, offset)
    first = [gradient.clone() for gradient in torch.autograd.grad(losses.sum(), inputs, retain_graph=True)]
    for one, other in zip(first, torch.autograd.grad(losses.sum(), inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_nested_cross_entropy_takes_no_memory_for_gradients_that_cannot_come(monkeypatch, kind):
    """The gradient of `weight` is the largest tensor of all: evaluation must not make room for it."""
    states, weight, offset, targets = random_head(5, 31, 6)
    asked = []
    monkeypatch.setattr(torch, "empty_like", lambda tensor: asked.append(tensor) or torch.zeros_like(tensor))
    with torch.no_grad():
        nested_cross_entropy(states, weight, offset, targets, dims=(2, 6))
    nested_cross_entropy(states, weight.detach(), offset, targets, dims=(2, 6))
    assert not asked
    nested_cross_entropy(states, weight, offset, targets, dims=(2, 6))
    assert len(asked) == (1 if kind == "on a CPU" else 0)


def test_nested_cross_entropy_skips_gradients_that_nobody_wants():
    states, weight, offset, targets = random_head(4, 11, 6)
    frozen = weight.detach()
    (gradient,) = torch.autograd.grad(nested_cross_entropy(states, frozen, None, targets, dims=(2, 6)).sum(), states)
    (expected,) = torch.autograd.grad(naive_nested(states, frozen, None, targets, dims=(2, 6)).sum(), states)
    torch.testing.assert_close(gradient, expected)


def test_nested_cross_entropy_under_autocast_is_as_near_as_the_naive_one():
    """Rounding is luck: what is compared is the mean error over draws, of the losses and of each gradient."""
    errors = {nested_cross_entropy: torch.zeros(4), naive_nested: torch.zeros(4)}
    for _ in range(8):
        states, weight, offset, targets = random_head(64, 203, 64, dtype=torch.float32)
        exact = naive_nested(states, weight, offset, targets, dims=(8, 64))
        exact_gradients = torch.autograd.grad(exact.sum(), (states, weight, offset))
        for function in errors:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = function(states, weight, offset, targets, dims=(8, 64))
            gradients = torch.autograd.grad(losses.sum(), (states, weight, offset))
            pairs = [(losses, exact), *zip(gradients, exact_gradients, strict=True)]
            errors[function] += torch.stack([(a.float() - b).norm() / b.norm() for a, b in pairs]).detach()
    assert (errors[nested_cross_entropy] <= 1.15 * errors[naive_nested]).all(), errors


@pytest.mark.parametrize("dims", [(), (0, 4), (4, 2), (2, 2), (2, 14)])
def test_nested_cross_entropy_refuses_bad_dims(dims):
    states, weight, offset, targets = random_head(2, 5, 13)
    refused(r"must be ascending and within 1\.\.13", nested_cross_entropy, states, weight, offset, targets, dims=dims)
