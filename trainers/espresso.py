"""ESE, Espresso sentence embeddings: shallow layers express more, first dims are compressed principal components."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import papers
from .distributed import sum_over_ranks
from .embedding import EmbeddingConfig, EmbeddingObjective, EmbeddingTrainer
from .granularity import Granularity, Grid
from .losses import compression_alignment, principal_map
from .nested import prefix
from .objective import NestedBatch


LAYER_WEIGHTINGS = ("log", "uniform")


class Espresso(EmbeddingObjective):
    """
    ESE ([2402.14776v3](https://huggingface.co/papers/2402.14776), and its authors' code): InfoNCE at every granularity
    and, at every dim k below the full width, the alignment of the first k dims with k principal components of that
    layer's embeddings ([`principal_map`], [`compression_alignment`]). Prior layers count `1 / (1 + ln l)` each,
    averaged; the full depth counts 1. The components are of all text columns and all ranks together, and carry no
    gradient.

    Layers count from 1, so that the first block weighs 1 and the last but one is trained; the authors' code reads the
    embedding layer as the first block, and so leaves out the last but one. They train one k; here it is every dim
    of the grid.

    Args:
        grid ([`Grid`]): The granularities to train, the full size among them.
        layer_weighting (`str`, *optional*, defaults to `"log"`): Of prior layers: `"log"`, or `"uniform"` (1 each).
        alignment_weight (`float`, *optional*, defaults to 1.0): Of the alignment terms.
        kwargs: As for [`EmbeddingObjective`].

    Raises:
        ValueError: if an argument is out of range, and as [`EmbeddingObjective`].
    """

    name = "espresso"
    needs_full_size = True

    def __init__(self, grid: Grid, *, layer_weighting: str = "log", alignment_weight: float = 1.0, **kwargs: Any):
        super().__init__(grid, **kwargs)
        if layer_weighting not in LAYER_WEIGHTINGS:
            raise ValueError(
                f"layer_weighting={layer_weighting!r} is unknown; legal values: {', '.join(LAYER_WEIGHTINGS)}."
            )
        self.layer_weighting, self.alignment_weight = layer_weighting, alignment_weight

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        matches, terms = self.matches(batch), {}
        for layer in self.layers:
            embeddings, dims = self.embeddings(batch, layer), self.grid.dims_of(layer)
            for dim, loss in zip(dims, self.contrast(embeddings, dims, matches).unbind(), strict=True):
                terms[self.term(Granularity(layer, dim))] = loss
            everything, short = torch.cat(embeddings), [dim for dim in dims if dim < self.grid.full.dim]
            if not short:
                continue
            teacher = everything.detach()
            components = teacher @ principal_map(sum_over_ranks(teacher.T @ teacher))[:, : short[-1]]
            for dim in short:
                distances = compression_alignment(prefix(everything, dim), prefix(components, dim))
                terms[self.alignment_term(Granularity(layer, dim))] = matches.rows.mean(distances)
        return terms

    def alignment_term(self, granularity: Granularity) -> str:
        """Name of the alignment at a granularity, as it is logged."""
        return f"{self.name}_align_{granularity}"

    def layer_weight(self, layer: int) -> float:
        """What the terms of a layer count."""
        if layer == self.grid.full.layer:
            return 1.0
        weight = 1 / (1 + math.log(layer)) if self.layer_weighting == "log" else 1.0
        return weight / (len(self.layers) - 1)

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weighted = []
        for g in self.grid:
            weight = self.layer_weight(g.layer)
            weighted.append(weight * terms[self.term(g)])
            if self.alignment_term(g) in terms:
                weighted.append(weight * self.alignment_weight * terms[self.alignment_term(g)])
        return torch.stack(weighted).sum()


@dataclass
class EspressoConfig(EmbeddingConfig):
    """
    Configuration of [`EspressoTrainer`]: that of [`EmbeddingConfig`] and

    Args:
        layer_weighting (`str`, *optional*, defaults to `"log"`): Of prior layers: `"log"` or `"uniform"`.
        alignment_weight (`float`, *optional*, defaults to 1.0): Of the alignment with principal components.

    `grid` has the full size.
    """

    layer_weighting: str = field(default="log", metadata={"help": "Of prior layers: 'log' or 'uniform'."})
    alignment_weight: float = field(default=1.0, metadata={"help": "Of the alignment with principal components."})


class EspressoTrainer(EmbeddingTrainer):
    """
    Trains an encoder with [`Espresso`].

    Args:
        args ([`EspressoConfig`]): How to train.
        kwargs: As for [`EmbeddingTrainer`].
    """

    _name = "ESE"
    _tag_names = ("espresso", "matryoshka", "sentence-similarity")
    _paper = papers.ESE
    _equation = "version 3: every layer, and its first dims aligned with its principal components"

    def build_objective(self, args: EspressoConfig, grid: Grid) -> Espresso:
        return Espresso(
            grid,
            layer_weighting=args.layer_weighting,
            alignment_weight=args.alignment_weight,
            **args.embedding_arguments(),
        )
