"""Contrastive training at every granularity of a grid: Matryoshka fine-tuning, and stage 3 of m3BERT."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...encode.granularity import Grid
from ...utils import papers
from ...utils.help_texts import described
from ...utils.papers import Identity
from ..core.objective import REDUCTIONS, NestedBatch, Terms, require_known
from ..embedding.objective import EmbeddingConfig, EmbeddingObjective
from ..embedding.trainer import EmbeddingTrainer


class Contrastive(EmbeddingObjective):
    """
    InfoNCE of pooled embeddings with in-batch negatives at every granularity of a grid, summed or averaged over it
    (Matryoshka fine-tuning: m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), Eqs. 1 and 4; MRL,
    [2205.13147](https://huggingface.co/papers/2205.13147), Eq. 1).

    Args:
        reduction (`str`, *optional*, defaults to `"sum"`): `"sum"` (m3BERT, MIPIC) or `"mean"` (MIC) over the grid.
        kwargs: Arguments of [`EmbeddingObjective`].
    """

    name = "contrastive"
    title = "MRL"
    papers = (papers.MRL,)
    tags = ("contrastive", "matryoshka", "sentence-similarity")

    def __init__(self, grid: Grid, *, reduction: str = "sum", **kwargs: Any):
        super().__init__(grid, **kwargs)
        require_known(REDUCTIONS, reduction=reduction)
        self.reduction = reduction

    @property
    def identity(self) -> Identity:
        """InfoNCE at one granularity, MRL over the dims of one layer, or m3BERT over several layers."""
        if len(self.grid) == 1:
            return Identity("InfoNCE", "InfoNCE at one granularity", (), ("contrastive", "sentence-similarity"))
        equation = f"InfoNCE at every granularity, {self.reduction} over the grid (MRL, Eq. 1)"
        if len(self.layers) == 1:
            return replace(super().identity, equation=equation)
        equation = f"InfoNCE at every granularity, {self.reduction} over layers and dims (m3BERT, Eqs. 1 and 4)"
        tags = ("m3bert", *self.tags)
        return replace(super().identity, equation=equation, papers=(*self.papers, papers.M3BERT), tags=tags)

    def forward(self, batch: NestedBatch) -> Terms:
        weight = 1 / len(self.grid) if self.reduction == "mean" else 1.0
        return self.contrast_grid(batch, self.contrast_targets(batch), weight)


@described
@dataclass
class ContrastiveConfig(EmbeddingConfig):
    """
    Configuration of [`ContrastiveTrainer`], in addition to the fields of [`EmbeddingConfig`].

    Args:
        reduction (`str`, *optional*, defaults to `"sum"`): How to reduce the losses over the grid: `"sum"` (m3BERT,
            Eq. 4) or `"mean"`.
    """

    objective_class = Contrastive
    objective_fields = (*EmbeddingConfig.objective_fields, "reduction")

    reduction: str = "sum"


class ContrastiveTrainer(EmbeddingTrainer):
    """
    Trains on text pairs with [`Contrastive`] and a [`ContrastiveConfig`]: with the other positives of the batch and
    hard negatives as candidates c, at every layer l and dim d of a grid,

        L = sum_l sum_d -log exp(cos(a_ld, p_ld) / tau) / sum_c exp(cos(a_ld, c_ld) / tau)

    ```python
    >>> args = ContrastiveConfig(output_dir="runs/model", grid="2,4,6x64,384")
    >>> trainer = ContrastiveTrainer("runs/elastic", args, train_dataset=pairs)  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    ```
    """
