"""Base class and configuration of the contrastive objectives on pooled embeddings."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from ...encode.granularity import Grid
from ...encode.ranks import RankRows
from ...encode.states import Pooling, check_pooling
from ...utils.columns import labels_of
from ...utils.help_texts import described
from ..core.arguments import TextTrainingArguments
from ..core.objective import NestedBatch, Objective, Terms, require_positive
from .info_nce import nested_info_nce, with_own_negatives


logger = logging.getLogger(__name__)
LARGEST_LEARNED_SCALE = 100.0
NO_TEXT = -1


@dataclass(frozen=True)
class ContrastTargets:
    """
    The positive of each anchor in a batch, and the text ids that keep equal texts from being negatives.

    Args:
        rows ([`RankRows`]): How the pairs are distributed over ranks.
        positives (`torch.Tensor` of shape `(batch,)`): Row of each anchor's positive among all candidates.
        anchor_ids (`torch.Tensor` of shape `(batch, 2)`, *optional*): Text ids of each pair: positive, anchor.
        candidate_ids (`list[torch.Tensor]`, *optional*): For the positives and each column of hard negatives, the same
            ids of all candidates `(candidates, 2)`. Of a hard negative, which has no anchor, the second one is -1.
        equal_negatives (`torch.Tensor` of shape `(batch, hard negatives)`, *optional*): With `own_negatives`, mask of
            the hard negatives that are equal to a text of their pair.
    """

    rows: RankRows
    positives: torch.Tensor
    anchor_ids: torch.Tensor | None = None
    candidate_ids: list[torch.Tensor] | None = None
    equal_negatives: torch.Tensor | None = None

    def ids(self, columns: int, *, reverse: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The ids of the anchors and of the candidates in some columns, `(texts, 3)` each. A candidate is no negative
        if one of three pairs is equal: its text and the positive, its query and the anchor, its text and the
        anchor. In `reverse`, positives are anchors, and anchors are texts."""
        if self.anchor_ids is None or self.candidate_ids is None:
            return None, None
        sides = self.anchor_ids, torch.cat(self.candidate_ids[:columns])
        (positive, anchor), (text, query) = ((side.flip(1) if reverse else side).unbind(1) for side in sides)
        return torch.stack([positive, anchor, anchor], dim=1), torch.stack([text, query, text], dim=1)


