"""Starbucks: a list of fixed sizes, each layer with one dim, instead of a product of layers and dims."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from .core import papers
from .core.embedding import EmbeddingConfig, EmbeddingObjective
from .core.granularity import Grid
from .core.help_texts import described
from .core.objective import NestedBatch, Terms
from .core.states import truncate
from .embedding import EmbeddingTrainer
from .losses.alignment import similarity_kl


class Starbucks(EmbeddingObjective):
    """
    Starbucks fine-tuning ([2410.13230](https://huggingface.co/papers/2410.13230), and its authors' code): InfoNCE
    summed over sizes, plus, for every size below the full one, `kl_weight` times the KL divergence between its
    distribution over the candidates and that of the detached full size ([`similarity_kl`], at the temperature of
    InfoNCE). The paper's sizes for BERT-base: `2x32,4x64,6x128,8x256,10x512,12x768`.

    Args:
        grid ([`Grid`]): The sizes. Layer and dim increase together, and the last size is the full one.
        kl_weight (`float`, *optional*, defaults to 1.0): Weight of the KL divergence.
        kwargs: Arguments of [`EmbeddingObjective`].

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
        steps = itertools.pairwise(grid)
        if any(smaller.layer >= larger.layer or smaller.dim >= larger.dim for smaller, larger in steps):
            raise ValueError(
                f"Starbucks needs sizes whose layer and dim increase together, such as '2x16,4x32,6x384'; the grid is "
                f"{grid}."
            )
        self.kl_weight = kl_weight

    def forward(self, batch: NestedBatch) -> Terms:
        targets = self.contrast_targets(batch)
        terms: Terms = {}
        full = self.grid.full
        teacher_anchors, *others = (vectors.detach() for vectors in self.embeddings(batch, full.layer))
        teacher_candidates = torch.cat([targets.rows.gather(vectors) for vectors in others])
        for g in self.grid:
            embeddings = self.embeddings(batch, g.layer)
            (terms[self.term(g)],) = self.contrast(embeddings, (g.dim,), targets)
            if g == full:
                continue
            anchors, *others = (truncate(vectors, g.dim) for vectors in embeddings)
            divergences = similarity_kl(
                anchors,
                torch.cat([targets.rows.gather(vectors) for vectors in others]),
                teacher_anchors,
                teacher_candidates,
                temperature=self.temperature,
            )
            terms[self.term(g, "kl", weight=self.kl_weight)] = targets.rows.mean(divergences)
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

    kl_weight: float = 1.0


class StarbucksTrainer(EmbeddingTrainer):
    """
    Starbucks ([2410.13230](https://huggingface.co/papers/2410.13230)), with [`Starbucks`] and a [`StarbucksConfig`]:
    for sizes (l_i, d_i) that grow together up to the full one,

        L = sum_i InfoNCE(l_i, d_i) + KL weight * sum_i KL(similarities at the full size || those at (l_i, d_i))

    ```python
    >>> args = StarbucksConfig(output_dir="runs/model", grid="2x64,4x128,6x384")
    >>> trainer = StarbucksTrainer("runs/elastic", args, train_dataset=pairs)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    ```
    """
