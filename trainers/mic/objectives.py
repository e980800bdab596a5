"""The regularisers of MIC: SCR, against correlation of a prefix with the dims after it, and SIR, for isotropy."""

from __future__ import annotations

import torch

from ...encode.granularity import Granularity, Grid
from ...encode.ranks import RankRows, sum_over_ranks
from ...encode.states import NestedStates, Pooling, check_pooling
from ...utils import papers
from ..core.objective import NestedBatch, Terms
from ..embedding.token_grid import OwnLayersObjective, TokenGridObjective
from .losses import (
    correlation_penalty,
    nested_uniformity,
    prefix_residual_products,
    standardized,
    variance_floor,
    variance_variation,
)


class SCR(TokenGridObjective):
    """
    Soft collapse regularisation (MIC, [2605.29987](https://huggingface.co/papers/2605.29987), section 2.1): at every
    layer and dim below the hidden size, [`correlation_penalty`] plus `variance_weight` times [`variance_floor`]. Their
    sum is divided by the number of granularities, including those at all dims (section 2.3). Correlations and
    standard deviations are means over the texts of all columns and all ranks; a text of one token contributes zeros.
    Both dropout views count as texts of one batch, a larger sample: here no text is compared with another, and so,
    unlike in [`SIR`], none is pushed away from its view.

    Args:
        grid ([`Grid`]): Layers x dims. The largest dim must be the backbone's hidden size.
        threshold (`float`, *optional*, defaults to 0.1): tau_corr; smaller correlations are not penalised.
        variance_weight (`float`, *optional*, defaults to 0.1): lambda_var, weight of the variance floor.
    """

    name = "scr"
    title = "SCR"
    equation = "MIC, section 2.1: thresholded correlation between a prefix and the rest, and a variance floor"
    papers = (papers.MIC,)
    tags = ("mic",)

    def __init__(self, grid: Grid, *, threshold: float = 0.1, variance_weight: float = 0.1):
        super().__init__(grid)
        self.threshold, self.variance_weight = threshold, variance_weight

    def forward(self, batch: NestedBatch) -> Terms:
        texts = self.token_states(batch)
        terms: Terms = {}
        counts = [text.attention_mask.new_tensor(len(text.attention_mask)) for text in texts]
        count = sum_over_ranks(torch.stack(counts).sum())
        for layer in self.layers:
            moments = [self.moments(text, layer) for text in texts]
            *correlations, deviations = (sum_over_ranks(sum(parts)) / count for parts in zip(*moments, strict=True))
            penalties = correlation_penalty(correlations, threshold=self.threshold)
            floors = variance_floor(deviations, self.dims)
            for part, weight, losses in (("correlation", 1.0, penalties), ("variance", self.variance_weight, floors)):
                for dim, loss in zip(self.dims, losses.unbind(), strict=True):
                    terms[self.term(Granularity(layer, dim), part, weight=weight / len(self.grid))] = loss
        return terms

    def moments(self, text: NestedStates, layer: int) -> list[torch.Tensor]:
        """Sums over the texts of a column: the correlations of each prefix with the dims after it, one tensor per dim,
        then the standard deviations."""
        states, deviations = standardized(text.layers[layer], text.attention_mask)
        return [*prefix_residual_products(states, text.attention_mask, self.dims), deviations.sum(dim=0)]


class SIR(OwnLayersObjective):
    """
    Spectral isotropy regularisation (MIC, [2605.29987](https://huggingface.co/papers/2605.29987), section 2.2): at
    every layer and dim, half of [`variance_variation`] plus half of [`nested_uniformity`] of pooled embeddings,
    averaged over layers and dims (section 2.3). The batch spans all ranks. Each text column is a separate batch,
    so that a text is not pushed away from its positive; the losses of the columns are averaged.

    Args:
        grid ([`Grid`]): Layers x dims.
        scale (`float`, *optional*, defaults to 2.0): t of the uniformity.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` (section 2.2), `"cls"` or `"lasttoken"`.
        variation_weight (`float`, *optional*, defaults to 1.0): Weight of the coefficient of variation (section 2.2:
            1).
        uniformity_weight (`float`, *optional*, defaults to 1.0): Weight of the uniformity (section 2.2: 1).

    Raises:
        ValueError: if the pooling is unknown; in forward, for a batch of one.
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
        check_pooling(pooling)
        self.scale, self.pooling = scale, pooling
        self.weights = {"variation": variation_weight, "uniformity": uniformity_weight}

    def forward(self, batch: NestedBatch) -> Terms:
        texts = list(batch.texts.values())
        terms: Terms = {}
        first = texts[0].layers[self.layers[0]]
        rows = RankRows.of(len(first), first.device)
        for layer in self.layers:
            dims = self.grid.dims_of(layer)
            batches = [rows.gather(text.pooled(layer, self.pooling)) for text in texts]
            losses = {
                "variation": [variance_variation(vectors, dims) for vectors in batches],
                "uniformity": [nested_uniformity(vectors, dims, scale=self.scale) for vectors in batches],
            }
            for part, column_losses in losses.items():
                weight = self.weights[part] / (2 * len(self.grid))
                for dim, loss in zip(dims, torch.stack(column_losses).mean(dim=0).unbind(), strict=True):
                    if weight:
                        terms[self.term(Granularity(layer, dim), part, weight=weight)] = loss
        return terms
