"""The contrastive loss at all prefix dims, for any batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...encode.ranks import Ring
from ...utils.numerics import blocks, check_dims, precise
from .scored_losses import nested_pair_cosines
from .similarity import nested_cosines


# Similarities in memory at a time, (anchors, candidates): about one CPU cache, or enough to occupy a GPU.
TILE_SIZES = {"cpu": (256, 2048), "cuda": (4096, 4096)}


@torch.compiler.disable  # the loop over the tiles would be unrolled
def nested_info_nce(
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    *,
    dims: Sequence[int],
    temperature: float | torch.Tensor,
    targets: torch.Tensor | None = None,
    anchor_ids: torch.Tensor | None = None,
    candidate_ids: torch.Tensor | None = None,
    ring: Ring | None = None,
    tile_size: tuple[int, int] | None = None,
) -> torch.Tensor:
    r"""
    InfoNCE on the cosines of prefixes, for every prefix dim at once (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), Eqs. 1 and 4; in tiles after Inf-CL,
    [2410.17243](https://huggingface.co/papers/2410.17243)):
    `loss[i, k] = -log( exp(s_k(i, t_i)) / sum_j exp(s_k(i, j)) )` with
    `s_k(i, j) = cos(anchors[i, :d_k], candidates[j, :d_k]) / temperature`, exact in value and gradient.

    The similarities are computed in tiles, twice: for the log-sum-exp of every anchor and dim (forward), and for the
    gradients (backward). A prefix continues the dot products of the next shorter one. Memory in addition to inputs and
    gradients: a few times `len(dims)` tiles, and two numbers per anchor and dim. Products and sums are in float32
    or wider, also under autocast: at a temperature of 0.05, bfloat16 changes the exponent by up to 0.04.

    Args:
        anchors (`torch.Tensor` of shape `(batch, hidden_size)`): Embeddings; need not be normalised. Carries gradient.
        candidates (`torch.Tensor` of shape `(num_candidates, hidden_size)`): Positives and negatives of all anchors.
            Carries gradient.
        dims (`Sequence[int]`): Prefix dims, ascending, at most `hidden_size`.
        temperature (`float` or scalar `torch.Tensor`): Cosines are divided by it. A tensor carries gradient.
        targets (`torch.LongTensor` of shape `(batch,)`, *optional*): Index of each anchor's positive among the
            candidates. Default: the first `batch` candidates, in the order of the anchors.
        anchor_ids (`torch.LongTensor` of shape `(batch, num_ids)`, *optional*): Ids of the anchors. A candidate with
            the same id in any column is no negative of the anchor, unless it is its positive.
        candidate_ids (`torch.LongTensor` of shape `(num_candidates, num_ids)`, *optional*): Ids of the candidates.
        ring ([`Ring`], *optional*): Passes the candidates of other ranks around; `candidates` are then those of this
            rank. All ranks must call this function, and its backward pass, in the same order.
        tile_size (`tuple[int, int]`, *optional*): Numbers of anchors and candidates per tile.

    Returns:
        `torch.Tensor` of shape `(batch, len(dims))`, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: for dims that are not ascending, for one candidate, or for fewer than anchors without `targets`.
    """
    if (len(candidates) if ring is None else sum(ring.counts)) < 2:
        raise ValueError(
            "A contrastive loss needs at least two candidates; a batch of one pair without hard negatives has one."
        )
    if targets is None:
        if len(candidates) < len(anchors):
            raise ValueError(f"{len(anchors)} anchors need targets among {len(candidates)} candidates.")
        targets = torch.arange(len(anchors), device=anchors.device)
    anchors = precise(anchors)
    scale = 1 / torch.as_tensor(temperature, dtype=anchors.dtype, device=anchors.device)
    dims = check_dims(dims, anchors.shape[1])
    tile_size = tile_size or TILE_SIZES.get(anchors.device.type, TILE_SIZES["cuda"])
    contrast = _Contrast(dims, targets, anchor_ids, None if anchor_ids is None else candidate_ids, ring, tile_size)
    return _NestedInfoNCE.apply(anchors, candidates, scale, contrast)


def with_own_negatives(
    losses: torch.Tensor,
    anchors: torch.Tensor,
    positives: torch.Tensor,
    negatives: torch.Tensor,
    *,
    dims: Sequence[int],
    temperature: float | torch.Tensor,
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    InfoNCE with hard negatives that belong to one anchor each (IBKD,
    [2311.05472](https://huggingface.co/papers/2311.05472), Eq. 10), from InfoNCE without them:
    `log( exp(losses[i, k]) + sum_n exp(s_k(i, n) - s_k(i, i+)) )`, where n are the anchor's own negatives, i+ is its
    positive, and `s_k` are cosines at d_k dims, divided by the temperature.

    Args:
        losses (`torch.Tensor` of shape `(batch, len(dims))`): [`nested_info_nce`] of the anchors among positives.
        anchors (`torch.Tensor` of shape `(batch, hidden_size)`): Embeddings; need not be normalised. Carries gradient.
        positives (`torch.Tensor` of shape `(batch, hidden_size)`): The positive of each anchor. Carries gradient.
        negatives (`torch.Tensor` of shape `(batch, negatives, hidden_size)`): The negatives of each anchor. Carries
            gradient.
        dims (`Sequence[int]`): Prefix dims of `losses`.
        temperature (`float` or scalar `torch.Tensor`): Cosines are divided by it. A tensor carries gradient.
        left_out (`torch.Tensor` of shape `(batch, negatives)`, *optional*): Mask of negatives that are not used.

    Returns:
        `torch.Tensor` of shape `(batch, len(dims))`
    """
    others = (positives, *negatives.unbind(dim=1))
    scores = torch.stack([nested_pair_cosines(anchors, other, dims) for other in others], dim=2) / temperature
    differences = scores[..., 1:] - scores[..., :1]
    if left_out is not None:
        differences = differences.masked_fill(left_out, -torch.inf)
    return torch.cat([losses.T[..., None], differences], dim=2).logsumexp(dim=2).T


def false_negatives(anchor_ids: torch.Tensor, candidate_ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mask `(batch, num_candidates)` of the candidates that share an id with an anchor and are not its positive.
    Targets may be outside the candidates, as when these are one tile of all."""
    same = (anchor_ids[:, None] == candidate_ids[None]).any(dim=2)
    return same & (torch.arange(len(candidate_ids), device=targets.device) != targets[:, None])


@dataclass(frozen=True)
class _Contrast:
    """The pairs to compare, without their vectors."""

    dims: Sequence[int]
    targets: torch.Tensor
    anchor_ids: torch.Tensor | None
    candidate_ids: torch.Tensor | None
    ring: Ring | None
    tile_size: tuple[int, int]

    def blocks(self, candidates: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Yield candidates, their ids and each anchor's target among them: all candidates, or in a ring those of one
        rank at a time, this rank's first. Only this rank's have targets; elsewhere the target is -1."""
        held = [candidates] if self.candidate_ids is None else [candidates, self.candidate_ids]
        targets = self.targets
        for vectors, *ids in [held] if self.ring is None else self.ring.rounds(held):
            yield precise(vectors), ids[0] if ids else None, targets
            targets = torch.full_like(targets, -1)

    def tiles(
        self, anchors: int, ids: torch.Tensor | None, candidates: int, targets: torch.Tensor
    ) -> Iterator[tuple[slice, slice, torch.Tensor, torch.Tensor | None]]:
        """Yield the anchors and candidates of each tile of a block, the targets, counted from its first candidate, and
        the mask of false negatives."""
        for rows in blocks(anchors, self.tile_size[0]):
            for columns in blocks(candidates, self.tile_size[1]):
                places, left_out = targets[rows] - columns.start, None
                if ids is not None and self.anchor_ids is not None:
                    left_out = false_negatives(self.anchor_ids[rows], ids[columns], places)
                yield rows, columns, places, left_out

    def sums(
        self,
        anchors: torch.Tensor,
        candidates: torch.Tensor,
        scale: torch.Tensor,
        targets: torch.Tensor,
        left_out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a tile, the log-sum-exp of each anchor's scores, and the score of its target or 0, `(dims, anchors)`."""
        scores = nested_cosines(anchors, candidates, self.dims) * scale
        inside = (targets >= 0) & (targets < len(candidates))
        places = torch.where(inside, targets, 0).expand(len(self.dims), -1)[:, :, None]
        target_scores = torch.where(inside, scores.gather(2, places)[:, :, 0], 0.0)
        if left_out is not None:  # finite, since all candidates may be left out
            scores = scores.masked_fill(left_out, torch.finfo(scores.dtype).min)
        return scores.logsumexp(dim=2), target_scores


class _NestedInfoNCE(torch.autograd.Function):
    """The losses from the sums of all tiles. The backward pass computes the tiles again and differentiates them."""

    @staticmethod
    def forward(
        ctx: Any, anchors: torch.Tensor, candidates: torch.Tensor, scale: torch.Tensor, contrast: _Contrast
    ) -> torch.Tensor:
        log_sums = anchors.new_full((len(contrast.dims), len(anchors)), -torch.inf)
        target_scores = torch.zeros_like(log_sums)
        for vectors, ids, targets in contrast.blocks(candidates):
            for rows, columns, places, left_out in contrast.tiles(len(anchors), ids, len(vectors), targets):
                sums, scores = contrast.sums(anchors[rows], vectors[columns], scale, places, left_out)
                log_sums[:, rows] = torch.logaddexp(log_sums[:, rows], sums)
                target_scores[:, rows] += scores
        ctx.contrast = contrast
        ctx.save_for_backward(anchors, candidates, scale, log_sums)
        return (log_sums - target_scores).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        anchors, candidates, scale, log_sums = ctx.saved_tensors
        contrast, weights = ctx.contrast, grad_outputs[0].T
        grad_anchors, grad_scale = torch.zeros_like(anchors), torch.zeros_like(scale)
        grad_candidates = torch.zeros_like(precise(candidates))
        for passes, (vectors, ids, targets) in enumerate(contrast.blocks(candidates)):
            for rows, columns, places, left_out in contrast.tiles(len(anchors), ids, len(vectors), targets):
                inputs = tuple(each.detach().requires_grad_() for each in (anchors[rows], vectors[columns], scale))
                with torch.enable_grad():
                    sums, scores = contrast.sums(*inputs, places, left_out)
                weight = weights[:, rows]
                grads = weight * (sums.detach() - log_sums[:, rows]).exp(), -weight
                of_anchors, of_candidates, of_scale = torch.autograd.grad((sums, scores), inputs, grads)
                grad_anchors[rows] += of_anchors
                grad_candidates[columns] += of_candidates
                grad_scale += of_scale
            if contrast.ring is not None:  # the last pass brings it back to the rank of its candidates
                grad_candidates = contrast.ring.pass_on_gradients(grad_candidates, passes)
        return grad_anchors, grad_candidates.to(candidates.dtype), grad_scale, None
