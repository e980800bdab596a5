"""False negatives: candidates that a guide model finds closer to an anchor than the anchor's own positive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from .common import no_autocast, precise


def guided_limits(similarities: torch.Tensor, *, margin: float = 0.0, relative: bool = False) -> torch.Tensor:
    """
    The guide's similarity from which a candidate is a false negative: that of the anchor and its positive, less a
    margin, `s - margin`, or `s (1 - margin)` if the margin is relative.

    Args:
        similarities (`torch.Tensor` of shape `(batch,)`): Similarities of the anchors and their positives.
        margin (`float`, *optional*, defaults to 0.0): The larger, the more candidates are left out.
        relative (`bool`, *optional*, defaults to `False`): Whether the margin is a share of the similarity.

    Returns:
        `torch.Tensor` of shape `(batch,)`
    """
    return similarities * (1 - margin) if relative else similarities - margin


def false_negatives(
    anchors: torch.Tensor, candidates: torch.Tensor, limits: torch.Tensor, targets: torch.Tensor | None = None
) -> torch.Tensor:
    """
    The candidates that a guide model finds closer to an anchor than the anchor's positive (GISTEmbed,
    [2402.16829](https://huggingface.co/papers/2402.16829), section 3): `cos(g_i, g_j) > limit_i`.

    Args:
        anchors (`torch.Tensor` of shape `(batch, guide_dim)`): The guide's embeddings of the anchors, L2-normalised.
        candidates (`torch.Tensor` of shape `(num_candidates, guide_dim)`): Those of the candidates, L2-normalised.
        limits (`torch.Tensor` of shape `(batch,)`): See [`guided_limits`].
        targets (`torch.LongTensor` of shape `(batch,)`, *optional*): Index of each anchor's positive, which is never a
            false negative. It may be outside the candidates, for example when these are one tile of all candidates.

    Returns:
        `torch.Tensor` of shape `(batch, num_candidates)`, `True` for false negatives.
    """
    with no_autocast(anchors):
        closer = anchors @ candidates.T > limits[:, None]
    return closer if targets is None else unmark(closer, targets)


def unmark(mask: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Set `mask[i, targets[i]]` to `False`, in place, where the target is one of the columns."""
    inside = ((targets >= 0) & (targets < mask.shape[1])).nonzero().squeeze(1)
    mask[inside, targets[inside]] = False
    return mask


@dataclass(frozen=True)
class Guide:
    """
    What [`false_negatives`] needs of a batch.

    Args:
        anchors (`torch.Tensor` of shape `(batch, guide_dim)`): The guide's embeddings of the anchors, L2-normalised.
        candidates (`torch.Tensor` of shape `(num_candidates, guide_dim)`): Those of the candidates, L2-normalised.
        limits (`torch.Tensor` of shape `(batch,)`): See [`guided_limits`].
    """

    anchors: torch.Tensor
    candidates: torch.Tensor
    limits: torch.Tensor

    @classmethod
    def of(
        cls,
        anchors: torch.Tensor,
        candidates: torch.Tensor,
        targets: torch.Tensor,
        *,
        margin: float = 0.0,
        relative: bool = False,
    ) -> Self:
        """
        Args:
            anchors (`torch.Tensor` of shape `(batch, guide_dim)`): The guide's embeddings of the anchors.
            candidates (`torch.Tensor` of shape `(num_candidates, guide_dim)`): Those of the candidates.
            targets (`torch.LongTensor` of shape `(batch,)`): Index of each anchor's positive among the candidates.
            margin (`float`, *optional*, defaults to 0.0): See [`guided_limits`].
            relative (`bool`, *optional*, defaults to `False`): See [`guided_limits`].
        """
        anchors, candidates = (
            nn.functional.normalize(precise(vectors.detach()), dim=1) for vectors in (anchors, candidates)
        )
        similarities = (anchors * candidates[targets]).sum(dim=1)
        return cls(anchors, candidates, guided_limits(similarities, margin=margin, relative=relative))

    def tile(self, rows: slice, columns: slice, targets: torch.Tensor | None) -> torch.Tensor:
        """[`false_negatives`] of some anchors among some candidates; targets count from the first of these."""
        return false_negatives(self.anchors[rows], self.candidates[columns], self.limits[rows], targets)
