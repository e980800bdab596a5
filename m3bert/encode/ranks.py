"""
The only module that knows about ranks.

All objectives follow one rule. Each rank computes the losses of its rows against the candidates of all ranks
([`RankRows.gather`], which carries gradient) and averages them with [`RankRows.mean`]. Data parallelism then averages
the gradients over ranks, which gives the gradient of one batch of all rows. Where memory is short, the candidates are
passed around the ranks instead of gathered ([`Ring`]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule


def world_size() -> int:
    """Number of ranks; 1 without distributed training."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Rank of this process; 0 without distributed training."""
    return distributed.get_rank() if world_size() > 1 else 0


def wait_for_all_ranks() -> None:
    """Return when every rank has called this function."""
    if world_size() > 1:
        distributed.barrier()


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP divides the parameters of the model."""
    return isinstance(model, FSDPModule)


@dataclass(frozen=True)
class RankRows:
    """
    How the rows of one batch are distributed over ranks. Ranks may have different numbers of rows.

    Args:
        counts (`tuple[int, ...]`): Number of rows of each rank.
        rank (`int`, *optional*, defaults to 0): Rank of this process.
    """

    counts: tuple[int, ...]
    rank: int = 0

    @classmethod
    def of(cls, rows: int, device: torch.device) -> RankRows:
        """Exchange the numbers of rows between ranks, once per batch."""
        if world_size() == 1:
            return cls((rows,))
        counts = torch.zeros(world_size(), dtype=torch.long, device=device)
        counts[rank()] = rows
        distributed.all_reduce(counts)
        return cls(tuple(counts.tolist()), rank())

    def ring(self, columns: int) -> Ring | None:
        """The ring of the candidates of all ranks, `columns` per row; `None` for a single rank."""
        return Ring(tuple(columns * count for count in self.counts), self.rank) if len(self.counts) > 1 else None

    @property
    def offset(self) -> int:
        """Index of this rank's first row in the result of [`gather`]."""
        return sum(self.counts[: self.rank])

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows `(rows, ...)` of all ranks, in the order of the ranks. Carries gradient: the gradient of a row is
        the sum of its gradients on all ranks."""
        return tensor if len(self.counts) == 1 else _GatherRows.apply(tensor, self)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """
        This rank's share of the mean over the values of all ranks, times the number of ranks. The average of the
        result over ranks is the mean over all values, even if ranks have different numbers of rows.

        Args:
            values (`torch.Tensor` of shape `(values, ...)`): One or more values per row of this rank, the same number
                for every row.

        Returns:
            `torch.Tensor` of shape `(...)`
        """
        share = self.counts[self.rank] / max(1, sum(self.counts))
        return values.mean(dim=0) * (len(self.counts) * share)


@dataclass(frozen=True)
class Ring:
    """
    The ranks in a ring: each sends tensors to the next rank and receives from the previous one, until every rank has
    seen the tensors of all (after Inf-CL, [2410.17243](https://huggingface.co/papers/2410.17243), and ring attention,
    [2310.01889](https://huggingface.co/papers/2310.01889)). `counts` are the rows of each rank's tensors. All ranks
    must make the same calls in the same order.
    """

    counts: tuple[int, ...]
    rank: int

    def rounds(self, tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield the tensors `(rows, ...)` of every rank, this rank's first. They are sent meanwhile: do not change
        them."""
        last = len(self.counts) - 1
        for passes in range(last + 1):
            arrival = self._pass_on(tensors, passes, channel=0) if passes < last else None
            yield tensors
            if arrival is not None:
                tensors = arrival()

    def pass_on_gradients(self, gradients: torch.Tensor, passes: int) -> torch.Tensor:
        """Send on the gradients of tensors of [`rounds`] that were passed `passes` times, and return the gradients of
        the tensors that come next. The last call returns the gradients of this rank's tensors."""
        (received,) = self._pass_on([gradients], passes, channel=1)()
        return received

    def _pass_on(self, tensors: Sequence[torch.Tensor], passes: int, channel: int) -> Callable[[], list[torch.Tensor]]:
        """Start to send tensors; the result waits for the previous rank's. Transfers at once need other channels."""
        ranks = len(self.counts)
        following, previous = (self.rank + 1) % ranks, (self.rank - 1) % ranks
        rows = self.counts[(previous - passes) % ranks]
        sent = [tensor.contiguous() for tensor in tensors]
        received = [tensor.new_empty((rows, *tensor.shape[1:])) for tensor in tensors]
        transfers = []
        for index, (outgoing, incoming) in enumerate(zip(sent, received, strict=True)):
            tag = 2 * index + channel
            transfers.append(distributed.P2POp(distributed.isend, outgoing, following, tag=tag))
            transfers.append(distributed.P2POp(distributed.irecv, incoming, previous, tag=tag))
        works = distributed.batch_isend_irecv(transfers)

        def wait() -> list[torch.Tensor]:
            for work in works:
                work.wait()
            sent.clear()  # they had to live until they were sent
            return received

        return wait


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor over ranks, on the tensor's device. Its gradient is the sum of the gradients on all ranks."""
    return tensor if world_size() == 1 else _SumOverRanks.apply(_sendable(tensor)).to(tensor.device)


def same_on_all_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of the first rank, on the tensor's device: for random draws that all ranks must share."""
    shared = tensor.detach().clone()
    if world_size() > 1:
        shared = _sendable(shared)
        distributed.broadcast(shared, src=0)
    return shared.to(tensor.device)


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on a device whose tensors the ranks can exchange: NCCL takes a GPU's tensors only."""
    if f"{tensor.device.type}:" in distributed.get_backend_config():
        return tensor
    return tensor.to(torch.accelerator.current_accelerator())


def smallest_on_all_ranks(number: int, device: torch.device) -> int:
    """The smallest of the numbers that the ranks pass."""
    if world_size() == 1:
        return number
    smallest = torch.tensor(number, device=device)
    distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN)
    return int(smallest)


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
        ctx.rows = slice(rows.offset, rows.offset + len(tensor))
        padded = tensor.new_zeros((max(rows.counts), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in rows.counts]
        distributed.all_gather(gathered, padded)
        return torch.cat([part[:count] for part, count in zip(gathered, rows.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad_outputs[0].contiguous().clone()
        distributed.all_reduce(total)
        return total[ctx.rows], None
