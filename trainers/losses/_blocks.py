"""What losses share: blocks of rows, segments of dims, memory that every block uses again, and precision."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def check_dims(dims: Sequence[int], width: int) -> tuple[int, ...]:
    """
    The dims as a tuple.

    Raises:
        ValueError: if they are not ascending and within 1..width.
    """
    dims = tuple(dims)
    if not dims or sorted(set(dims)) != list(dims) or dims[0] < 1 or dims[-1] > width:
        raise ValueError(f"dims={list(dims)} must be ascending and within 1..{width}.")
    return dims


def blocks(length: int, size: int) -> list[slice]:
    """Slices of at most `size` that cover `0..length`."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def segments(dims: tuple[int, ...]) -> list[slice]:
    """The dims that each prefix has beyond the one before it."""
    return [slice(start, stop) for start, stop in itertools.pairwise((0, *dims))]


def precise(tensor: torch.Tensor) -> torch.Tensor:
    """In float32 at least: sums over many numbers, and differences of nearly equal ones, lose digits in half."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def no_autocast(tensor: torch.Tensor) -> torch.autocast:
    """A context in which products on this tensor's device stay in the precision of their inputs."""
    return torch.autocast(tensor.device.type, enabled=False)


class Buffers:
    """Matrices that every block uses again: fresh memory for each costs a fifth of the time."""

    def __init__(self, like: torch.Tensor, count: int, size: int, dtype: torch.dtype) -> None:
        self.flat = like.new_empty((count, size), dtype=dtype)

    def of(self, rows: int, columns: int) -> list[torch.Tensor]:
        """All of them, `(rows, columns)`."""
        return [flat[: rows * columns].view(rows, columns) for flat in self.flat]
