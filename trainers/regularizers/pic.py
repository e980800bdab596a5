"""PIC of MIPIC: from checkpoint to checkpoint, a shallow short embedding learns to tell what a deeper one says."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from ..distributed import RankRows
from ..granularity import Granularity, Grid
from ..losses import nested_info_nce
from ..nested import POOLINGS, NestedStates, PooledStates, Pooling, prefix
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
        sums: dict[str, torch.Tensor] = {}
        for column, text in batch.texts.items():
            ids = batch.text_ids[column] if batch.text_ids is not None and self.mask_duplicates else None
            for name, term in self.text_terms(text, ids).items():
                sums[name] = sums.get(name, 0) + term / len(batch.texts)
        return sums

    def text_terms(self, text: NestedStates | PooledStates, ids: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The terms of one text column."""
        pooled = {layer: text.pooled(layer, self.pooling) for layer in self.layers}
        first = pooled[self.layers[0]]
        rows = RankRows.of(len(first), first.device)
        if sum(rows.counts) < 2:
            raise ValueError("PIC contrasts the texts of a batch; a batch of one has no negatives.")
        targets = torch.arange(len(first), device=first.device) + rows.offset
        own_ids = None if ids is None else ids[:, None]
        all_ids = None if own_ids is None else rows.gather(own_ids)
        terms = {}
        for (lower, upper), project in zip(self.links, self.projectors, strict=True):
            target = prefix(pooled[upper.layer], upper.dim)
            losses = nested_info_nce(
                project(prefix(pooled[lower.layer], lower.dim)),
                rows.gather(target.detach() if self.detach_target else target),
                dims=(upper.dim,),
                temperature=self.temperature,
                targets=targets,
                anchor_ids=own_ids,
                candidate_ids=all_ids,
            )
            terms[self.term(lower)] = rows.mean(losses[:, 0])
        return terms


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
