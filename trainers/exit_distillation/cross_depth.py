"""Cross-depth contrast: queries read at any depth, documents at the last layer."""

from __future__ import annotations

from typing import Any

import torch

from ...encode.granularity import EncoderConfig, Grid
from ...utils.papers import Identity
from ..contrastive.contrastive import Contrastive
from ..core.objective import NestedBatch


class CrossDepth(Contrastive):
    """
    InfoNCE between depths, for search with asymmetric encoders: the anchor at every layer and dim of a grid, among the
    positives (and hard negatives) at the document layer, at the same dim. Both sides carry gradient.

    The layers must share one space, as those of a model with exits do.

    Args:
        grid ([`Grid`]): The granularities of the anchors.
        document_layer (`int`, *optional*): Layer of positives and hard negatives. Default: the deepest of the grid.
        kwargs: Arguments of [`Contrastive`].

    Raises:
        ValueError: as [`Contrastive`], or if the document layer is below a layer of the grid.
    """

    name = "cross_depth"
    title = "CrossDepth"

    def __init__(self, grid: Grid, *, document_layer: int | None = None, **kwargs: Any):
        super().__init__(grid, **kwargs)
        deepest = grid.full.layer
        if document_layer is not None and document_layer < deepest:
            raise ValueError(f"document_layer={document_layer} must be {deepest} or more, the deepest of the grid.")
        self.document_layer = deepest if document_layer is None else document_layer

    @property
    def identity(self) -> Identity:
        """InfoNCE of the anchor at every granularity against positives at the document layer."""
        equation = (
            f"InfoNCE of the anchor at every granularity against positives at layer {self.document_layer}, "
            f"{self.reduction} over the grid"
        )
        return Identity(self.title, equation, (), self.tags)

    @property
    def layers(self) -> list[int]:
        return sorted({*self.grid.layers, self.document_layer})

    def validate(self, config: EncoderConfig) -> None:
        super().validate(config)
        Grid.product([self.document_layer], self.grid.dims).validate(config)

    def embeddings(self, batch: NestedBatch, layer: int) -> list[torch.Tensor]:
        """The anchors at a layer, and the other columns at the document layer."""
        anchors, *others = batch.texts.values()
        documents = [text.pooled(self.document_layer, self.pooling) for text in others]
        return [anchors.pooled(layer, self.pooling), *documents]
