"""Base class and configuration of the contrastive objectives on pooled embeddings."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..losses import Guide, nested_info_nce, with_own_negatives
from .arguments import TextTrainingArguments
from .columns import labels_of
from .composition import mapping_of
from .granularity import Grid
from .help_texts import described
from .objective import NestedBatch, Objective, Terms
from .parallel.ranks import RankRows
from .parallel.ring import ring_info_nce
from .states import Pooling, check_pooling


logger = logging.getLogger(__name__)
LARGEST_LEARNED_SCALE = 100.0
NO_TEXT = -1


@dataclass(frozen=True)
class ContrastTargets:
    """
    The positive of each anchor in a batch, and the text ids that keep equal texts from being negatives.

    Args:
        rows ([`RankRows`]): How the pairs are distributed over ranks.
        positives (`torch.Tensor` of shape `(batch,)`): Row of each anchor's positive among the positives of all ranks.
        anchor_ids (`torch.Tensor` of shape `(batch, 2)`, *optional*): Text ids of each pair of this rank: positive,
            anchor.
        pair_ids (`torch.Tensor` of shape `(pairs of all ranks, 2)`, *optional*): The same for the pairs of all ranks;
            in a ring, of this rank.
        candidate_ids (`torch.Tensor` of shape `(candidates of all ranks, 2)`, *optional*): The same for all
            candidates; in a ring, for those of this rank. The second id of a hard negative is -1, because it has no
            anchor.
        guide ([`Guide`], *optional*): Finds false negatives among all candidates.
        backward_guide ([`Guide`], *optional*): Finds false negatives of the positives among all anchors.
        equal_negatives (`torch.Tensor` of shape `(batch, hard negatives)`, *optional*): Mask of the own hard negatives
            of each anchor of this rank that are equal to its positive.
    """

    rows: RankRows
    positives: torch.Tensor
    anchor_ids: torch.Tensor | None = None
    pair_ids: torch.Tensor | None = None
    candidate_ids: torch.Tensor | None = None
    guide: Guide | None = None
    backward_guide: Guide | None = None
    equal_negatives: torch.Tensor | None = None


def check_negatives(ring: bool, gather_negatives: bool, guide_margin: float | None, own_negatives: bool) -> None:
    """
    Check that the options of negatives can be combined.

    Raises:
        ValueError: if a ring is to gather nothing, or a ring or own negatives are to leave out what a guide finds.
    """
    if ring and not gather_negatives:
        raise ValueError("ring passes the candidates of other devices around: it excludes gather_negatives=False.")
    if ring and guide_margin is not None:
        raise ValueError("ring does not pass a guide's embeddings around: unset ring, or train without a guide.")
    if own_negatives and guide_margin is not None:
        raise ValueError("own_negatives does not use a guide: unset own_negatives, or train without a guide.")


def with_one_element(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Load the learned temperature of a checkpoint in which it has no dims."""
    if (name := f"{prefix}log_scale") in state_dict:
        state_dict[name] = state_dict[name].reshape(1)


