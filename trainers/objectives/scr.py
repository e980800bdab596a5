"""SCR of MIC: the dims of a prefix should not correlate with the dims after it."""

from __future__ import annotations

import torch

from ..core import papers
from ..core.granularity import Granularity, Grid
from ..core.objective import NestedBatch, Terms
from ..core.parallel.ranks import sum_over_ranks
from ..core.states import NestedStates
from ..losses.isotropy import correlation_penalty, prefix_residual_products, standardized, variance_floor
from .full_width import FullWidthObjective, isotropy_layers


class SCR(FullWidthObjective):
    """
    Soft collapse regularisation (MIC, [2605.29987](https://huggingface.co/papers/2605.29987), section 2.1): at every
    layer and dim below the hidden size, [`correlation_penalty`] plus `variance_weight` times [`variance_floor`]. Their
    sum is divided by the number of granularities, including those at all dims (section 2.3). Correlations and
    standard deviations are means over the texts of all columns and all ranks; a text of one token contributes zeros.

    Args:
        grid ([`Grid`]): Layers x dims. The largest dim must be the backbone's hidden size.
        threshold (`float`, *optional*, defaults to 0.1): tau_corr; smaller correlations are not penalised.
        variance_weight (`float`, *optional*, defaults to 0.1): lambda_var, weight of the variance floor.

    Raises:
        ValueError: if the grid is not such a product, or an argument is out of range.
    """

    name = "scr"
    title = "SCR"
    equation = "MIC, section 2.1: thresholded correlation between a prefix and the rest, and a variance floor"
    papers = (papers.MIC,)
    tags = ("mic",)

    def __init__(self, grid: Grid, *, threshold: float = 0.1, variance_weight: float = 0.1):
        super().__init__(grid)
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold={threshold} of SCR is a correlation and must be in 0..1.")
        self.threshold, self.variance_weight = threshold, variance_weight

    @classmethod
    def default_layers(cls, depth: int, num_dims: int) -> list[int]:
        """The layers at two thirds and five sixths of the depth (MIC, appendix D: 8 and 10 of 12)."""
        return isotropy_layers(depth)

    def forward(self, batch: NestedBatch) -> Terms:
        texts = self.stacked(self.token_states(batch))
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
