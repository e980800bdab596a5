"""Shared tools, most of them of the losses: precision, checks of dims, blocks of rows, segments of dims, and reusable
buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn


def check_dims(dims: Sequence[int], width: int) -> tuple[int, ...]:
    """Prefix dims as a tuple. ValueError if they are not ascending and within 1..hidden size."""
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
    """8 bits per number, with one float32 scale per row: int8 `(rows, width)` within -127..127, and `(rows,)`."""
    scales = rows.abs().amax(dim=1).float() / 127
    return (rows / torch.where(scales > 0, scales, 1.0)[:, None]).round().to(torch.int8), scales


def blocks(length: int, size: int) -> list[slice]:
    """Slices of at most `size` that cover `0..length`."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def segments(dims: tuple[int, ...]) -> list[slice]:
    """The slices between consecutive dims: each prefix is the previous one plus its segment."""
    return [slice(start, stop) for start, stop in itertools.pairwise((0, *dims))]


def summed_from_the_longest(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Gradients of segments from those of prefixes, in place: a segment is in its prefix and all longer ones."""
    for shorter, longer in zip(gradients[-2::-1], gradients[:0:-1], strict=True):
        shorter.add_(longer)
    return gradients


class Buffers:
    """Matrices that all blocks reuse. Allocating new memory for each block would take a fifth of the time."""

    def __init__(self, like: torch.Tensor, count: int, size: int, dtype: torch.dtype) -> None:
        self.flat = like.new_empty((count, size), dtype=dtype)

    def of(self, rows: int, columns: int) -> torch.Tensor:
        """All matrices as views, `(count, rows, columns)`."""
        return self.flat[:, : rows * columns].unflatten(1, (rows, columns))