class EmbeddingObjective(Objective):
    """
    Base class of objectives that contrast pooled embeddings. The first text column holds the anchors, the second one
    their positives. Further columns hold hard negatives, which are negatives of every anchor on every rank, as in the
    released code of IBKD, or with `own_negatives` of the anchor in their row alone, as in its Eq. 10.

    Args:
        grid ([`Grid`]): The granularities to train.
        temperature (`float`, *optional*, defaults to 0.05): tau; cosines are divided by it.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, `"cls"` or `"lasttoken"`.
        symmetric (`bool`, *optional*, defaults to `False`): Average two losses: that of each anchor among all
            candidates, and that of each positive among all anchors.
        mask_duplicates (`bool`, *optional*, defaults to `True`): Exclude false negatives of an anchor: texts equal to
            its own positive, and positives of an equal anchor. Needs the `text_ids` of a batch, which
            [`TextColumnsCollator`] makes; without them nothing is masked.
        learn_temperature (`bool`, *optional*, defaults to `False`): Train tau as `log(1 / tau)`, starting from
            `temperature` and never below 0.01.
        ring (`bool`, *optional*, defaults to `False`): Pass the candidates of other ranks around in a ring
            ([`ring_info_nce`]) instead of gathering them. The losses are the same.
        gather_negatives (`bool`, *optional*, defaults to `True`): Use the candidates of all ranks. Without, each rank
            contrasts its own batch.
        guide_margin (`float`, *optional*): Exclude false negatives of an anchor: candidates that a guide model finds
            more similar to it than its positive, less this margin ([`false_negatives`]). Needs the guide's embeddings
            as the `teacher` of a batch. Default: there is no guide.
        relative_guide_margin (`bool`, *optional*, defaults to `False`): Whether the margin is a share of the
            similarity to the positive.
        own_negatives (`bool`, *optional*, defaults to `False`): Use a hard negative only for the anchor in its row
            ([`with_own_negatives`]), not for all.

    Raises:
        ValueError: if an argument is out of range, `ring` is combined with a guide or without `gather_negatives`, or
            `own_negatives` is combined with a guide; in forward, for a batch of one pair without hard negatives,
            without the embeddings of a guide, or with `own_negatives` and no hard negatives.
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
        guide_margin: float | None = None,
        relative_guide_margin: bool = False,
        own_negatives: bool = False,
    ):
        super().__init__(grid)
        check_negatives(ring, gather_negatives, guide_margin, own_negatives)
        if temperature <= 0:
            raise ValueError(f"temperature={temperature} must be above 0.")
        check_pooling(pooling)
        self.pooling, self.symmetric, self.mask_duplicates, self.ring = pooling, symmetric, mask_duplicates, ring
        self.gather_negatives, self.own_negatives = gather_negatives, own_negatives
        self.guide_margin, self.relative_guide_margin = guide_margin, relative_guide_margin
        self._temperature = temperature
        # One element, since FSDP refuses parameters without dims.
        self.log_scale = nn.Parameter(torch.tensor([-math.log(temperature)])) if learn_temperature else None
        self.register_load_state_dict_pre_hook(with_one_element)

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
            ValueError: if there are fewer than two text columns, three for `own_negatives`, or no embeddings of a
                guide that is needed.
        """
        if len(batch.texts) < 2:
            raise ValueError(f"A contrastive loss needs two text columns or more; got {', '.join(batch.texts)}.")
        if self.own_negatives and len(batch.texts) < 3:
            raise ValueError(f"own_negatives needs a column of hard negatives; got {', '.join(batch.texts)}.")
        first = next(iter(batch.texts.values())).layers[self.layers[0]]
        rows = RankRows.of(len(first), first.device) if self.gather_negatives else RankRows((len(first),))
        own = torch.arange(len(first), device=first.device) + rows.offset
        guide, backward_guide = self.guides(batch, rows, own)
        if batch.text_ids is None or not self.mask_duplicates:
            return ContrastTargets(rows, own, guide=guide, backward_guide=backward_guide)
        anchors, positives, *negatives = batch.text_ids.values()
        anchor_ids = torch.stack([positives, anchors], dim=1)
        if self.own_negatives:
            equal = torch.stack([ids == positives for ids in negatives], dim=1)
            pair_ids = anchor_ids if self.ring else rows.gather(anchor_ids)
            return ContrastTargets(rows, own, anchor_ids, pair_ids, pair_ids, equal_negatives=equal)
        without_anchor = [torch.stack([ids, torch.full_like(ids, NO_TEXT)], dim=1) for ids in negatives]
        if self.ring:  # ids go around with their candidates
            return ContrastTargets(rows, own, anchor_ids, anchor_ids, torch.cat([anchor_ids, *without_anchor]))
        pair_ids = rows.gather(anchor_ids)
        candidate_ids = torch.cat([pair_ids, *map(rows.gather, without_anchor)])
        return ContrastTargets(rows, own, anchor_ids, pair_ids, candidate_ids, guide, backward_guide)

    def guides(self, batch: NestedBatch, rows: RankRows, positives: torch.Tensor) -> tuple[Guide | None, Guide | None]:
        """The guide and the backward guide of [`ContrastTargets`] for a batch; `None` if there is none."""
        if self.guide_margin is None:
            return None, None
        if batch.teacher is None:
            raise ValueError("guide_margin needs the embeddings of a guide for all texts: name one in guide.")
        anchors, *others = batch.teacher.values()
        margin: dict[str, Any] = {"margin": self.guide_margin, "relative": self.relative_guide_margin}
        forward = Guide.of(anchors, torch.cat([rows.gather(each) for each in others]), positives, **margin)
        if not self.symmetric:
            return forward, None
        return forward, Guide.of(others[0], rows.gather(anchors), positives, **margin)

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
        candidates = others[:1] if self.own_negatives else others
        losses = self.info_nce(anchors, candidates, dims, targets, targets.candidate_ids, targets.guide)
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
        if not self.symmetric:
            return targets.rows.mean(losses)
        backwards = self.info_nce(others[0], [anchors], dims, targets, targets.pair_ids, targets.backward_guide)
        return targets.rows.mean((losses + backwards) / 2)

    def info_nce(
        self,
        anchors: torch.Tensor,
        columns: Sequence[torch.Tensor],
        dims: Sequence[int],
        targets: ContrastTargets,
        candidate_ids: torch.Tensor | None,
        guide: Guide | None,
    ) -> torch.Tensor:
        """InfoNCE `(batch, len(dims))` of this rank's anchors in one direction, with the candidates of all ranks:
        `columns` of this rank, the first of which has the positives."""
        if self.ring:
            return ring_info_nce(
                anchors,
                columns,
                dims=dims,
                temperature=self.temperature,
                rows=targets.rows,
                anchor_ids=targets.anchor_ids,
                candidate_ids=candidate_ids,
            )
        return nested_info_nce(
            anchors,
            torch.cat([targets.rows.gather(vectors) for vectors in columns]),
            dims=dims,
            temperature=self.temperature,
            targets=targets.positives,
            anchor_ids=targets.anchor_ids,
            candidate_ids=candidate_ids,
            guide=guide,
        )

    def contrast_grid(self, batch: NestedBatch, targets: ContrastTargets, weight: float = 1.0) -> Terms:
        """InfoNCE terms, one per granularity of the grid, all with this weight."""
        losses = {}
        for layer in self.layers:
            dims = self.grid.dims_of(layer)
            losses[layer] = dict(
                zip(dims, self.contrast(self.embeddings(batch, layer), dims, targets).unbind(), strict=True)
            )
        return {self.term(g, weight=weight): losses[g.layer][g.dim] for g in self.grid}


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
        guide (`dict`, *optional*): A model that finds false negatives: arguments of [`Teacher`], as JSON or a YAML
            mapping, such as `{name_or_path: intfloat/multilingual-e5-base, prompt: "query: "}`. A text that the guide
            finds more similar to a query than its positive is no negative of it (GISTEmbed,
            [2402.16829](https://huggingface.co/papers/2402.16829)). The guide embeds all texts once, before training.
        guide_margin (`float`, *optional*): Leave out texts whose similarity is above that of the positive less this
            margin. Default: 0 with a guide.
        relative_guide_margin (`bool`, *optional*, defaults to `False`): `guide_margin` is a share of the similarity to
            the positive, rather than a difference.
        own_negatives (`bool`, *optional*, defaults to `False`): Use a hard negative only for the anchor in its row, as
            in Eq. 10 of IBKD, not for all anchors. Excludes a guide.
        guide_cache_dir (`str`, *optional*, defaults to `"runs/teachers"`): Folder for the guide's embeddings.

    With `symmetric` or `unsupervised`, all texts are queries.

    Negatives come from the batches of all devices unless `gather_negatives` is off. Gradient accumulation does not add
    negatives: it averages the losses of smaller batches. For more negatives, raise `per_device_train_batch_size` and
    set `mini_batch_size`.

    Raises:
        ValueError: if a value is out of range, or a batch would hold one pair without negatives.
    """

    temperature: float = 0.05
    learn_temperature: bool = False
    symmetric: bool = False
    mask_duplicates: bool = True
    unsupervised: bool = False
    ring: bool = False
    gather_negatives: bool = True
    guide: dict | str | None = None
    guide_margin: float | None = None
    relative_guide_margin: bool = False
    own_negatives: bool = False
    guide_cache_dir: str = "runs/teachers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guide is not None:
            self.guide = mapping_of("guide", self.guide)
            self.guide_margin = 0.0 if self.guide_margin is None else self.guide_margin
        check_negatives(self.ring, self.gather_negatives, self.guide_margin, self.own_negatives)
        if self.train_batch_size * self.world_size < 2 and len(self.text_columns or []) < 3:
            raise ValueError(
                "per_device_train_batch_size=1 leaves a contrastive loss without negatives; use 2 or more."
            )

    @property
    def all_queries(self) -> bool:
        return self.symmetric or self.unsupervised

    @property
    def views(self) -> int:
        return 2 if self.unsupervised else 1

    def columns_of(self, *datasets: Any) -> list[str]:
        """
        The text columns to train on: `text_columns`, or those of the first dataset that knows its columns. It says in
        the log that labels are not read.

        Raises:
            ValueError: as [`~TextTrainingArguments.named_columns`], or if the number of columns does not fit: one if
                `unsupervised`, otherwise two or more.
        """
        columns = self.named_columns(*datasets)
        found = ", ".join(columns) or "none"
        if self.unsupervised and len(columns) != 1:
            raise ValueError(
                f"Unsupervised training takes one text column; found: {found}. Name one in text_columns, or pass "
                "unsupervised=False to train on pairs."
            )
        if not self.unsupervised and len(columns) < 2:
            raise ValueError(f"Contrastive training needs two text columns or more; found: {found}.")
        if not self.unsupervised and self.text_columns is None and (labels := labels_of(self._first(datasets)[1])):
            logger.warning(f"The column(s) {', '.join(labels)} are not read: every row is a positive pair.")
        return columns
