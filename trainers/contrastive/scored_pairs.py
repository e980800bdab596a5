"""Texts with scores: CoSENT and AnglE on scored pairs, MarginMSE and KL divergence on the scores of a reranker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...encode.granularity import Grid
from ...encode.ranks import RankRows
from ...encode.states import Pooling, check_pooling
from ...utils import papers
from ...utils.columns import labels_of
from ...utils.help_texts import described
from ...utils.papers import Identity
from ..core.arguments import TextTrainingArguments
from ..core.objective import REDUCTIONS, NestedBatch, Objective, Terms, require_known, require_positive
from ..embedding.scored_losses import (
    cosent,
    margin_mse,
    nested_pair_angles,
    nested_pair_cosines,
    nested_pair_products,
    score_divergence,
)
from ..embedding.trainer import EmbeddingTrainer


SIMILARITIES = {"cosine": nested_pair_cosines, "dot": nested_pair_products, "angle": nested_pair_angles}
# Loss -> its name, what it computes, and papers.
LOSSES = {
    "cosent": ("CoSENT", "CoSENT: more similar pairs have higher scores", (papers.COSENT,)),
    "angle": ("AnglE", "CoSENT with the angle similarity of AnglE", (papers.ANGLE, papers.COSENT)),
    "margin_mse": ("MarginMSE", "squared error to a reranker's margins", (papers.MARGIN_MSE,)),
    "kl": ("KL divergence", "KL divergence from a reranker's scores", (papers.TIGHTLY_COUPLED,)),
}
PAIR_LOSSES = ("cosent", "angle")


class ScoredPairs(Objective):
    """
    A loss on texts with scores at every granularity of a grid, summed or averaged over it. Pairs with a similarity:
    [`cosent`], also with the angles of AnglE. A query, its positive and its negatives with the scores of a reranker:
    [`margin_mse`] or [`score_divergence`]. The batch spans all ranks.

    Args:
        grid ([`Grid`]): The granularities to train.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"`, `"cls"` or `"lasttoken"`.

    The other arguments are fields of [`ScoredPairsConfig`].

    Raises:
        ValueError: if an argument is out of range; in forward, if the batch has not as many scores as the loss needs.
    """

    name = "scored"
    tags = ("scored-pairs", "matryoshka", "sentence-similarity")
    pooling: Pooling

    def __init__(
        self,
        grid: Grid,
        *,
        loss: str = "cosent",
        similarity: str = "cosine",
        temperature: float = 0.05,
        score_temperature: float = 1.0,
        pooling: Pooling = "mean",
        reduction: str = "sum",
    ):
        super().__init__(grid)
        require_known(LOSSES, loss=loss)
        require_known(("cosine", "dot"), similarity=similarity)
        require_known(REDUCTIONS, reduction=reduction)
        require_positive(temperature=temperature, score_temperature=score_temperature)
        check_pooling(pooling)
        self.loss, self.pooling, self.reduction = loss, pooling, reduction
        self.measure = SIMILARITIES["angle" if loss == "angle" else similarity]
        self.temperature, self.score_temperature = temperature, score_temperature

    @property
    def identity(self) -> Identity:
        """Name, equation and papers of the loss."""
        title, equation, cited = LOSSES[self.loss]
        return Identity(title, f"{equation}, at every granularity", cited, self.tags)

    def forward(self, batch: NestedBatch) -> Terms:
        anchors, *others = batch.texts.values()
        if batch.labels is None:
            raise ValueError("Training on scores needs the scores of the texts, as labels.")
        scores, columns = batch.labels, len(others)
        if self.loss not in PAIR_LOSSES and scores.ndim == 1:
            scores = scores[:, None]
        legal = {"kl": [(columns,)], "margin_mse": [(columns,), (columns - 1,)]}
        if scores.shape[1:] not in legal.get(self.loss, [()]):
            raise ValueError(f"{self.loss} cannot use scores of shape {tuple(scores.shape)} for {columns} candidates.")
        rows = RankRows.of(len(scores), scores.device)
        scores, losses = rows.gather(scores), []
        for layer in self.layers:
            dims, first = self.grid.dims_of(layer), anchors.pooled(layer, self.pooling)
            measured = [self.measure(first, each.pooled(layer, self.pooling), dims) for each in others]
            similarities = rows.gather(torch.stack(measured, dim=-1).transpose(0, 1)).transpose(0, 1)
            losses.append(self.losses(similarities, scores))
        weight = 1 / len(self.grid) if self.reduction == "mean" else 1.0
        every = zip(self.grid, torch.cat(losses), strict=True)
        return {self.term(g, self.loss, weight=weight): loss for g, loss in every}

    def losses(self, similarities: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Loss at each dim, from similarities `(dims, batch, candidates)`."""
        if self.loss in PAIR_LOSSES:
            return cosent(similarities[..., 0], scores, temperature=self.temperature)
        if self.loss == "margin_mse":
            return margin_mse(similarities, scores)
        return score_divergence(
            similarities, scores, temperature=self.temperature, score_temperature=self.score_temperature
        )


@described
@dataclass
class ScoredPairsConfig(TextTrainingArguments):
    """
    Configuration of [`ScoredPairsTrainer`], in addition to the fields of [`TextTrainingArguments`].

    Args:
        loss (`str`, *optional*, defaults to `"cosent"`): `cosent` or `angle` for pairs with a similarity; `margin_mse`
            or `kl` for a query, a positive and negatives with the scores of a reranker.
        similarity (`str`, *optional*, defaults to `"cosine"`): `cosine` or `dot`. Scores of rerankers are rather like
            dot products: MarginMSE is usually trained with `dot`.
        temperature (`float`, *optional*, defaults to 0.05): Temperature tau; similarities are divided by it.
        score_column (`str`, *optional*): Column with the score of a pair, or with a list of scores: of the positive
            and the negatives, or for `margin_mse` the margins. Default: `score`, `scores`, `label` or `labels`.
        score_temperature (`float`, *optional*, defaults to 1.0): Temperature of the reranker's scores, for `kl`.
        reduction (`str`, *optional*, defaults to `"sum"`): How to reduce the losses over the grid: `sum` or `mean`.
    """

    objective_class = ScoredPairs
    objective_fields = ("pooling", "loss", "similarity", "temperature", "score_temperature", "reduction")

    loss: str = "cosent"
    similarity: str = "cosine"  # type: ignore[misc]  # a field here
    temperature: float = 0.05
    score_column: str | None = None
    score_temperature: float = 1.0
    reduction: str = "sum"

    def columns_of(self, *datasets: Any) -> list[str]:
        columns = super().columns_of(*datasets)
        if len(columns) < 2 or (len(columns) == 2) != (self.loss in PAIR_LOSSES):
            needed = "two text columns" if self.loss in PAIR_LOSSES else "three text columns or more"
            raise ValueError(f"loss={self.loss!r} needs {needed}; found: {', '.join(columns) or 'none'}.")
        return columns

    def label_column_of(self, *datasets: Any) -> str:
        if self.score_column is not None:
            return self.score_column
        labels = labels_of(self.all_columns(*datasets))
        if len(labels) != 1:
            raise ValueError(f"Found {', '.join(labels) or 'no column'} with scores: name one in score_column.")
        return labels[0]


class ScoredPairsTrainer(EmbeddingTrainer):
    """Trains with [`ScoredPairs`] and a [`ScoredPairsConfig`]."""
