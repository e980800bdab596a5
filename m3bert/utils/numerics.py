"""Shared tools, most of them of the losses: precision, checks of dims, blocks of rows, and segments of dims."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn


def check_dims(dims: Sequence[int], width: int) -> tuple[int, ...]:
    """
    Check prefix dims and return them as a tuple.

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden size.
    """
    dims = tuple(dims)
    if not dims or sorted(set(dims)) != list(dims) or dims[0] < 1 or dims[-1] > width:
        raise ValueError(f"dims={list(dims)} must be ascending and within 1..{width}.")
    return dims


def precise(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 or wider: long sums and small differences are inaccurate in half precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def no_autocast(tensor: torch.Tensor) -> torch.autocast:
    """A context that disables autocast on the tensor's device, so that products keep the precision of their inputs."""
    return torch.autocast(tensor.device.type, enabled=False)


def cosine_matrix(vectors: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Cosines of all vectors and candidates, `(vectors, candidates)`, in float32 or wider."""
    vectors, candidates = (nn.functional.normalize(precise(side), dim=1) for side in (vectors, candidates))
    with no_autocast(vectors):
        return vectors @ candidates.T


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """8 bits per number, with one scale per row: int8 `(rows, width)` within -127..127, and float32 `(rows,)`. Their
    product differs from a row by at most half its scale, 1 / 254 of its largest number."""
    scales = rows.abs().amax(dim=1).float() / 127
    return (rows / torch.where(scales > 0, scales, 1.0)[:, None]).round().to(torch.int8), scales


def blocks(length: int, size: int) -> list[slice]:
    """Slices of at most `size` that cover `0..length`."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def segments(vectors: torch.Tensor, dims: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """The numbers of vectors between consecutive dims: each prefix is the previous one plus its segment."""
    widths = [stop - start for start, stop in itertools.pairwise((0, *dims))]
    return vectors[..., : dims[-1]].split(widths, dim=-1)
