"""2DMSE, 2D Matryoshka sentence embeddings: one layer and one dim drawn a step, aligned with the full depth."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from . import papers
from .distributed import same_on_all_ranks
from .embedding import EmbeddingConfig, EmbeddingObjective, EmbeddingTrainer
from .granularity import Grid
from .losses import embedding_kl
from .nested import prefix
from .objective import NestedBatch


class Matryoshka2d(EmbeddingObjective):
    """
    2DMSE ([2402.14776v1](https://huggingface.co/papers/2402.14776)): each step draws a prior layer n and a dim d below
    the full width D, and adds up InfoNCE at the full depth N and at layer n, each at D and at d, and
    `kl_weight` times the alignment of layer n with the detached layer N at D and at d ([`embedding_kl`]). All weights
    are 1. In evaluation, every layer and dim of the grid is averaged over instead of drawn.

    The terms are named by their part (`last_full`, `last_prefix`, `prior_full`, `prior_prefix`, `align`), since the
    granularity changes from step to step.

    Args:
        grid ([`Grid`]): Layers x dims, with the full size, a prior layer and a shorter dim.
        kl_weight (`float`, *optional*, defaults to 1.0): Of the alignment.
        kl_temperature (`float`, *optional*, defaults to 0.3): Of the alignment.
        kwargs: As for [`EmbeddingObjective`].

    Raises:
        ValueError: if the grid is not such a product or an argument is out of range, and as [`EmbeddingObjective`].
    """

    name = "2dmse"
    needs_full_size = True
    parts = ("last_full", "last_prefix", "prior_full", "prior_prefix", "align")

    def __init__(self, grid: Grid, *, kl_weight: float = 1.0, kl_temperature: float = 0.3, **kwargs: Any):
        super().__init__(grid, **kwargs)
        if len(grid) != len(grid.layers) * len(grid.dims) or len(grid.layers) < 2 or len(grid.dims) < 2:
            raise ValueError(f"2DMSE needs layers x dims, two of each or more; the grid is {grid}.")
        if kl_temperature <= 0:
            raise ValueError(f"kl_temperature={kl_temperature} must be above 0.")
        self.kl_weight, self.kl_temperature = kl_weight, kl_temperature

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        matches, choices = self.matches(batch), self.choices()
        (*_, last), full = self.layers, self.grid.full.dim
        last_embeddings = self.embeddings(batch, last)
        teacher = torch.cat(last_embeddings).detach()
        sums = dict.fromkeys(self.parts, teacher.new_zeros(()))
        for layer, dim in choices:
            prior_embeddings = self.embeddings(batch, layer)
            student = torch.cat(prior_embeddings)
            last_prefix, last_full = self.contrast(last_embeddings, (dim, full), matches)
            prior_prefix, prior_full = self.contrast(prior_embeddings, (dim, full), matches)
            distances = sum(
                embedding_kl(prefix(student, width), prefix(teacher, width), temperature=self.kl_temperature)
                for width in (dim, full)
            )
            values = (last_full, last_prefix, prior_full, prior_prefix, matches.rows.mean(torch.as_tensor(distances)))
            sums = {part: sums[part] + value for part, value in zip(self.parts, values, strict=True)}
        return {f"{self.name}_{part}": value / len(choices) for part, value in sums.items()}

    def choices(self) -> list[tuple[int, int]]:
        """The (prior layer, shorter dim) of this step: one drawn, the same on all ranks; all of them in evaluation."""
        every = list(itertools.product(self.layers[:-1], self.grid.dims[:-1]))
        if not self.training:
            return every
        return [every[int(same_on_all_ranks(torch.randint(len(every), (1,))))]]

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weights = {f"{self.name}_align": self.kl_weight}
        return torch.stack([weights.get(name, 1.0) * term for name, term in terms.items()]).sum()


@dataclass
class Matryoshka2dConfig(EmbeddingConfig):
    """
    Configuration of [`Matryoshka2dTrainer`]: that of [`EmbeddingConfig`] and

    Args:
        kl_weight (`float`, *optional*, defaults to 1.0): Of the alignment with the full depth.
        kl_temperature (`float`, *optional*, defaults to 0.3): Of the alignment.

    `grid` is layers x dims with the full size.
    """

    kl_weight: float = field(default=1.0, metadata={"help": "Of the alignment with the full depth."})
    kl_temperature: float = field(default=0.3, metadata={"help": "Of the alignment with the full depth."})


class Matryoshka2dTrainer(EmbeddingTrainer):
    """
    Trains an encoder with [`Matryoshka2d`].

    Args:
        args ([`Matryoshka2dConfig`]): How to train.
        kwargs: As for [`EmbeddingTrainer`].
    """

    _name = "2DMSE"
    _tag_names = ("2dmse", "matryoshka", "sentence-similarity")
    _paper = papers.ESE
    _equation = "version 1, 2D Matryoshka: a layer and a dim drawn each step, aligned with the full depth"

    def build_objective(self, args: Matryoshka2dConfig, grid: Grid) -> Matryoshka2d:
        return Matryoshka2d(
            grid, kl_weight=args.kl_weight, kl_temperature=args.kl_temperature, **args.embedding_arguments()
        )
