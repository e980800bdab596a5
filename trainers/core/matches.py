"""The positives of a batch of texts, and what its contrastive losses leave out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..losses import Guide
from .parallel.ranks import RankRows


@dataclass(frozen=True)
class Matches:
    """
    The positive of each anchor in a batch, and the text ids that keep equal texts from being negatives.

    Args:
        rows ([`RankRows`]): How the pairs are distributed over ranks.
        targets (`torch.Tensor` of shape `(batch,)`): Row of each anchor's positive among the positives of all ranks.
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
    targets: torch.Tensor
    anchor_ids: torch.Tensor | None = None
    pair_ids: torch.Tensor | None = None
    candidate_ids: torch.Tensor | None = None
    guide: Guide | None = None
    backward_guide: Guide | None = None
    equal_negatives: torch.Tensor | None = None
