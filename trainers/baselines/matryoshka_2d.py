"""2DMSE, 2D Matryoshka sentence embeddings: one layer and one dim drawn per step, aligned with the full depth."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from ...encode.granularity import Grid
from ...encode.ranks import same_on_all_ranks
from ...encode.states import truncate
from ...utils import papers
from ...utils.help_texts import described
from ..core.objective import NestedBatch, Terms, require_positive
from ..embedding.objective import EmbeddingConfig, EmbeddingObjective
from ..embedding.trainer import EmbeddingTrainer
from .losses import embedding_kl


class Matryoshka2d(EmbeddingObjective):
    """
    2DMSE ([2402.14776v1](https://huggingface.co/papers/2402.14776)): each step draws a layer n below the full depth N
    and a dim d below the hidden size D. The loss is the sum of InfoNCE at layers N and n, each at dims D and d, plus
    `kl_weight` times the alignment of layer n with the detached layer N at both dims ([`embedding_kl`]). Evaluation
    averages over all layers and dims of the grid instead of drawing one.

    The terms are named after their part of the sum (`last_full`, `last_prefix`, `prior_full`, `prior_prefix`,
    `align`), because the granularity changes at every step.

    Args:
        grid ([`Grid`]): Layers x dims, with the full size, a layer below it and a smaller dim.
        kwargs: Fields of [`Matryoshka2dConfig`], and arguments of [`EmbeddingObjective`].

    Raises:
        ValueError: if the grid is not such a product or an argument is out of range, and as [`EmbeddingObjective`].
    """

    name = "2dmse"
    title = "2DMSE"
    equation = "2DMSE (ESE, version 1): a layer and a dim drawn each step, aligned with the full depth"
    papers = (papers.ESE,)
    tags = ("2dmse", "matryoshka", "sentence-similarity")
    needs_full_size = True
    parts = ("last_full", "last_prefix", "prior_full", "prior_prefix", "align")

    def __init__(self, grid: Grid, *, kl_weight: float = 1.0, kl_temperature: float = 0.3, **kwargs: Any):
        super().__init__(grid, **kwargs)
        if len(grid) != len(grid.layers) * len(grid.dims) or len(grid.layers) < 2 or len(grid.dims) < 2:
            raise ValueError(f"2DMSE needs a grid of two or more layers x two or more dims; the grid is {grid}.")
        require_positive(kl_temperature=kl_temperature)
        self.kl_weight, self.kl_temperature = kl_weight, kl_temperature

    def forward(self, batch: NestedBatch) -> Terms:
        targets = self.contrast_targets(batch)
        (*_, last), full = self.layers, self.grid.full.dim
        last_embeddings = self.embeddings(batch, last)
        teacher = torch.cat(last_embeddings).detach()
        losses = []
        for layer, dim in self.choices():
            prior_embeddings = self.embeddings(batch, layer)
            student = torch.cat(prior_embeddings)
            last_prefix, last_full = self.contrast(last_embeddings, (dim, full), targets)
            prior_prefix, prior_full = self.contrast(prior_embeddings, (dim, full), targets)
            at_dim, at_full = (
                embedding_kl(truncate(student, width), truncate(teacher, width), temperature=self.kl_temperature)
                for width in (dim, full)
            )
            alignment = targets.rows.mean(at_dim + at_full)
            losses.append(torch.stack([last_full, last_prefix, prior_full, prior_prefix, alignment]))
        return {
            self.term(name=part, weight=self.kl_weight if part == "align" else 1.0): loss
            for part, loss in zip(self.parts, torch.stack(losses).mean(dim=0), strict=True)
        }

    def choices(self) -> list[tuple[int, int]]:
        """The pairs (layer, dim) of this step: in training one random pair, the same on all ranks; in evaluation all
        pairs."""
        every = list(itertools.product(self.layers[:-1], self.grid.dims[:-1]))
        if not self.training:
            return every
        return [every[int(same_on_all_ranks(torch.randint(len(every), (1,))))]]


@described
@dataclass
class Matryoshka2dConfig(EmbeddingConfig):
    """
    Configuration of [`Matryoshka2dTrainer`], in addition to the fields of [`EmbeddingConfig`].

    Args:
        kl_weight (`float`, *optional*, defaults to 1.0): Weight of the alignment with the full depth.
        kl_temperature (`float`, *optional*, defaults to 0.3): Temperature of the alignment with the full depth.

    The grid must be a product of layers and dims with the full size.
    """

    objective_class = Matryoshka2d
    objective_fields = (*EmbeddingConfig.objective_fields, "kl_weight", "kl_temperature")

    kl_weight: float = 1.0
    kl_temperature: float = 0.3


class Matryoshka2dTrainer(EmbeddingTrainer):
    """Trains with [`Matryoshka2d`] and a [`Matryoshka2dConfig`]: with n < N and d < D drawn at each step,
    `L = sum over l in (n, N), k in (d, D) of InfoNCE(l, k) + KL weight * (KL(n, d) + KL(n, D))`."""
