"""Cross-depth contrast: queries read at any depth, documents at the last layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...encode.granularity import EncoderConfig, Grid
from ..core.objective import Identity, NestedBatch, Terms, require_reduction
from ..shared.embedding import EmbeddingObjective


class CrossDepth(EmbeddingObjective):
    """
    InfoNCE between depths, for search with asymmetric encoders: the anchor at every layer and dim of a grid, among the
    positives (and hard negatives) at the document layer, at the same dim. Both sides carry gradient.

    The layers must share one space, as those of a model with exits do.

    Args:
        grid ([`Grid`]): The granularities of the anchors.
        document_layer (`int`, *optional*): Layer of positives and hard negatives. Default: the deepest of the grid.
        reduction (`str`, *optional*, defaults to `"sum"`): How to reduce the losses over the grid: `"sum"` or
            `"mean"`.
        kwargs: Arguments of [`EmbeddingObjective`].

    Raises:
        ValueError: as [`EmbeddingObjective`], if the reduction is unknown, or if the document layer is below a layer
            of the grid.
    """

    name = "cross_depth"
    title = "CrossDepth"
    tags = ("contrastive", "matryoshka", "sentence-similarity")

    def __init__(self, grid: Grid, *, document_layer: int | None = None, reduction: str = "sum", **kwargs: Any):
        super().__init__(grid, **kwargs)
        deepest = grid.full.layer
        if document_layer is not None and document_layer < deepest:
            raise ValueError(f"document_layer={document_layer} must be {deepest} or more, the deepest of the grid.")
        self.document_layer = deepest if document_layer is None else document_layer
        self.reduction = require_reduction(reduction)

    @property
    def identity(self) -> Identity:
        """InfoNCE of the anchor at every granularity against positives at the document layer."""
        equation = (
            f"InfoNCE of the anchor at every granularity against positives at layer {self.document_layer}, "
            f"{self.reduction} over the grid"
        )
        return replace(super().identity, equation=equation)

    @property
    def layers(self) -> list[int]:
        return sorted({*self.grid.layers, self.document_layer})

    def validate(self, config: EncoderConfig) -> None:
        super().validate(config)
        Grid.product([self.document_layer], self.grid.dims).validate(config)

    def forward(self, batch: NestedBatch) -> Terms:
        targets, losses = self.contrast_targets(batch), {}
        anchors, *others = batch.texts.values()
        documents = [text.pooled(self.document_layer, self.pooling) for text in others]
        for layer in self.grid.layers:
            dims = self.grid.dims_of(layer)
            queries = anchors.pooled(layer, self.pooling)
            losses[layer] = dict(zip(dims, self.contrast([queries, *documents], dims, targets).unbind(), strict=True))
        weight = 1 / len(self.grid) if self.reduction == "mean" else 1.0
        return {self.term(g, weight=weight): losses[g.layer][g.dim] for g in self.grid}
