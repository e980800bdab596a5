"""SIA of MIPIC: at each layer, the full width teaches every prefix how the tokens of a text relate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..distributed import RankRows
from ..granularity import Granularity, Grid
from ..losses import (
    attention_divergence,
    nested_token_cka,
    nested_token_counts,
    prefix_attention_scores,
    token_importance,
)
from ..objective import NestedBatch
from ._full_width import FullWidthObjective
from ._parts import weighted_sum


# gamma of the shortest dim and of the longest, linear between (MIPIC, A.5: 0.2, 0.3, ..., 0.7 for six dims).
FIRST_SHARE, LAST_SHARE = 0.2, 0.7


class SIA(FullWidthObjective):
    """
    Self-distilled intra-relational alignment (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), section
    3.2): at every layer and every dim below the full width, [`attention_divergence`] plus [`nested_token_cka`], summed
    over layers and dims, averaged over the texts of all columns. The anchor and padding are no tokens here; a text
    without other tokens counts 0.

    Args:
        grid ([`Grid`]): Layers x dims. The largest dim is the teacher, and has to be the backbone's full width.
        temperature (`float`, *optional*, defaults to 0.05): tau of the attention (Table 7 has one tau for everything).
            The products are not normalised: at 0.05 the attention of a wide encoder is nearly one-hot.
        attention_weight (`float`, *optional*, defaults to 1.0): Of the attention terms (Eq. 13: 1).
        cka_weight (`float`, *optional*, defaults to 1.0): Of the CKA terms (Eq. 13: 1).
        token_shares (`Sequence[float]`, *optional*): gamma, for each dim below the full width: the share of the tokens
            that it is aligned on. Default: from 0.2 to 0.7 in equal steps.
        smallest_token_count (`int`, *optional*, defaults to 8): The fewest tokens, where a text has as many.

    Raises:
        ValueError: if the grid is not such a product, or an argument is out of range.
    """

    name = "sia"

    def __init__(
        self,
        grid: Grid,
        *,
        temperature: float = 0.05,
        attention_weight: float = 1.0,
        cka_weight: float = 1.0,
        token_shares: Sequence[float] | None = None,
        smallest_token_count: int = 8,
    ):
        super().__init__(grid)
        if temperature <= 0:
            raise ValueError(f"The temperature of SIA must be above 0; it is {temperature}.")
        if min(attention_weight, cka_weight) < 0 or attention_weight == cka_weight == 0:
            raise ValueError(
                f"SIA needs a weight above 0, and none below: attention_weight={attention_weight}, "
                f"cka_weight={cka_weight}."
            )
        if token_shares is None:
            token_shares = torch.linspace(FIRST_SHARE, LAST_SHARE, len(self.dims), dtype=torch.float64).tolist()
        check_shares(token_shares, self.dims)
        if smallest_token_count < 1:
            raise ValueError(f"smallest_token_count={smallest_token_count} must be 1 or more.")
        self.temperature, self.token_shares = temperature, list(token_shares)
        self.attention_weight, self.cka_weight = attention_weight, cka_weight
        self.smallest_token_count = smallest_token_count
        # P_i of every dim below each other, one parameter a layer. Started as the first rows of the identity, so that
        # the first scores are those of the prefixes themselves; the paper says nothing of it.
        start = torch.cat([torch.eye(dim, self.width) for dim in self.dims])
        self.projections = nn.ParameterDict(
            {str(layer): nn.Parameter(start.clone()) for layer in grid.layers} if attention_weight else {}
        )

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        columns = self.token_states(batch)
        rows = RankRows.of(len(columns[0].attention_mask), columns[0].attention_mask.device)
        texts = self.stacked(columns)
        tokens = [text.attention_mask.bool().scatter(1, text.anchor_positions()[:, None], False) for text in texts]
        counts = [
            nested_token_counts(own.sum(dim=1), self.token_shares, smallest=self.smallest_token_count)
            for own in tokens
        ]
        longest, longest_set = max(own.shape[1] for own in tokens), int(torch.cat(counts).max())
        scores, importances, leading = [], [], []
        for layer in self.layers:
            for text, own in zip(texts, tokens, strict=True):
                states, padding = text.layers[layer], longest - own.shape[1]
                anchors = states[torch.arange(len(states), device=states.device), text.anchor_positions()]
                importance = token_importance(states, anchors)
                if self.attention_weight:
                    projections = self.projections[str(layer)].split(self.dims)
                    scores.append(
                        nn.functional.pad(prefix_attention_scores(states, anchors, projections), (0, padding))
                    )
                    importances.append(nn.functional.pad(importance, (0, padding)))
                if self.cka_weight:
                    leading.append(leading_tokens(states, importance.masked_fill(~own, -torch.inf), longest_set))
        terms: dict[str, torch.Tensor] = {}
        # All layers and columns at once: there are many of them, and each may be small.
        if self.attention_weight:
            real = torch.cat([nn.functional.pad(own, (0, longest - own.shape[1])) for own in tokens])
            losses = attention_divergence(
                torch.cat(scores),
                torch.cat(importances),
                real.repeat(len(self.layers), 1),
                temperature=self.temperature,
            )
            terms |= self.named("attention", losses, rows)
        if self.cka_weight:
            losses = nested_token_cka(torch.cat(leading), torch.cat(counts).repeat(len(self.layers), 1), self.dims)
            terms |= self.named("cka", losses, rows)
        return terms

    def named(self, part: str, losses: torch.Tensor, rows: RankRows) -> dict[str, torch.Tensor]:
        """Means of the losses of all layers and columns `(layers * texts, dims)`, under the names that are logged."""
        means = rows.mean(losses.unflatten(0, (len(self.layers), -1)).transpose(0, 1))
        names = [f"{self.name}_{part}_{Granularity(layer, dim)}" for layer in self.layers for dim in self.dims]
        return dict(zip(names, means.flatten().unbind(), strict=True))

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return weighted_sum(terms, {"attention": self.attention_weight, "cka": self.cka_weight})


def leading_tokens(states: torch.Tensor, importance: torch.Tensor, count: int) -> torch.Tensor:
    """The states of the `count` tokens of each text `(batch, tokens, hidden_size)` that `importance` ranks first, in
    that order; zeros where there are not as many."""
    order = importance.topk(min(count, importance.shape[1]), dim=1).indices
    ordered = states.gather(1, order[:, :, None].expand(-1, -1, states.shape[2]))
    return nn.functional.pad(ordered, (0, 0, 0, count - ordered.shape[1]))


def check_shares(shares: Sequence[float], dims: Sequence[int]) -> None:
    """
    Check a schedule of token shares.

    Raises:
        ValueError: if it does not have one share a dim, or they are not ascending and within 0..1.
    """
    if len(shares) != len(dims):
        raise ValueError(f"token_shares has {len(shares)} values for {len(dims)} dims below the full width: {dims}.")
    if sorted(shares) != list(shares) or shares[0] <= 0 or shares[-1] > 1:
        raise ValueError(f"token_shares={list(shares)} must be ascending, above 0 and at most 1: the sets are nested.")
