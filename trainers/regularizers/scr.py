"""SCR of MIC: what a prefix says of a token is not to be said again behind it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..distributed import sum_over_ranks
from ..granularity import Granularity, Grid
from ..losses import correlation_penalty, prefix_residual_products, standardized, variance_floor
from ..nested import NestedStates
from ..objective import NestedBatch
from ._full_width import FullWidthObjective
from ._parts import weighted_sum


class SCR(FullWidthObjective):
    """
    Soft collapse regularisation (MIC, [2605.29987](https://huggingface.co/papers/2605.29987), section 2.1): at every
    layer and dim below the full width, [`correlation_penalty`] plus `variance_weight` times [`variance_floor`],
    averaged over layers and dims, the full width among them (section 2.3 divides by all). Correlation and deviations
    are means over the texts of all columns and all ranks; a text of one token has neither, and counts.

    Args:
        grid ([`Grid`]): Layers x dims. The largest dim has to be the backbone's full width.
        threshold (`float`, *optional*, defaults to 0.1): tau_corr, the correlation that is tolerated.
        variance_weight (`float`, *optional*, defaults to 0.1): lambda_var.

    Raises:
        ValueError: if the grid is not such a product, or an argument is out of range.
    """

    name = "scr"

    def __init__(self, grid: Grid, *, threshold: float = 0.1, variance_weight: float = 0.1):
        super().__init__(grid)
        if not 0 <= threshold <= 1:
            raise ValueError(f"The threshold of SCR is a correlation in 0..1; it is {threshold}.")
        self.threshold, self.variance_weight = threshold, variance_weight

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        texts, terms = self.stacked(self.token_states(batch)), {}
        counts = [text.attention_mask.new_tensor(len(text.attention_mask)) for text in texts]
        count = sum_over_ranks(torch.stack(counts).sum())
        for layer in self.layers:
            moments = [self.moments(text, layer) for text in texts]
            *correlations, deviations = (sum_over_ranks(sum(parts)) / count for parts in zip(*moments, strict=True))
            penalties = correlation_penalty(correlations, threshold=self.threshold)
            floors = variance_floor(deviations, self.dims)
            for part, losses in (("correlation", penalties), ("variance", floors)):
                for dim, loss in zip(self.dims, losses.unbind(), strict=True):
                    terms[f"{self.name}_{part}_{Granularity(layer, dim)}"] = loss
        return terms

    def moments(self, text: NestedStates, layer: int) -> list[torch.Tensor]:
        """Sums over the texts of a column: of the correlations with what lies behind each dim, and of deviations."""
        states, deviations = standardized(text.layers[layer], text.attention_mask)
        return [*prefix_residual_products(states, text.attention_mask, self.dims), deviations.sum(dim=0)]

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weights = {"correlation": 1.0, "variance": self.variance_weight}
        return weighted_sum(terms, weights) / len(self.grid)
