"""SIA of MIPIC: at each layer, all dims teach every prefix the relations between the tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...encode.granularity import Granularity, Grid, evenly_spaced
from ...encode.ranks import RankRows
from ...encode.states import NestedStates
from ...utils import papers
from ..core.objective import NestedBatch, Terms
from ..embedding.token_grid import TokenGridObjective
from .losses import (
    attention_divergence,
    nested_token_cka,
    nested_token_counts,
    prefix_attention_scores,
    token_importance,
)


# gamma of the smallest and the largest of these dims, linear in between (MIPIC, A.5: 0.2, 0.3, ..., 0.7 for
# six dims).
FIRST_SHARE, LAST_SHARE = 0.2, 0.7


class SIA(TokenGridObjective):
    """
    Self-distilled intra-relational alignment (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), section
    3.2): at every layer and every dim below the hidden size, [`attention_divergence`] plus [`nested_token_cka`],
    summed over layers and dims, averaged over the texts of all columns. The anchor token and padding are not compared,
    and m, of which `token_shares` are shares, does not count them; the loss of a text without other tokens is 0. Eqs.
    6 and 13 both sum over the dims; we read them as one sum. P_i, which has no layer in the paper, is one per layer.

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
        if token_shares is None:
            token_shares = torch.linspace(FIRST_SHARE, LAST_SHARE, len(self.dims), dtype=torch.float64).tolist()
        self.token_shares = shares = list(token_shares)
        if len(shares) != len(self.dims) or sorted(shares) != shares or shares[0] <= 0 or shares[-1] > 1:
            raise ValueError(
                f"token_shares={shares} must be ascending, above 0 and at most 1: one value for each of the dims "
                f"{self.dims} below the hidden size."
            )
        if temperature <= 0 or min(attention_weight, cka_weight) < 0:
            raise ValueError(f"SIA needs a temperature above 0, not {temperature}, and weights of 0 or more.")
        self.temperature, self.smallest_token_count = temperature, smallest_token_count
        self.weights = {"attention": attention_weight, "cka": cka_weight}
        # P_i of all dims stacked. Initialised with the first rows of the identity, so that
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
        texts = self.token_states(batch)
        rows = RankRows.of(len(texts[0].attention_mask), texts[0].attention_mask.device)
        columns = [self.losses(text) for text in texts]
        means = {name: rows.mean(torch.cat([losses[name] for losses in columns])) for name in columns[0]}
        return {
            self.term(Granularity(layer, dim), name, weight=self.weights[name]): loss
            for number, layer in enumerate(self.layers)
            for name, mean in means.items()
            for dim, loss in zip(self.dims, mean[number].unbind(), strict=True)
        }

    def losses(self, text: NestedStates) -> dict[str, torch.Tensor]:
        """The losses of one text column, `(batch, layers, dims)` per kind."""
        positions, layers = text.anchor_token_positions(), self.layers
        others = text.attention_mask.bool().scatter(1, positions[:, None], False)
        counts = nested_token_counts(others.sum(dim=1), self.token_shares, smallest=self.smallest_token_count)
        most = int(counts.max())
        texts = torch.arange(len(counts), device=counts.device)[:, None]
        states = [text.layers[layer] for layer in layers]
        anchors = [hidden[texts[:, 0], positions] for hidden in states]
        importance = [token_importance(*each) for each in zip(states, anchors, strict=True)]
        losses = {}
        if self.weights["attention"]:
            projections = [self.projections[str(layer)] for layer in layers]
            losses["attention"] = attention_divergence(
                prefix_attention_scores(states, anchors, projections, self.dims),
                torch.cat(importance),
                others.repeat(len(layers), 1),
                temperature=self.temperature,
            )
        if self.weights["cka"]:
            orders = [scores.masked_fill(~others, -torch.inf).topk(most, dim=1).indices for scores in importance]
            chosen = torch.cat([hidden[texts, order] for hidden, order in zip(states, orders, strict=True)])
            losses["cka"] = nested_token_cka(chosen, counts.repeat(len(layers), 1), self.dims)
        return {name: loss.unflatten(0, (len(layers), -1)).transpose(0, 1) for name, loss in losses.items()}
