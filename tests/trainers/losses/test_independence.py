"""Kernels and HSIC against their definitions, and what HSIC says of samples that are dependent or not."""

from __future__ import annotations

import pytest
import torch

from trainers.losses import gram_matrix, hsic
from trainers.losses.independence import KERNELS


def naive_gram(vectors, kernel, gamma):
    rows = []
    for x in vectors:
        row = []
        for y in vectors:
            squared = (x - y).square().sum()
            if kernel == "rbf":
                row.append(torch.exp(-gamma * squared))
            elif kernel == "imq":
                row.append(1 / torch.sqrt(squared + gamma))
            else:
                row.append(torch.dot(x / x.norm(), y / y.norm()))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def naive_hsic(first, second):
    n = len(first)
    centring = torch.eye(n, dtype=first.dtype) - torch.ones(n, n, dtype=first.dtype) / n
    return torch.trace(first @ centring @ second @ centring) / n**2


@pytest.mark.parametrize("gamma", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_kernels_and_their_gradients_are_those_of_the_definition(rows, kernel, gamma):
    vectors = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    ours, expected = gram_matrix(vectors, kernel, gamma=gamma), naive_gram(vectors, kernel, gamma)
    torch.testing.assert_close(ours, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(gram, vectors, upstream)[0] for gram in (ours, expected)), atol=1e-10, rtol=1e-8
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_hsic_and_its_gradients_are_those_of_the_trace(kernel):
    x = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    s = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    ours = hsic(gram_matrix(x, kernel), gram_matrix(s, kernel))
    expected = naive_hsic(naive_gram(x, kernel, 0.5), naive_gram(s, kernel, 0.5))
    torch.testing.assert_close(ours, expected)
    for actual, value in zip(torch.autograd.grad(ours, (x, s)), torch.autograd.grad(expected, (x, s)), strict=True):
        torch.testing.assert_close(actual, value, atol=1e-12, rtol=1e-8)


def test_hsic_as_the_released_code_writes_it():
    """tr(KL)/n^2 + mean(K) mean(L) - 2 mean(KL)/n, which that code then scales by n^2/(n-1)^2."""
    first, second = (gram_matrix(torch.randn(8, 3, dtype=torch.float64)) for _ in range(2))
    product = first @ second
    expected = product.trace() / 64 + first.mean() * second.mean() - 2 * product.mean() / 8
    torch.testing.assert_close(hsic(first, second), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_hsic_of_independent_samples_tends_to_zero_and_of_identical_ones_does_not(kernel):
    def of(rows, dependent):
        x = torch.randn(rows, 3, dtype=torch.float64)
        other = x if dependent else torch.randn(rows, 3, dtype=torch.float64)
        return hsic(gram_matrix(x, kernel), gram_matrix(other, kernel)).item()

    independent = {rows: sum(of(rows, False) for _ in range(10)) / 10 for rows in (30, 300, 1500)}
    assert independent[30] > 3 * independent[300] > 9 * independent[1500] / 2 > 0
    identical = {rows: of(rows, True) for rows in (30, 300, 1500)}
    assert min(identical.values()) > 20 * independent[1500]
    assert identical[1500] == pytest.approx(identical[300], rel=0.3)


def test_hsic_sees_what_a_correlation_does_not():
    x = torch.linspace(-2, 2, 401, dtype=torch.float64)[:, None]
    assert abs(torch.corrcoef(torch.cat([x, x.square()], dim=1).T)[0, 1]) < 1e-12
    independent = x.square()[torch.randperm(401)]
    dependent, other = (hsic(gram_matrix(x), gram_matrix(y)) for y in (x.square(), independent))
    assert dependent > 5 * other


def test_identical_texts_and_a_batch_of_one_have_a_gradient_without_nan():
    for rows in (1, 3):
        for kernel in KERNELS:
            x = torch.ones(rows, 4, requires_grad=True)
            value = hsic(gram_matrix(x, kernel), gram_matrix(x, kernel))
            value.backward()
            assert value.item() == pytest.approx(0, abs=1e-6)
            assert torch.isfinite(x.grad).all()


def test_half_precision_and_autocast_are_summed_in_single():
    x = torch.randn(32, 64).bfloat16()
    expected = gram_matrix(x.float())
    torch.testing.assert_close(gram_matrix(x), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(gram_matrix(x.float()), expected)


def test_an_unknown_kernel():
    with pytest.raises(ValueError, match="kernel='cubic' is unknown; legal values: rbf, linear, imq"):
        gram_matrix(torch.ones(2, 2), "cubic")
