"""
The only place that knows about ranks.

The rule for every objective: a rank computes the mean over all ranks' rows of its own rows' losses
([`mean_over_ranks`]), against candidates of all ranks ([`gather_rows`], which carries gradient). Data parallelism
averages the gradients of the ranks, and what comes out is the gradient of the one big batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


def world_size() -> int:
    """Number of ranks; 1 where nothing is distributed."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def gather_rows(tensor: torch.Tensor) -> torch.Tensor:
    """
    The rows of all ranks, in the order of the ranks. Carries gradient: a row's gradient is the sum of what all ranks
    do with it.

    Args:
        tensor (`torch.Tensor` of shape `(rows, ...)`): The number of rows may differ between ranks, nothing else.

    Returns:
        `torch.Tensor` of shape `(rows of all ranks, ...)`
    """
    return _GatherRows.apply(tensor) if world_size() > 1 else tensor


def row_offset(rows: int, device: torch.device) -> int:
    """How many rows come before this rank's own in [`gather_rows`]."""
    if world_size() == 1:
        return 0
    return sum(_rows_of_ranks(rows, device)[: distributed.get_rank()])


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """
    This rank's share of the mean over the rows of all ranks, times their number: the average of it over ranks is the
    mean over all rows, however they are spread.

    Args:
        values (`torch.Tensor` of shape `(rows, ...)`): One value, or several, for each of this rank's rows.

    Returns:
        `torch.Tensor` of shape `(...)`
    """
    ranks = world_size()
    if ranks == 1:
        return values.mean(dim=0)
    return values.sum(dim=0) * (ranks / max(1, sum(_rows_of_ranks(len(values), values.device))))


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of a tensor of equal shape on each. No gradient."""
    total = tensor.detach().clone()
    if world_size() > 1:
        distributed.all_reduce(total)
    return total


def same_on_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The first rank's tensor, on every rank: for random draws that all have to agree on."""
    shared = tensor.detach().clone()
    if world_size() > 1:
        distributed.broadcast(shared, src=0)
    return shared


def _rows_of_ranks(rows: int, device: torch.device) -> list[int]:
    counts = torch.zeros(world_size(), dtype=torch.long, device=device)
    counts[distributed.get_rank()] = rows
    distributed.all_reduce(counts)
    return counts.tolist()


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        counts = _rows_of_ranks(len(tensor), tensor.device)
        start = sum(counts[: distributed.get_rank()])
        ctx.own = slice(start, start + len(tensor))
        padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in counts]
        distributed.all_gather(gathered, padded)
        return torch.cat([rows[:count] for rows, count in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        total = grad_outputs[0].contiguous().clone()
        distributed.all_reduce(total)
        return total[ctx.own]
