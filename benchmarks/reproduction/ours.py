"""Objectives of our own method that are studied and not (yet) part of the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from m3bert.trainers import Grid, Starbucks, StarbucksConfig
from m3bert.trainers.embedding.objective import EmbeddingObjective


class NestedSimilarity(Starbucks):
    """
    MRL over any grid, and the similarities of the full size in the same batch as targets of every granularity: the
    terms of [`Starbucks`] without its condition that layer and dim increase together.

    Args:
        grid ([`Grid`]): The granularities to train, with the full size.
        kl_weight (`float`, *optional*, defaults to 1.0): Weight of the KL divergence.
        kwargs: Arguments of [`EmbeddingObjective`].
    """

    name = "nested_similarity"
    title = "MRL with the full size's similarities"

    def __init__(self, grid: Grid, *, kl_weight: float = 1.0, **kwargs: Any):
        EmbeddingObjective.__init__(self, grid, **kwargs)
        self.kl_weight = kl_weight


@dataclass
class NestedSimilarityConfig(StarbucksConfig):
    """Configuration of a [`StarbucksTrainer`] that trains [`NestedSimilarity`]."""

    objective_class = NestedSimilarity