class EmbeddingObjective(Objective):
    """
    Base class of objectives that contrast pooled embeddings. The first text column holds the anchors, the second one
    their positives. Further columns hold hard negatives, which are negatives of every anchor on every rank, as in the
    released code of IBKD, or with `own_negatives` of the anchor in their row alone, as in its Eq. 10.

    Args:
        grid ([`Grid`]): The granularities to train.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, `"cls"` or `"lasttoken"`.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Exclude false negatives of an anchor: texts equal to
            itself or its own positive, and positives of an equal anchor. Needs the `text_ids` of a batch, which
            [`TextColumnsCollator`] makes; without them nothing is masked.

    The other arguments are fields of [`EmbeddingConfig`]; `symmetric` averages the losses of both directions.

    Raises:
        ValueError: if the temperature is not above 0; in forward, for a batch of one pair without hard negatives, or
            with `own_negatives` and no hard negatives.
    """

    pooling: Pooling

    def __init__(
        self,
        grid: Grid,
        *,
        temperature: float = 0.05,
        pooling: Pooling = "mean",
        symmetric: bool = False,
        mask_duplicates: bool = True,
        learn_temperature: bool = False,
        ring: bool = False,
        gather_negatives: bool = True,
        own_negatives: bool = False,
    ):
        super().__init__(grid)
        require_positive(temperature=temperature)
        check_pooling(pooling)
        self.pooling, self.symmetric, self.mask_duplicates, self.ring = pooling, symmetric, mask_duplicates, ring
        self.gather_negatives, self.own_negatives = gather_negatives, own_negatives
        self._temperature = temperature
        # One element, since FSDP refuses parameters without dims.
        self.log_scale = nn.Parameter(torch.tensor([-math.log(temperature)])) if learn_temperature else None

    @property
    def temperature(self) -> float | torch.Tensor:
        """The current tau, a number or a scalar tensor."""
        if self.log_scale is None:
            return self._temperature
        return 1 / self.log_scale[0].exp()

    @torch.no_grad()  # a clamp inside the graph would stop the gradient, and tau would stay at the limit
    def constrain(self) -> None:
        """Set a learned tau below 0.01 back to 0.01."""
        if self.log_scale is not None:
            self.log_scale.clamp_(max=math.log(LARGEST_LEARNED_SCALE))

    def embeddings(self, batch: NestedBatch, layer: int) -> list[torch.Tensor]:
        """Pooled embeddings of this rank's texts at a layer, one tensor `(batch, hidden_size)` per text column."""
        return [text.pooled(layer, self.pooling) for text in batch.texts.values()]

    def contrast_targets(self, batch: NestedBatch) -> ContrastTargets:
        """
        The positives and text ids of a batch, which are the same for every granularity.

        Raises:
            ValueError: if there are fewer than two text columns, or than three for `own_negatives`.
        """
        if len(batch.texts) < (3 if self.own_negatives else 2):
            needed = "a column of hard negatives" if self.own_negatives else "two text columns or more"
            raise ValueError(f"The contrastive loss needs {needed}; got {', '.join(batch.texts)}.")
        first = next(iter(batch.texts.values())).layers[self.layers[0]]
        rows = RankRows.of(len(first), first.device) if self.gather_negatives else RankRows((len(first),))
        targets = torch.arange(len(first), device=first.device) + (0 if self.ring else rows.offset)
        if batch.text_ids is None or not self.mask_duplicates:
            return ContrastTargets(rows, targets)
        anchors, positives, *negatives = batch.text_ids.values()
        own_ids = [torch.stack([positives, anchors], dim=1)]
        equal = [(ids == positives) | (ids == anchors) for ids in negatives]
        own_ids += [torch.stack([ids, torch.full_like(ids, NO_TEXT)], dim=1) for ids in negatives]
        return ContrastTargets(
            rows,
            targets,
            anchor_ids=own_ids[0],
            candidate_ids=own_ids if self.ring else [rows.gather(ids) for ids in own_ids],
            equal_negatives=torch.stack(equal, dim=1) if equal else None,
        )

    def contrast(
        self, embeddings: Sequence[torch.Tensor], dims: Sequence[int], targets: ContrastTargets
    ) -> torch.Tensor:
        """
        InfoNCE of one layer's embeddings at several dims, with the candidates of all ranks.

        Args:
            embeddings (`Sequence[torch.Tensor]`): One tensor of shape `(batch, hidden_size)` per text column.
            dims (`Sequence[int]`): Prefix dims, ascending.
            targets ([`ContrastTargets`]): Result of [`~EmbeddingObjective.contrast_targets`] for the batch.

        Returns:
            `torch.Tensor` of shape `(len(dims),)`: means over the batch; see [`RankRows.mean`].
        """
        anchors, *others = (vectors[:, : dims[-1]] for vectors in embeddings)
        losses = self.info_nce(anchors, others[:1] if self.own_negatives else others, dims, targets)
        if self.own_negatives:
            losses = with_own_negatives(
                losses,
                anchors,
                others[0],
                torch.stack(others[1:], dim=1),
                dims=dims,
                temperature=self.temperature,
                left_out=targets.equal_negatives,
            )
        if self.symmetric:
            losses = (losses + self.info_nce(others[0], [anchors], dims, targets, reverse=True)) / 2
        return targets.rows.mean(losses)

    def info_nce(
        self, anchors: torch.Tensor, columns: Sequence[torch.Tensor], dims: Sequence[int], targets: ContrastTargets,
        reverse: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """InfoNCE `(batch, len(dims))` of this rank's anchors in one direction, with the candidates of all ranks:
        `columns` of this rank, the first of which has the positives. In `reverse`, those are the anchors."""
        anchor_ids, candidate_ids = targets.ids(len(columns), reverse=reverse)
        return nested_info_nce(
            anchors,
            torch.cat(list(columns) if self.ring else [targets.rows.gather(vectors) for vectors in columns]),
            dims=dims,
            temperature=self.temperature,
            targets=targets.positives,
            anchor_ids=anchor_ids,
            candidate_ids=candidate_ids,
            ring=targets.rows.ring(len(columns)) if self.ring else None,
        )

    def contrast_grid(self, batch: NestedBatch, targets: ContrastTargets, weight: float = 1.0) -> Terms:
        """InfoNCE terms, one per granularity of the grid, all with this weight."""
        losses = [
            self.contrast(self.embeddings(batch, layer), self.grid.dims_of(layer), targets)
            for layer in self.grid.layers
        ]
        return {self.term(g, weight=weight): loss for g, loss in zip(self.grid, torch.cat(losses), strict=True)}


@described
@dataclass
class EmbeddingConfig(TextTrainingArguments):
    """
    Configuration that the trainers of all [`EmbeddingObjective`]s share, in addition to the fields of
    [`TextTrainingArguments`]: contrastive training on text pairs.

    Args:
        > Parameters that control the contrastive loss

        temperature (`float`, *optional*, defaults to 0.05): Temperature tau; cosines are divided by it (m3BERT,
            section 3.1).
        learn_temperature (`bool`, *optional*, defaults to `False`): Train tau, starting from `temperature` and never
            below 0.01.
        symmetric (`bool`, *optional*, defaults to `False`): Contrast in both directions: anchors among positives, and
            positives among anchors.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Do not use equal texts as negatives of each other.
        unsupervised (`bool`, *optional*, defaults to `False`): Train on one text column. The positive of a text is the
            text itself under another dropout mask (SimCSE).

        > Parameters that control the negatives

        ring (`bool`, *optional*, defaults to `False`): Pass the candidates of other devices around in a ring instead
            of gathering them: memory then does not grow with the number of devices. The losses are the same. For large
            batches on many devices; see docs/scale.md.
        gather_negatives (`bool`, *optional*, defaults to `True`): Use the texts of all devices as negatives. Without,
            each device contrasts its own batch, as in the released code of m3BERT.
        own_negatives (`bool`, *optional*, defaults to `False`): Use a hard negative only for the anchor in its row, as
            in Eq. 10 of IBKD, not for all anchors.

    With `symmetric` or `unsupervised`, all texts are queries.

    Negatives come from the batches of all devices unless `gather_negatives` is off. Gradient accumulation does not add
    negatives: it averages the losses of smaller batches. For more negatives, raise `per_device_train_batch_size` and
    set `mini_batch_size`.
    """

    objective_fields: ClassVar[tuple[str, ...]] = (
        *TextTrainingArguments.objective_fields, "temperature", "learn_temperature", "symmetric", "mask_duplicates",
        "ring", "gather_negatives", "own_negatives",
    )  # fmt: skip

    temperature: float = 0.05
    learn_temperature: bool = False
    symmetric: bool = False
    mask_duplicates: bool = True
    unsupervised: bool = False
    ring: bool = False
    gather_negatives: bool = True
    own_negatives: bool = False

    @property
    def all_queries(self) -> bool:
        return self.symmetric or self.unsupervised

    @property
    def views(self) -> int:
        return 2 if self.unsupervised else 1

    def columns_of(self, *datasets: Any) -> list[str]:
        """The text columns to train on: one if `unsupervised`, otherwise two or more. It says in the log that labels
        are not read."""
        columns = super().columns_of(*datasets)
        names = ", ".join(columns) or "none"
        if self.unsupervised and len(columns) != 1:
            raise ValueError(
                f"Unsupervised training takes one text column; found: {names}. Name one in text_columns, or pass "
                "unsupervised=False to train on pairs."
            )
        if not self.unsupervised and len(columns) < 2:
            raise ValueError(f"Contrastive training needs two text columns or more; found: {names}.")
        if not self.unsupervised and self.text_columns is None and (labels := labels_of(self.all_columns(*datasets))):
            logger.warning(f"The column(s) {', '.join(labels)} are not read: every row is a positive pair.")
        return columns
