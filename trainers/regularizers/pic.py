"""PIC of MIPIC: from checkpoint to checkpoint, a shallow short embedding learns to tell what a deeper one says."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from ..distributed import RankRows
from ..granularity import Granularity, Grid
from ..losses import nested_info_nce
from ..nested import POOLINGS, Pooling, prefix
from ..objective import NestedBatch, Objective


class PIC(Objective):
    """
    Progressive information chaining (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), Eqs. 16 and 17):
    over checkpoints (l_i, d_i), InfoNCE of `phi_i(z_i)` with `z_{i+1}` among those of the batch, on all ranks, summed
    over the chain. phi is two linear layers with a GELU between. A text column is contrasted within itself; the
    columns are averaged.

    Args:
        checkpoints ([`Grid`]): The chain, two or more: layers ascending, dims not descending (the paper's ablation has
            all at full width).
        temperature (`float`, *optional*, defaults to 0.05): tau; cosines are divided by it (Table 7).
        pooling (`str`, *optional*, defaults to `"anchor"`): What z is, `"anchor"` (section 3.3) or `"mean"`.
        detach_target (`bool`, *optional*, defaults to `False`): Whether z_{i+1} is a teacher without gradient. The
            paper does not say; without it, deeper layers are drawn towards shallow ones as well.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Equal texts are no negatives of each other.

    Raises:
        ValueError: if the checkpoints do not ascend or an argument is out of range; in forward, for a batch of one.
    """

    name = "pic"
    pooling: Pooling

    def __init__(
        self,
        checkpoints: Grid,
        *,
        temperature: float = 0.05,
        pooling: Pooling = "anchor",
        detach_target: bool = False,
        mask_duplicates: bool = True,
    ):
        super().__init__(checkpoints)
        check_chain(checkpoints)
        if temperature <= 0:
            raise ValueError(f"The temperature of PIC must be above 0; it is {temperature}.")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")
        self.temperature, self.pooling = temperature, pooling
        self.detach_target, self.mask_duplicates = detach_target, mask_duplicates
        self.projectors = nn.ModuleList(projector(lower.dim, upper.dim) for lower, upper in self.links)

    @property
    def links(self) -> list[tuple[Granularity, Granularity]]:
        """Neighbouring checkpoints: the one that is projected, and its target."""
        return list(itertools.pairwise(self.grid))

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        columns = [{layer: text.pooled(layer, self.pooling) for layer in self.layers} for text in batch.texts.values()]
        first = columns[0][self.layers[0]]
        rows = RankRows.of(len(first), first.device)
        if sum(rows.counts) < 2:
            raise ValueError("PIC contrasts the texts of a batch; a batch of one has no negatives.")
        own_ids: list[torch.Tensor | None] = [None] * len(columns)
        if batch.text_ids is not None and self.mask_duplicates:
            own_ids = [batch.text_ids[column][:, None] for column in batch.texts]
        all_ids = [None if ids is None else rows.gather(ids) for ids in own_ids]
        terms = {}
        for (lower, upper), project in zip(self.links, self.projectors, strict=True):
            sources = [prefix(column[lower.layer], lower.dim) for column in columns]
            losses = [
                nested_info_nce(
                    projected,
                    rows.gather(self.target(column[upper.layer], upper.dim)),
                    dims=(upper.dim,),
                    temperature=self.temperature,
                    targets=torch.arange(len(first), device=first.device) + rows.offset,
                    anchor_ids=own,
                    candidate_ids=all_of_them,
                )
                for projected, column, own, all_of_them in zip(
                    project(torch.cat(sources)).split(len(first)), columns, own_ids, all_ids, strict=True
                )
            ]
            terms[self.term(lower)] = rows.mean(torch.cat(losses)[:, 0])
        return terms

    def target(self, pooled: torch.Tensor, dim: int) -> torch.Tensor:
        """What the checkpoint before this one is drawn to."""
        target = prefix(pooled, dim)
        return target.detach() if self.detach_target else target


def projector(inputs: int, outputs: int) -> nn.Sequential:
    """phi: a two-layer non-linear map."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.GELU(), nn.Linear(outputs, outputs))


def check_chain(checkpoints: Grid) -> None:
    """
    Check that checkpoints are a chain.

    Raises:
        ValueError: if there are fewer than two, or layers do not ascend, or dims descend.
    """
    members = list(checkpoints)
    steps = list(itertools.pairwise(members))
    if not steps or any(lower.layer >= upper.layer or lower.dim > upper.dim for lower, upper in steps):
        raise ValueError(
            f"The checkpoints of PIC must be two or more, deeper and not shorter from one to the next; they are "
            f"{', '.join(map(str, members))}."
        )
