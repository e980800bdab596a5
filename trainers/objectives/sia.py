"""SIA of MIPIC: at each layer, all dims teach every prefix the relations between the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..core import papers
from ..core.granularity import Granularity, Grid, evenly_spaced
from ..core.objective import NestedBatch, Terms
from ..core.parallel.ranks import RankRows
from ..losses.sia import attention_divergence, nested_token_counts, prefix_attention_scores, token_importance
from ..losses.token_cka import nested_token_cka
from .full_width import FullWidthObjective


# gamma of the smallest and the largest of these dims, linear in between (MIPIC, A.5: 0.2, 0.3, ..., 0.7 for
# six dims).
FIRST_SHARE, LAST_SHARE = 0.2, 0.7


class SIA(FullWidthObjective):
    """
    Self-distilled intra-relational alignment (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), section
    3.2): at every layer and every dim below the hidden size, [`attention_divergence`] plus [`nested_token_cka`],
    summed over layers and dims, averaged over the texts of all columns. The anchor token and padding are not compared,
    and m, of which `token_shares` are shares, does not count them; the loss of a text without other tokens is 0. Eqs.
    6 and 13 both sum over the dims; we read them as one sum.

    Args:
        grid ([`Grid`]): Layers x dims. The largest dim is the teacher and must be the backbone's hidden size.
        temperature (`float`, *optional*, defaults to 0.05): tau of the attention (Table 7 gives one tau for all
            losses). The products are not normalised: at 0.05 the attention of a wide encoder is nearly one-hot.
        attention_weight (`float`, *optional*, defaults to 1.0): Weight of the attention terms (Eq. 13: 1).
        cka_weight (`float`, *optional*, defaults to 1.0): Weight of the CKA terms (Eq. 13: 1).
        token_shares (`Sequence[float]`, *optional*): gamma, one value per dim below the hidden size: the share of the
            tokens of a text that CKA compares at that dim. Default: from 0.2 to 0.7 in equal steps.
        smallest_token_count (`int`, *optional*, defaults to 8): Minimum number of tokens that CKA compares, if a text
            has that many.

    Raises:
        ValueError: if the grid is not such a product, or an argument is out of range.
    """

    name = "sia"
    title = "SIA"
    equation = "MIPIC, section 3.2: attention matching and token CKA between prefixes and all dims"
    papers = (papers.MIPIC,)
    tags = ("mipic",)

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
            raise ValueError(f"temperature={temperature} of SIA must be above 0.")
        if min(attention_weight, cka_weight) < 0 or attention_weight == cka_weight == 0:
            raise ValueError(
                f"SIA needs weights of 0 or more, and one above 0: attention_weight={attention_weight}, "
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
        # P_i of all dims stacked, one parameter per layer. Initialised with the first rows of the identity, so that
        # the initial scores are those of the prefixes themselves; the paper does not specify the initialisation.
        start = torch.cat([torch.eye(dim, self.width) for dim in self.dims])
        self.projections = nn.ParameterDict(
            {str(layer): nn.Parameter(start.clone()) for layer in grid.layers} if attention_weight else {}
        )

    @classmethod
    def default_layers(cls, depth: int, num_dims: int) -> list[int]:
        """Evenly spaced layers, one per dim, including the last layer."""
        return evenly_spaced(range(1, depth + 1), num_dims)

    def forward(self, batch: NestedBatch) -> Terms:
        columns = self.token_states(batch)
        rows = RankRows.of(len(columns[0].attention_mask), columns[0].attention_mask.device)
        texts = self.stacked(columns)
        others = [
            text.attention_mask.bool().scatter(1, text.anchor_token_positions()[:, None], False) for text in texts
        ]
        # One entry per layer and column. The losses take all of them in one call, since they are many small tensors.
        states = [text.layers[layer] for layer in self.layers for text in texts]
        positions = [text.anchor_token_positions() for text in texts] * len(self.layers)
        anchors = [
            own[torch.arange(len(own), device=own.device), at] for own, at in zip(states, positions, strict=True)
        ]
        importances = [token_importance(own, anchor) for own, anchor in zip(states, anchors, strict=True)]
        others = others * len(self.layers)
        terms: Terms = {}
        if self.attention_weight:
            losses = self.attention_losses(states, anchors, importances, others)
            terms |= self.means("attention", self.attention_weight, losses, rows)
        if self.cka_weight:
            losses = self.cka_losses(states, importances, others)
            terms |= self.means("cka", self.cka_weight, losses, rows)
        return terms

    def attention_losses(
        self,
        states: Sequence[torch.Tensor],
        anchors: Sequence[torch.Tensor],
        importances: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """
        KL divergence of the anchor's attention over a prefix from that over all dims ([`attention_divergence`]).

        Args:
            states (`Sequence[torch.Tensor]`): Hidden states `(batch, tokens, width)`, one per layer and column.
            anchors (`Sequence[torch.Tensor]`): Hidden state of the anchor token of each text, `(batch, width)`.
            importances (`Sequence[torch.Tensor]`): [`token_importance`], `(batch, tokens)`.
            others (`Sequence[torch.BoolTensor]`): The real tokens other than the anchor, `(batch, tokens)`.

        Returns:
            `torch.Tensor` of shape `(layers * texts, dims)`
        """
        longest, columns = max(own.shape[1] for own in others), len(others) // len(self.layers)

        def joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.cat([nn.functional.pad(own, (0, longest - own.shape[-1])) for own in values])

        projections = [self.projections[str(layer)].split(self.dims) for layer in self.layers for _ in range(columns)]
        scores = [prefix_attention_scores(*each) for each in zip(states, anchors, projections, strict=True)]
        return attention_divergence(joined(scores), joined(importances), joined(others), temperature=self.temperature)

    def cka_losses(
        self, states: Sequence[torch.Tensor], importances: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """
        1 - CKA of the prefixes and the whole hidden states of the most important tokens ([`nested_token_cka`]).

        The arguments are those of [`~SIA.attention_losses`].

        Returns:
            `torch.Tensor` of shape `(layers * texts, dims)`
        """
        counts = torch.cat(
            [
                nested_token_counts(own.sum(dim=1), self.token_shares, smallest=self.smallest_token_count)
                for own in others
            ]
        )
        most = int(counts.max())
        orders = [
            importance.masked_fill(~own, -torch.inf).topk(min(most, own.shape[1]), dim=1).indices
            for importance, own in zip(importances, others, strict=True)
        ]
        return nested_token_cka(states, counts, self.dims, orders=orders)

    def means(self, name: str, weight: float, losses: torch.Tensor, rows: RankRows) -> Terms:
        """Terms of one kind: means over texts of losses `(layers * texts, dims)`, one term per layer and dim."""
        means = rows.mean(losses.unflatten(0, (len(self.layers), -1)).transpose(0, 1))
        terms = [self.term(Granularity(layer, dim), name, weight=weight) for layer in self.layers for dim in self.dims]
        return dict(zip(terms, means.flatten().unbind(), strict=True))


def check_shares(shares: Sequence[float], dims: Sequence[int]) -> None:
    """
    Check the token shares of the dims below the hidden size.

    Raises:
        ValueError: if there is not exactly one share per dim, or the shares are not ascending and within 0..1.
    """
    if len(shares) != len(dims):
        raise ValueError(f"token_shares has {len(shares)} values for {len(dims)} dims below the hidden size: {dims}.")
    if sorted(shares) != list(shares) or shares[0] <= 0 or shares[-1] > 1:
        raise ValueError(f"token_shares={list(shares)} must be ascending, above 0 and at most 1.")
