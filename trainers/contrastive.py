"""Contrastive training at every granularity of a grid: Matryoshka fine-tuning and stage 3 of m3BERT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import papers
from .embedding import EmbeddingConfig, EmbeddingObjective, EmbeddingTrainer
from .granularity import Grid
from .objective import NestedBatch


REDUCTIONS = ("sum", "mean")


class Contrastive(EmbeddingObjective):
    """
    InfoNCE of pooled embeddings with in-batch negatives at every granularity of a grid, summed or averaged over it
    (Matryoshka fine-tuning: m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), Eqs. 1 and 4; MRL,
    [2205.13147](https://huggingface.co/papers/2205.13147), Eq. 1).

    Args:
        reduction (`str`, *optional*, defaults to `"sum"`): Of the terms over the grid: `"sum"` (m3BERT, MIPIC) or
            `"mean"` (MIC).
        kwargs: As for [`EmbeddingObjective`].

    Raises:
        ValueError: as [`EmbeddingObjective`].
    """

    name = "contrastive"

    def __init__(self, grid: Grid, *, reduction: str = "sum", **kwargs: Any):
        super().__init__(grid, **kwargs)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r} is unknown; legal values: {', '.join(REDUCTIONS)}.")
        self.reduction = reduction

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        matches, losses = self.matches(batch), {}
        for layer in self.layers:
            dims = self.grid.dims_of(layer)
            losses[layer] = dict(
                zip(dims, self.contrast(self.embeddings(batch, layer), dims, matches).unbind(), strict=True)
            )
        return {self.term(g): losses[g.layer][g.dim] for g in self.grid}

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        total = super().total(terms)
        return total / len(terms) if self.reduction == "mean" else total


@dataclass
class ContrastiveConfig(EmbeddingConfig):
    """
    Configuration of [`ContrastiveTrainer`]: that of [`EmbeddingConfig`] and

    Args:
        reduction (`str`, *optional*, defaults to `"sum"`): `"sum"` or `"mean"` over the grid (m3BERT, Eq. 4, sums).
    """

    reduction: str = field(default="sum", metadata={"help": "Of the losses over the grid: 'sum' or 'mean'."})


class ContrastiveTrainer(EmbeddingTrainer):
    """
    Trains an encoder on pairs at every granularity of a grid, with [`Contrastive`].

    Args:
        args ([`ContrastiveConfig`]): How to train.
        kwargs: As for [`EmbeddingTrainer`].
    """

    _name = "Matryoshka contrastive"
    _tag_names = ("m3bert", "contrastive", "matryoshka", "sentence-similarity")
    _paper = papers.M3BERT
    _equation = "Eqs. 1 and 4: InfoNCE, summed over layers and dims"

    def build_objective(self, args: ContrastiveConfig, grid: Grid) -> Contrastive:
        return Contrastive(grid, reduction=args.reduction, **args.embedding_arguments())
