"""Starbucks: a few fixed sizes, each a layer with a dim of its own, in place of a product."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import papers
from .embedding import EmbeddingConfig, EmbeddingObjective, EmbeddingTrainer
from .granularity import Granularity, Grid
from .losses import similarity_kl
from .nested import prefix
from .objective import NestedBatch


class Starbucks(EmbeddingObjective):
    """
    Starbucks fine-tuning ([2410.13230](https://huggingface.co/papers/2410.13230), and its authors' code): the sum over
    sizes of InfoNCE, and for every size but the largest, `kl_weight` times the KL divergence of its distribution over
    the candidates from the detached full size's ([`similarity_kl`], at InfoNCE's temperature). The paper's sizes for
    BERT-base: `2x32,4x64,6x128,8x256,10x512,12x768`.

    Args:
        grid ([`Grid`]): The sizes: each layer with one dim, wider with depth, the full size last.
        kl_weight (`float`, *optional*, defaults to 1.0): Of the divergence.
        kwargs: As for [`EmbeddingObjective`].

    Raises:
        ValueError: if the grid is anything else, and as [`EmbeddingObjective`].
    """

    name = "starbucks"
    needs_full_size = True

    def __init__(self, grid: Grid, *, kl_weight: float = 1.0, **kwargs: Any):
        super().__init__(grid, **kwargs)
        steps = itertools.pairwise(grid)
        if any(smaller.layer >= larger.layer or smaller.dim >= larger.dim for smaller, larger in steps):
            raise ValueError(
                f"Starbucks trains sizes that grow in layer and dim together, like '2x16,4x32,6x384'; got {grid}."
            )
        self.kl_weight = kl_weight

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        matches, terms = self.matches(batch), {}
        full = self.grid.full
        teacher_anchors, *others = (vectors.detach() for vectors in self.embeddings(batch, full.layer))
        teacher_candidates = torch.cat([matches.rows.gather(vectors) for vectors in others])
        for g in self.grid:
            embeddings = self.embeddings(batch, g.layer)
            (terms[self.term(g)],) = self.contrast(embeddings, (g.dim,), matches)
            if g == full:
                continue
            anchors, *others = (prefix(vectors, g.dim) for vectors in embeddings)
            divergences = similarity_kl(
                anchors,
                torch.cat([matches.rows.gather(vectors) for vectors in others]),
                teacher_anchors,
                teacher_candidates,
                temperature=self.temperature,
            )
            terms[self.divergence_term(g)] = matches.rows.mean(divergences)
        return terms

    def divergence_term(self, granularity: Granularity) -> str:
        """Name of the divergence of a size, as it is logged."""
        return f"{self.name}_kl_{granularity}"

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weights = {self.divergence_term(g): self.kl_weight for g in self.grid}
        return torch.stack([weights.get(name, 1.0) * term for name, term in terms.items()]).sum()


@dataclass
class StarbucksConfig(EmbeddingConfig):
    """
    Configuration of [`StarbucksTrainer`]: that of [`EmbeddingConfig`] and

    Args:
        kl_weight (`float`, *optional*, defaults to 1.0): Of the divergence from the full size.

    `grid` is a list of sizes that grow in layer and dim together and end with the full one.
    """

    kl_weight: float = field(default=1.0, metadata={"help": "Of the divergence from the full size."})


class StarbucksTrainer(EmbeddingTrainer):
    """
    Trains an encoder with [`Starbucks`].

    Args:
        args ([`StarbucksConfig`]): How to train.
        kwargs: As for [`EmbeddingTrainer`].
    """

    _name = "Starbucks"
    _tag_names = ("starbucks", "matryoshka", "sentence-similarity")
    _paper = papers.STARBUCKS
    _equation = "a fixed list of sizes, and KL divergence to the full size's similarities"

    def build_objective(self, args: StarbucksConfig, grid: Grid) -> Starbucks:
        return Starbucks(grid, kl_weight=args.kl_weight, **args.embedding_arguments())
