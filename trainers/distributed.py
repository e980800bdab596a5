"""
The only place that knows about ranks.

The rule for every objective: a rank computes the mean over all ranks' rows of its own rows' losses
([`RankRows.mean`]), against candidates of all ranks ([`RankRows.gather`], which carries gradient). Data parallelism
averages the gradients of the ranks, and what comes out is the gradient of the one big batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed


def world_size() -> int:
    """Number of ranks; 1 where nothing is distributed."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """This process' rank; 0 where nothing is distributed."""
    return distributed.get_rank() if world_size() > 1 else 0


def wait_for_all_ranks() -> None:
    """Return when every rank has come here."""
    if world_size() > 1:
        distributed.barrier()


@dataclass(frozen=True)
class RankRows:
    """
    How the rows of one batch are spread over ranks; their numbers may differ.

    Args:
        counts (`tuple[int, ...]`): Rows of each rank.
        rank (`int`): This one.
    """

    counts: tuple[int, ...]
    rank: int = 0

    @classmethod
    def of(cls, rows: int, device: torch.device) -> RankRows:
        """Exchange the numbers of rows, once a batch."""
        if world_size() == 1:
            return cls((rows,))
        counts = torch.zeros(world_size(), dtype=torch.long, device=device)
        counts[rank()] = rows
        distributed.all_reduce(counts)
        return cls(tuple(counts.tolist()), rank())

    @property
    def offset(self) -> int:
        """How many rows come before this rank's own in [`gather`]."""
        return sum(self.counts[: self.rank])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        The rows of all ranks, in the order of the ranks. Carries gradient: a row's gradient is the sum of what all
        ranks do with it.

        Args:
            tensor (`torch.Tensor` of shape `(rows, ...)`): This rank's.

        Returns:
            `torch.Tensor` of shape `(rows of all ranks, ...)`
        """
        return tensor if len(self.counts) == 1 else _GatherRows.apply(tensor, self)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """
        This rank's share of the mean over the values of all ranks, times their number: the average of it over ranks
        is the mean over all values, however they are spread.

        Args:
            values (`torch.Tensor` of shape `(values, ...)`): One for each of this rank's rows, or equally many.

        Returns:
            `torch.Tensor` of shape `(...)`
        """
        share = self.counts[self.rank] / max(1, sum(self.counts))
        return values.mean(dim=0) * (len(self.counts) * share)


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks of a tensor of equal shape on each. Its gradient is the sum of what all ranks do with it."""
    return tensor if world_size() == 1 else _SumOverRanks.apply(tensor)


def same_on_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The first rank's tensor, on every rank: for random draws that all have to agree on."""
    shared = tensor.detach().clone()
    if world_size() > 1:
        distributed.broadcast(shared, src=0)
    return shared


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.contiguous().clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        total = grad_outputs[0].contiguous().clone()
        distributed.all_reduce(total)
        return total


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: RankRows) -> torch.Tensor:
        ctx.own = slice(rows.offset, rows.offset + len(tensor))
        padded = tensor.new_zeros((max(rows.counts), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in rows.counts]
        distributed.all_gather(gathered, padded)
        return torch.cat([part[:count] for part, count in zip(gathered, rows.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad_outputs[0].contiguous().clone()
        distributed.all_reduce(total)
        return total[ctx.own], None
