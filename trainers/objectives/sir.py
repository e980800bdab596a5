"""SIR of MIC: equal variances of a prefix's dims, and embeddings spread uniformly over the unit sphere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch

from ..core import papers
from ..core.granularity import Granularity, Grid
from ..core.objective import NestedBatch, Objective, Terms
from ..core.parallel.ranks import RankRows
from ..core.states import Pooling, check_pooling
from ..losses.isotropy import nested_uniformity, variance_variation
from .full_width import isotropy_layers


class SIR(Objective):
    """
    Spectral isotropy regularisation (MIC, [2605.29987](https://huggingface.co/papers/2605.29987), section 2.2): at
    every layer and dim, half of [`variance_variation`] plus half of [`nested_uniformity`] of pooled embeddings,
    averaged over layers and dims (section 2.3). The batch is that of all ranks. Each text column is a separate batch,
    so that a text is not pushed away from its positive; the losses of the columns are averaged.

    Args:
        grid ([`Grid`]): Layers x dims.
        scale (`float`, *optional*, defaults to 2.0): t of the uniformity.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` (section 2.2), `"cls"` or `"lasttoken"`.
        variation_weight (`float`, *optional*, defaults to 1.0): Weight of the coefficient of variation (section 2.2:
            1).
        uniformity_weight (`float`, *optional*, defaults to 1.0): Weight of the uniformity (section 2.2: 1).

    Raises:
        ValueError: if an argument is out of range; in forward, for a batch of one.
    """

    name = "sir"
    title = "SIR"
    equation = "MIC, section 2.2: equal variances of a prefix's dims, and uniformity of its embeddings"
    papers = (papers.MIC,)
    tags = ("mic",)
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
            raise ValueError(f"scale={scale} of SIR must be above 0.")
        check_pooling(pooling)
        if min(variation_weight, uniformity_weight) < 0 or variation_weight == uniformity_weight == 0:
            raise ValueError(
                f"SIR needs weights of 0 or more, and one above 0: variation_weight={variation_weight}, "
                f"uniformity_weight={uniformity_weight}."
            )
        self.scale, self.pooling = scale, pooling
        self.weights = {"variation": variation_weight, "uniformity": uniformity_weight}

    @classmethod
    def for_grid(cls, grid: Grid, *, layers: Iterable[int] | None = None, **arguments: Any) -> Self:
        """
        Build the objective at some layers, with the dims of the deepest layer of the trained grid.

        Args:
            grid ([`Grid`]): The trained granularities.
            layers (`list[int]`, *optional*): Layers of this objective. Default: at two thirds and five sixths of the
                depth (MIC, appendix D: 8 and 10 of 12).
            arguments: Arguments of the constructor.
        """
        return cls(
            Grid.product(layers or isotropy_layers(grid.full.layer), grid.dims_of(grid.full.layer)), **arguments
        )

    def forward(self, batch: NestedBatch) -> Terms:
        texts = list(batch.texts.values())
        terms: Terms = {}
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
            for part, column_losses in losses.items():
                weight = self.weights[part] / (2 * len(self.grid))
                for dim, loss in zip(dims, torch.stack(column_losses).mean(dim=0).unbind(), strict=True):
                    terms[self.term(Granularity(layer, dim), part, weight=weight)] = loss
        return terms
