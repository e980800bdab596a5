"""Products into parts of larger matrices: the same numbers from both libraries."""

from __future__ import annotations

import pytest
import torch

from trainers.losses import _products, nested_cross_entropy
from trainers.losses._products import SMALLEST_SIDE, add_product_, write_product_


@pytest.fixture(params=[False, True], ids=["matmul", "oneDNN"])
def by_onednn(request, monkeypatch):
    """Each library in turn, whatever the processor; the number of products that oneDNN computes."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(_products, "onednn_is_faster", lambda: request.param)
    calls = []
    product = _products._onednn_product
    monkeypatch.setattr(_products, "_onednn_product", lambda *args: calls.append(None) or product(*args))
    return lambda: (len(calls) > 0) == request.param


@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_slices(by_onednn, transposed):
    side = SMALLEST_SIDE + 5
    left, right = torch.randn(side, 2 * side), torch.randn(2 * side, side + 3)
    left = left.T.contiguous().T if transposed else left
    total, out = torch.randn(side, side + 3), torch.full((side, 2 * side), 7.0)
    expected = total.double() + left.double() @ right.double()
    add_product_(total, left, right)
    torch.testing.assert_close(total.double(), expected, atol=1e-4, rtol=1e-5)
    part = out[:, 3 : side + 6]
    write_product_(part, left, right)
    torch.testing.assert_close(part.double(), left.double() @ right.double(), atol=1e-4, rtol=1e-5)
    assert (out[:, :3] == 7).all()
    assert (out[:, side + 6 :] == 7).all()
    assert by_onednn()


def test_only_large_float32_products_go_to_onednn(monkeypatch):
    monkeypatch.setattr(_products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(_products, "_onednn_product", lambda *args: pytest.fail("went to oneDNN"))
    large = torch.randn(SMALLEST_SIDE, SMALLEST_SIDE)
    for left, right in (
        (large[:-1], large),
        (large, large[:, :-1]),
        (large.double(), large.double()),
        (large.bfloat16(), large.bfloat16()),
    ):
        add_product_(torch.zeros(len(left), right.shape[1], dtype=torch.float64), left, right)
        write_product_(torch.zeros(len(left), right.shape[1], dtype=torch.float64), left, right)


def test_the_nested_head_is_the_double_loop(by_onednn):
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty(700, 300).normal_(std=0.1, generator=generator).requires_grad_()
    bias = torch.randn(700, generator=generator).requires_grad_()
    states = torch.randn(150, 300, generator=generator).requires_grad_()
    targets, dims = torch.randint(700, (150,), generator=generator), (20, 160, 300)
    ours = nested_cross_entropy(states, weight, bias, targets, dims=dims, block_size=256)
    naive = torch.stack(
        [
            torch.nn.functional.cross_entropy(states[:, :dim] @ weight[:, :dim].T + bias, targets, reduction="none")
            for dim in dims
        ],
        dim=1,
    )
    torch.testing.assert_close(ours, naive, atol=1e-4, rtol=1e-5)
    upstream = torch.randn(ours.shape, generator=generator)
    for one, other in zip(
        *(torch.autograd.grad((losses * upstream).sum(), (states, weight, bias)) for losses in (ours, naive)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-4 * other.abs().max().item(), rtol=1e-4)
    assert by_onednn()
