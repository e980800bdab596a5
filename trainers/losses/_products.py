"""Matrix products that are added to, or written into, parts of larger matrices."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import nn


# Smallest size of every side for which the faster product pays for the copies of its operands and its result.
SMALLEST_SIDE = 128


def add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to `total`, in place. Half-precision operands may have a total in float32."""
    if _by_onednn(left, right):
        total += _onednn_product(left, right)
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def write_product_(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write `left @ right` into `out`, which may have another dtype."""
    if _by_onednn(left, right):
        out.copy_(_onednn_product(left, right))
    elif out.dtype == left.dtype:
        torch.mm(left, right, out=out)  # without a copy
    else:
        out.copy_(left @ right)


def _by_onednn(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether to multiply two matrices with oneDNN rather than with the library behind `@`."""
    return (
        left.dtype == right.dtype == torch.float32
        and left.device.type == "cpu"
        and min(*left.shape, right.shape[1]) >= SMALLEST_SIDE
        and not torch.compiler.is_compiling()
        and onednn_is_faster()
    )


@functools.cache
def onednn_is_faster() -> bool:
    """
    Whether oneDNN multiplies float32 matrices faster than MKL on this processor. MKL, which PyTorch uses for `@`,
    has no AVX-512 for processors of AMD; oneDNN does, and takes half the time there.
    """
    processor = Path("/proc/cpuinfo")  # Linux only; elsewhere, `@` is used
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and processor.exists()
        and "AuthenticAMD" in processor.read_text(encoding="utf-8")
    )


def _onednn_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left @ right` by oneDNN, which PyTorch uses for tensors in its layout."""
    return nn.functional.linear(left.contiguous().to_mkldnn(), right.T.contiguous()).to_dense()
