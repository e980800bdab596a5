"""The contrastive loss at all prefix dims, for any batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .candidates import SMALLEST_NORM, TILE_SIZES, AnchorGradients, AnchorRows, CandidateBlock, left_out, only_own
from .common import check_dims, no_autocast, precise
from .false_negatives import Guide


def nested_info_nce(
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    *,
    dims: Sequence[int],
    temperature: float | torch.Tensor,
    targets: torch.Tensor | None = None,
    anchor_ids: torch.Tensor | None = None,
    candidate_ids: torch.Tensor | None = None,
    guide: Guide | None = None,
    tile_size: tuple[int, int] | None = None,
) -> torch.Tensor:
    r"""
    InfoNCE on the cosines of prefixes, for every prefix dim at once (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), Eqs. 1 and 4; in tiles after Inf-CL,
    [2410.17243](https://huggingface.co/papers/2410.17243)):
    `loss[i, k] = -log( exp(s_k(i, t_i)) / sum_j exp(s_k(i, j)) )` with
    `s_k(i, j) = cos(anchors[i, :d_k], candidates[j, :d_k]) / temperature`, exact in value and gradient.

    The similarities are computed in tiles, twice: for the log-sum-exp of every anchor and dim (forward), and for the
    gradients (backward). In a tile, the dot products of a prefix are those of the next shorter prefix plus one product
    over the dims between them, divided by the norms of the prefixes. Likewise, the gradient of a segment of dims is
    one product with the sum of the gradients of all prefixes that contain it. Memory in addition to inputs and
    gradients: `len(dims) + 2` tiles, and a few numbers per anchor, candidate and dim.

    Products and sums are in float32 or wider, also under autocast: at a temperature of 0.05, rounding a cosine to
    bfloat16 changes the exponent by up to 0.04.

    Args:
        anchors (`torch.Tensor` of shape `(batch, hidden_size)`): Embeddings; need not be normalised. Carries gradient.
        candidates (`torch.Tensor` of shape `(num_candidates, hidden_size)`): Positives and negatives of all anchors.
            Carries gradient.
        dims (`Sequence[int]`): Prefix dims, ascending, at most `hidden_size`.
        temperature (`float` or scalar `torch.Tensor`): Cosines are divided by it. A tensor carries gradient.
        targets (`torch.LongTensor` of shape `(batch,)`, *optional*): Index of each anchor's positive among the
            candidates. Default: the first `batch` candidates are the positives, in the order of the anchors.
        anchor_ids (`torch.LongTensor` of shape `(batch, num_ids)`, *optional*): Ids of the anchors. A candidate that
            has the same id as an anchor in any column is excluded from the anchor's negatives. The anchor's own
            positive is never excluded.
        candidate_ids (`torch.LongTensor` of shape `(num_candidates, num_ids)`, *optional*): Ids of the candidates; see
            `anchor_ids`.
        guide ([`Guide`], *optional*): Candidates that a guide model finds too close to an anchor are excluded from the
            anchor's negatives ([`false_negatives`]).
        tile_size (`tuple[int, int]`, *optional*): Numbers of anchors and candidates per tile. The default depends on
            the device.

    Returns:
        `torch.Tensor` of shape `(batch, len(dims))`, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size, if there are fewer than two candidates, or
            if there are fewer candidates than anchors and no `targets`.
    """
    dims = check_dims(dims, anchors.shape[1])
    check_number_of_candidates(len(candidates))
    if targets is None:
        if len(candidates) < len(anchors):
            raise ValueError(
                f"{len(anchors)} anchors need as many positives, but there are {len(candidates)} candidates: pass "
                "targets."
            )
        targets = torch.arange(len(anchors), device=anchors.device)
    if anchor_ids is not None and candidate_ids is not None and only_own(anchor_ids, candidate_ids, targets):
        anchor_ids = candidate_ids = None
    if tile_size is None:
        tile_size = TILE_SIZES.get(anchors.device.type, TILE_SIZES["cuda"])
    tile_size = min(tile_size[0], max(1, len(anchors))), min(tile_size[1], len(candidates))
    anchors, candidates = precise(anchors), precise(candidates)
    scale = 1 / torch.as_tensor(temperature, dtype=anchors.dtype, device=anchors.device)
    if len(dims) == 1 and tile_size[0] >= len(anchors) and tile_size[1] >= len(candidates):
        # With one prefix and one tile, the plain form is faster.
        rows, columns = slice(0, len(anchors)), slice(0, len(candidates))
        mask = left_out(rows, columns, anchor_ids, candidate_ids, targets, guide)
        return info_nce(anchors[:, : dims[0]], candidates[:, : dims[0]], scale, targets, mask)[:, None]
    return NestedInfoNCE.apply(anchors, candidates, scale, targets, anchor_ids, candidate_ids, dims, tile_size, guide)


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
    anchors, others = precise(anchors), precise(torch.cat([positives[:, None], negatives], dim=1))
    columns = []
    for loss, dim in zip(losses.unbind(dim=1), dims, strict=True):
        scores = nn.functional.cosine_similarity(anchors[:, None, :dim], others[..., :dim], dim=2) / temperature
        differences = scores[:, 1:] - scores[:, :1]
        if left_out is not None:
            differences = differences.masked_fill(left_out, -torch.inf)
        columns.append(torch.cat([loss[:, None], differences], dim=1).logsumexp(dim=1))
    return torch.stack(columns, dim=1)


def check_number_of_candidates(number: int) -> None:
    """
    Check that an anchor can have a negative.

    Raises:
        ValueError: if there are fewer than two candidates.
    """
    if number < 2:
        raise ValueError(
            "A contrastive loss needs at least two candidates; a batch of one pair without hard negatives has one."
        )


def info_nce(
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    scale: torch.Tensor,
    targets: torch.Tensor,
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    InfoNCE on cosines at one dim, computed with the full similarity matrix: [`nested_info_nce`] without tiles.

    Args:
        anchors (`torch.Tensor` of shape `(batch, dim)`): Embeddings; need not be normalised. Carries gradient.
        candidates (`torch.Tensor` of shape `(num_candidates, dim)`): Positives and negatives of all anchors. Carries
            gradient.
        scale (scalar `torch.Tensor`): `1 / temperature`. Carries gradient.
        targets (`torch.LongTensor` of shape `(batch,)`): Index of each anchor's positive among the candidates.
        left_out (`torch.Tensor` of shape `(batch, num_candidates)`, *optional*): Mask of candidates that are not used
            as negatives.

    Returns:
        `torch.Tensor` of shape `(batch,)`
    """
    anchors, candidates = (
        nn.functional.normalize(vectors, dim=1, eps=SMALLEST_NORM) for vectors in (anchors, candidates)
    )
    with no_autocast(anchors):
        scores = anchors @ candidates.T * scale
    if left_out is not None:
        scores = scores.masked_fill(left_out, -torch.inf)
    return nn.functional.cross_entropy(scores, targets, reduction="none")


class NestedInfoNCE(torch.autograd.Function):
    """See [`nested_info_nce`]."""

    @staticmethod
    def forward(
        ctx: Any,
        anchors: torch.Tensor,
        candidates: torch.Tensor,
        scale: torch.Tensor,
        targets: torch.Tensor,
        anchor_ids: torch.Tensor | None,
        candidate_ids: torch.Tensor | None,
        dims: tuple[int, ...],
        tile_size: tuple[int, int],
        guide: Guide | None,
    ) -> torch.Tensor:
        ctx.dims, ctx.tile_size, ctx.guide = dims, tile_size, guide
        rows = AnchorRows(anchors, scale, dims, anchor_ids, tile_size)
        block = CandidateBlock(rows, candidates, candidate_ids, targets, guide)
        log_sums = rows.no_candidates()
        block.add_to_log_sums(log_sums)
        ctx.save_for_backward(anchors, candidates, scale, targets, anchor_ids, candidate_ids, log_sums)
        return log_sums - block.target_scores()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        anchors, candidates, scale, targets, anchor_ids, candidate_ids, log_sums = ctx.saved_tensors
        needs_anchors, needs_candidates, needs_scale = ctx.needs_input_grad[:3]
        rows = AnchorRows(anchors, scale, ctx.dims, anchor_ids, ctx.tile_size)
        block = CandidateBlock(rows, candidates, candidate_ids, targets, ctx.guide)
        grads = AnchorGradients(rows, grad_outputs[0], log_sums, needs_anchors)
        grad_candidates = torch.zeros_like(candidates) if needs_candidates else None
        block.add_gradients(grads, grad_candidates)
        grad_anchors, grad_scale = grads.finished()
        return grad_anchors, grad_candidates, grad_scale if needs_scale else None, *[None] * 6
