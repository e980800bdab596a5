"""Starbucks: a list of fixed sizes, each layer with one dim, instead of a product of layers and dims."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from ...encode.granularity import Grid
from ...utils import papers
from ...utils.help_texts import described
from ..core.objective import NestedBatch, Terms
from ..embedding.objective import EmbeddingConfig, EmbeddingObjective
from ..embedding.similarity import nested_similarity_distillation
from ..embedding.trainer import EmbeddingTrainer


class Starbucks(EmbeddingObjective):
    """
    Starbucks fine-tuning ([2410.13230](https://huggingface.co/papers/2410.13230), and its authors' code): InfoNCE
    summed over sizes, plus, for every size below the full one, `kl_weight` times the KL divergence between its
    distribution over the candidates and that of the detached full size ([`nested_similarity_distillation`], at the
    temperature of InfoNCE). The paper's sizes for BERT-base: `2x32,4x64,6x128,8x256,10x512,12x768`.

    Args:
        grid ([`Grid`]): The sizes. Layer and dim increase together, and the last size is the full one.
        kwargs: Fields of [`StarbucksConfig`], and arguments of [`EmbeddingObjective`].

    Raises:
        ValueError: if layer and dim do not increase together, and as [`EmbeddingObjective`].
    """

    name = "starbucks"
    title = "Starbucks"
    equation = "Starbucks: a fixed list of sizes, and KL divergence to the full size's similarities"
    papers = (papers.STARBUCKS,)
    tags = ("starbucks", "matryoshka", "sentence-similarity")
    needs_full_size = True

    def __init__(self, grid: Grid, *, kl_weight: float = 1.0, **kwargs: Any):
        super().__init__(grid, **kwargs)
        if any(small.layer >= large.layer or small.dim >= large.dim for small, large in itertools.pairwise(grid)):
            raise ValueError(f"Starbucks needs sizes whose layer and dim increase together; the grid is {grid}.")
        self.kl_weight = kl_weight

    def forward(self, batch: NestedBatch) -> Terms:
        targets, full = self.contrast_targets(batch), self.grid.full

        def anchors_and_candidates(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            anchors, *others = self.embeddings(batch, layer)
            return anchors, torch.cat([targets.rows.gather(vectors) for vectors in others])

        teachers = anchors_and_candidates(full.layer)
        terms: Terms = {}
        for g in self.grid:
            (terms[self.term(g)],) = self.contrast(self.embeddings(batch, g.layer), (g.dim,), targets)
            if g != full:
                students = anchors_and_candidates(g.layer)
                divergences = nested_similarity_distillation(
                    students[0],
                    teachers[0],
                    students[1],
                    (g.dim,),
                    teacher_candidates=teachers[1],
                    temperature=self.temperature,
                )
                terms[self.term(g, "kl", weight=self.kl_weight)] = targets.rows.mean(divergences[0])
        return terms


@described
@dataclass
class StarbucksConfig(EmbeddingConfig):
    """
    Configuration of [`StarbucksTrainer`], in addition to the fields of [`EmbeddingConfig`].

    Args:
        kl_weight (`float`, *optional*, defaults to 1.0): Weight of the KL divergence from the full size.

    The grid must be a list of sizes whose layer and dim increase together, up to the full size.
    """

    objective_class = Starbucks
    objective_fields = (*EmbeddingConfig.objective_fields, "kl_weight")

    kl_weight: float = 1.0


class StarbucksTrainer(EmbeddingTrainer):
    """Trains with [`Starbucks`] and a [`StarbucksConfig`]: at the sizes (l_i, d_i),
    `L = sum_i InfoNCE(l_i, d_i) + KL weight * sum_i KL(similarities at the full size || those at (l_i, d_i))`."""
