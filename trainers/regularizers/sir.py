"""SIR of MIC: the dims of a prefix vary alike, and the prefixes of texts spread over the sphere."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..distributed import RankRows
from ..granularity import Granularity, Grid
from ..losses import nested_uniformity, variance_variation
from ..nested import POOLINGS, Pooling
from ..objective import NestedBatch, Objective


class SIR(Objective):
    """
    Spectral isotropy regularisation (MIC, [2605.29987](https://huggingface.co/papers/2605.29987), section 2.2): at
    every layer and dim, half of [`variance_variation`] and half of [`nested_uniformity`] of pooled embeddings,
    averaged over layers and dims (section 2.3). The batch is that of all ranks; the two views of a text, or the
    columns of a pair, are batches of their own, averaged: a text is not driven away from its positive.

    Args:
        grid ([`Grid`]): Layers x dims.
        scale (`float`, *optional*, defaults to 2.0): t of the uniformity.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` (section 2.2) or `"anchor"`.

    Raises:
        ValueError: if an argument is out of range; in forward, for a batch of one.
    """

    name = "sir"
    pooling: Pooling

    def __init__(self, grid: Grid, *, scale: float = 2.0, pooling: Pooling = "mean"):
        super().__init__(grid)
        if scale <= 0:
            raise ValueError(f"The scale of SIR must be above 0; it is {scale}.")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")
        self.scale, self.pooling = scale, pooling

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        texts, terms = list(batch.texts.values()), {}
        mask = texts[0].layers[self.layers[0]]
        rows = [RankRows.of(len(text.layers[self.layers[0]]), mask.device) for text in texts]
        for layer in self.layers:
            dims = self.grid.dims_of(layer)
            batches = [own.gather(text.pooled(layer, self.pooling)) for own, text in zip(rows, texts, strict=True)]
            variations = torch.stack([variance_variation(vectors, dims) for vectors in batches]).mean(dim=0)
            uniformities = torch.stack(
                [nested_uniformity(vectors, dims, scale=self.scale) for vectors in batches]
            ).mean(dim=0)
            for part, losses in (("variation", variations), ("uniformity", uniformities)):
                for dim, loss in zip(dims, losses.unbind(), strict=True):
                    terms[f"{self.name}_{part}_{Granularity(layer, dim)}"] = loss
        return terms

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return super().total(terms) / (2 * len(self.grid))
