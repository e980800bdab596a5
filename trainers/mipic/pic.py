"""PIC of MIPIC: along a chain of granularities, each embedding learns to predict the next, deeper one."""

from __future__ import annotations

import itertools
from typing import Any, Self

import torch
from torch import nn

from ...encode.granularity import Granularity, Grid, evenly_spaced
from ...encode.ranks import RankRows
from ...encode.states import Pooling, check_pooling, truncate
from ...utils import papers
from ..core.objective import NestedBatch, Objective, Terms, require_positive
from ..embedding.info_nce import nested_info_nce


class PIC(Objective):
    """
    Progressive information chaining (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), Eqs. 16 and 17):
    along a chain of granularities (l_i, d_i), which the paper calls checkpoints, InfoNCE of `phi_i(z_i)` with the
    `z_{i+1}` of the same text, against those of all texts on all ranks, summed over the chain. phi_i is two linear
    layers with a GELU between them. Each text column is contrasted on its own; the losses of the columns are averaged.

    Args:
        chain ([`Grid`]): Two or more granularities with ascending layers and dims that do not descend (an ablation of
            the paper keeps the hidden size everywhere).
        temperature (`float`, *optional*, defaults to 0.05): tau; cosines are divided by it (Table 7).
        pooling (`str`, *optional*, defaults to `"cls"`): Pooling of z: `"cls"` (section 3.3), `"lasttoken"` or
            `"mean"`.
        detach_target (`bool`, *optional*, defaults to `False`): Whether to stop the gradient of z_{i+1}. The paper
            does not specify it. Without a stop, deeper layers are also pulled towards shallow ones.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Do not use equal texts as negatives of each other.
        gather_negatives (`bool`, *optional*, defaults to `True`): Use the texts of all ranks. Without, each rank
            contrasts its own batch.

    Raises:
        ValueError: if the chain does not ascend or an argument is out of range; in forward, for a batch of one.
    """

    name = "pic"
    title = "PIC"
    equation = "MIPIC, Eqs. 16 and 17: InfoNCE along a chain from shallow and narrow to deep and wide"
    papers = (papers.MIPIC,)
    tags = ("mipic",)
    pooling: Pooling

    def __init__(
        self,
        chain: Grid,
        *,
        temperature: float = 0.05,
        pooling: Pooling = "cls",
        detach_target: bool = False,
        mask_duplicates: bool = True,
        gather_negatives: bool = True,
    ):
        super().__init__(chain)
        if not self.links or any(lower.layer >= upper.layer or lower.dim > upper.dim for lower, upper in self.links):
            raise ValueError(
                f"chain={chain} must have two or more granularities, each deeper than the one before and at least as "
                "wide, such as '2x16,4x32,12x768'."
            )
        require_positive(temperature=temperature)
        check_pooling(pooling)
        self.temperature, self.pooling = temperature, pooling
        self.detach_target, self.mask_duplicates = detach_target, mask_duplicates
        self.gather_negatives = gather_negatives
        self.projectors = nn.ModuleList(projector(lower.dim, upper.dim) for lower, upper in self.links)

    @classmethod
    def for_grid(cls, grid: Grid, *, chain: str | Grid | None = None, **arguments: Any) -> Self:
        """Build the objective along a chain, such as `"2x16,4x32,12x768"`. Default: the [`default_chain`] of the
        trained grid."""
        if chain is None:
            chain = default_chain(grid)
        return cls(Grid.parse(chain) if isinstance(chain, str) else chain, **arguments)

    @property
    def links(self) -> list[tuple[Granularity, Granularity]]:
        """Consecutive pairs of the chain: the granularity that is projected, and its target."""
        return list(itertools.pairwise(self.grid))

    def forward(self, batch: NestedBatch) -> Terms:
        columns = [{layer: text.pooled(layer, self.pooling) for layer in self.layers} for text in batch.texts.values()]
        first = columns[0][self.layers[0]]
        rows = RankRows.of(len(first), first.device) if self.gather_negatives else RankRows((len(first),))
        own_ids: list[torch.Tensor | None] = [None] * len(columns)
        if batch.text_ids is not None and self.mask_duplicates:
            own_ids = [batch.text_ids[column][:, None] for column in batch.texts]
        all_ids = [None if ids is None else rows.gather(ids) for ids in own_ids]
        terms = {}
        for (lower, upper), project in zip(self.links, self.projectors, strict=True):
            sources = [truncate(column[lower.layer], lower.dim) for column in columns]
            targets = [truncate(column[upper.layer], upper.dim) for column in columns]
            losses = [
                nested_info_nce(
                    projected,
                    rows.gather(target.detach() if self.detach_target else target),
                    dims=(upper.dim,),
                    temperature=self.temperature,
                    targets=torch.arange(len(first), device=first.device) + rows.offset,
                    anchor_ids=anchor_ids,
                    candidate_ids=candidate_ids,
                )
                for projected, target, anchor_ids, candidate_ids in zip(
                    project(torch.cat(sources)).split(len(first)), targets, own_ids, all_ids, strict=True
                )
            ]
            terms[self.term(lower)] = rows.mean(torch.cat(losses)[:, 0])
        return terms


def projector(inputs: int, outputs: int) -> nn.Sequential:
    """phi: two linear layers with a GELU between them."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.GELU(), nn.Linear(outputs, outputs))


def default_chain(grid: Grid) -> Grid:
    """The dims of the deepest layer of the grid, from the smallest to the largest, at evenly spaced layers. Its length
    is the number of these dims, or the depth if that is smaller."""
    depth, dims = grid.full.layer, grid.dims_of(grid.full.layer)
    count = min(depth, len(dims))
    layers = evenly_spaced(range(1, depth + 1), count)
    chosen = [dims[round(step * (len(dims) - 1) / max(1, count - 1))] for step in range(count)]
    return Grid(tuple(map(Granularity, layers, chosen)))
