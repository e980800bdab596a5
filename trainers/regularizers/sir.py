"""SIR of MIC: the dims of a prefix vary alike, and the prefixes of texts spread over the sphere."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..distributed import RankRows
from ..granularity import Granularity, Grid
from ..losses import nested_uniformity, variance_variation
from ..nested import POOLINGS, Pooling
from ..objective import NestedBatch, Objective
from ._parts import weighted_sum


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
        variation_weight (`float`, *optional*, defaults to 1.0): Of the coefficient of variation (section 2.2: 1).
        uniformity_weight (`float`, *optional*, defaults to 1.0): Of the uniformity (section 2.2: 1).

    Raises:
        ValueError: if an argument is out of range; in forward, for a batch of one.
    """

    name = "sir"
    pooling: Pooling

    def __init__(
        self,
        grid: Grid,
        *,
        scale: float = 2.0,
        pooling: Pooling = "mean",
        variation_weight: float = 1.0,
        uniformity_weight: float = 1.0,
    ):
        super().__init__(grid)
        if scale <= 0:
            raise ValueError(f"The scale of SIR must be above 0; it is {scale}.")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling={pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")
        if min(variation_weight, uniformity_weight) < 0 or variation_weight == uniformity_weight == 0:
            raise ValueError(
                f"SIR needs a weight above 0, and none below: variation_weight={variation_weight}, "
                f"uniformity_weight={uniformity_weight}."
            )
        self.scale, self.pooling = scale, pooling
        self.weights = {"variation": variation_weight, "uniformity": uniformity_weight}

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        texts, terms = list(batch.texts.values()), {}
        first = texts[0].layers[self.layers[0]]
        rows = RankRows.of(len(first), first.device)
        for layer in self.layers:
            dims = self.grid.dims_of(layer)
            batches = [rows.gather(text.pooled(layer, self.pooling)) for text in texts]
            losses = {}
            if self.weights["variation"]:
                losses["variation"] = [variance_variation(vectors, dims) for vectors in batches]
            if self.weights["uniformity"]:
                losses["uniformity"] = [nested_uniformity(vectors, dims, scale=self.scale) for vectors in batches]
            for part, of_columns in losses.items():
                for dim, loss in zip(dims, torch.stack(of_columns).mean(dim=0).unbind(), strict=True):
                    terms[f"{self.name}_{part}_{Granularity(layer, dim)}"] = loss
        return terms

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return weighted_sum(terms, self.weights) / (2 * len(self.grid))
