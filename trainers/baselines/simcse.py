"""SimCSE: the contrastive baseline that trains only the full size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...encode.granularity import Grid
from ...utils import papers
from ...utils.help_texts import described
from ..core.objective import NestedBatch, Terms
from ..embedding.objective import EmbeddingConfig, EmbeddingObjective
from ..embedding.trainer import EmbeddingTrainer


class SimCSE(EmbeddingObjective):
    """
    InfoNCE at one granularity (SimCSE, [2104.08821](https://huggingface.co/papers/2104.08821), Eqs. 1, 4 and 5),
    between two dropout views of each text, or on labelled pairs with hard negatives.

    Args:
        grid ([`Grid`]): One granularity. For several, use [`Contrastive`].
        kwargs: Arguments of [`EmbeddingObjective`].

    Raises:
        ValueError: if the grid has several granularities, and as [`EmbeddingObjective`].
    """

    name = "simcse"
    title = "SimCSE"
    equation = "SimCSE, Eqs. 1 and 5: InfoNCE of two dropout views or of pairs, at one granularity"
    papers = (papers.SIMCSE,)
    tags = ("simcse", "contrastive", "sentence-similarity")

    def __init__(self, grid: Grid, **kwargs: Any):
        super().__init__(grid, **kwargs)
        if len(grid) != 1:
            raise ValueError(f"SimCSE trains one granularity, but the grid {grid} has {len(grid)}: use Contrastive.")

    def forward(self, batch: NestedBatch) -> Terms:
        return self.contrast_grid(batch, self.contrast_targets(batch))


@described
@dataclass
class SimCSEConfig(EmbeddingConfig):
    """
    Configuration of [`SimCSETrainer`], with the fields of [`EmbeddingConfig`]. The default grid is the model's full
    size, and `unsupervised` is on by default.
    """

    objective_class = SimCSE
    full_size_by_default = True

    unsupervised: bool = True


class SimCSETrainer(EmbeddingTrainer):
    """Trains with [`SimCSE`] and a [`SimCSEConfig`]: `L = -log exp(cos(h_i, h_i+) / tau) / sum_j exp(cos(h_i, h_j+) /
    tau)`, where h_i+ is by default the same text with other dropout (Eq. 1), and with pairs the positive (Eq. 5)."""
