"""SimCSE: the contrastive baseline that trains the full size only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import papers
from .contrastive import Contrastive
from .embedding import EmbeddingConfig, EmbeddingTrainer
from .granularity import Grid


class SimCSE(Contrastive):
    """
    InfoNCE at one granularity (SimCSE, [2104.08821](https://huggingface.co/papers/2104.08821), Eqs. 1, 4, 5): of two
    dropout views of each text, or of labelled pairs and hard negatives.

    Args:
        grid ([`Grid`]): One granularity; more would be MRL, which [`Contrastive`] is.
        kwargs: As for [`EmbeddingObjective`].

    Raises:
        ValueError: if the grid has several granularities, and as [`EmbeddingObjective`].
    """

    name = "simcse"

    def __init__(self, grid: Grid, **kwargs: Any):
        if len(grid) != 1:
            raise ValueError(f"SimCSE trains one granularity, and the grid {grid} has {len(grid)}: use Contrastive.")
        super().__init__(grid, **kwargs)


@dataclass
class SimCSEConfig(EmbeddingConfig):
    """
    Configuration of [`SimCSETrainer`]: that of [`EmbeddingConfig`], with `grid` the model's full size and
    `unsupervised` on by default.
    """

    full_size_by_default = True

    unsupervised: bool = field(
        default=True, metadata={"help": "One text column; its positive is itself under another dropout mask."}
    )


class SimCSETrainer(EmbeddingTrainer):
    """
    Trains an encoder at its full size, with [`SimCSE`].

    Args:
        args ([`SimCSEConfig`]): How to train.
        kwargs: As for [`EmbeddingTrainer`].
    """

    _name = "SimCSE"
    _tag_names = ("simcse", "contrastive", "sentence-similarity")
    _paper = papers.SIMCSE
    _equation = "Eqs. 1 and 5: InfoNCE of two dropout views or of pairs, at the full size"

    def build_objective(self, args: SimCSEConfig, grid: Grid) -> SimCSE:
        return SimCSE(grid, **args.embedding_arguments())
