"""ESE, Espresso sentence embeddings: train shallow layers, and compress principal components into the first dims."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...encode.granularity import Granularity, Grid
from ...encode.ranks import sum_over_ranks
from ...encode.states import truncate
from ...utils import papers
from ...utils.help_texts import described
from ..core.objective import NestedBatch, Terms, require_known
from ..embedding.objective import EmbeddingConfig, EmbeddingObjective
from ..embedding.trainer import EmbeddingTrainer
from .losses import compression_alignment, principal_map


LAYER_WEIGHTINGS = ("log", "uniform")


class Espresso(EmbeddingObjective):
    """
    ESE ([2402.14776v3](https://huggingface.co/papers/2402.14776), and its authors' code): InfoNCE at every granularity
    and, at every dim k below the hidden size, the alignment of the first k dims with k principal components of the
    layer's embeddings ([`principal_map`], [`compression_alignment`]). Layer l below the full depth has the weight
    `1 / (1 + ln l)` divided by the number of these layers; the full depth has the weight 1. Principal components are
    computed from all text columns of all ranks together, without gradient.

    Differences from the authors' code: it counts the embedding layer as the first layer and leaves out the last layer
    but one, and it trains one k. Here layers are counted from 1, and every dim of the grid is a k.

    Args:
        grid ([`Grid`]): The granularities to train, including the full size.
        kwargs: Fields of [`EspressoConfig`], and arguments of [`EmbeddingObjective`].

    Raises:
        ValueError: if an argument is out of range, and as [`EmbeddingObjective`].
    """

    name = "espresso"
    title = "ESE"
    equation = "ESE, version 3: InfoNCE at every layer, and first dims aligned with principal components"
    papers = (papers.ESE,)
    tags = ("espresso", "matryoshka", "sentence-similarity")
    needs_full_size = True

    def __init__(self, grid: Grid, *, layer_weighting: str = "log", alignment_weight: float = 1.0, **kwargs: Any):
        super().__init__(grid, **kwargs)
        require_known(LAYER_WEIGHTINGS, layer_weighting=layer_weighting)
        self.layer_weighting, self.alignment_weight = layer_weighting, alignment_weight

    def forward(self, batch: NestedBatch) -> Terms:
        targets = self.contrast_targets(batch)
        terms: Terms = {}
        for layer in self.layers:
            embeddings, dims = self.embeddings(batch, layer), self.grid.dims_of(layer)
            weight = self.layer_weight(layer)
            for dim, loss in zip(dims, self.contrast(embeddings, dims, targets).unbind(), strict=True):
                terms[self.term(Granularity(layer, dim), weight=weight)] = loss
            everything, short = torch.cat(embeddings), [dim for dim in dims if dim < self.grid.full.dim]
            if not short:
                continue
            teacher = everything.detach()
            components = teacher @ principal_map(sum_over_ranks(teacher.T @ teacher))[:, : short[-1]]
            for dim in short:
                distances = compression_alignment(truncate(everything, dim), truncate(components, dim))
                term = self.term(Granularity(layer, dim), "align", weight=weight * self.alignment_weight)
                terms[term] = targets.rows.mean(distances)
        return terms

    def layer_weight(self, layer: int) -> float:
        """Weight of the terms of a layer."""
        if layer == self.grid.full.layer:
            return 1.0
        weight = 1 / (1 + math.log(layer)) if self.layer_weighting == "log" else 1.0
        return weight / (len(self.layers) - 1)


@described
@dataclass
class EspressoConfig(EmbeddingConfig):
    """
    Configuration of [`EspressoTrainer`], in addition to the fields of [`EmbeddingConfig`].

    Args:
        layer_weighting (`str`, *optional*, defaults to `"log"`): Weights of the layers below the last: `"log"`
            (`1 / (1 + ln l)`) or `"uniform"`.
        alignment_weight (`float`, *optional*, defaults to 1.0): Weight of the alignment with principal components.

    The grid must include the full size.
    """

    objective_class = Espresso
    objective_fields = (*EmbeddingConfig.objective_fields, "layer_weighting", "alignment_weight")

    layer_weighting: str = "log"
    alignment_weight: float = 1.0


class EspressoTrainer(EmbeddingTrainer):
    """Trains with [`Espresso`] and an [`EspressoConfig`]: `L = sum_l w_l sum_d (InfoNCE(l, d) + align(l, d))`."""
