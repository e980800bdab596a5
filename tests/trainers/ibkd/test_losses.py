"""Kernels and HSIC against their definitions, and what HSIC says of samples that are dependent or not."""

import pytest
import torch

from m3bert.trainers.ibkd.losses import gram_matrix, hsic


KERNELS = ("rbf", "imq", "linear")


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
