"""
InfoNCE with the candidates of all ranks, which are passed around the ranks in a ring instead of gathered.

Each rank keeps its own anchors, and sees one block of candidates at a time: its own, then that of the previous rank,
and so on. Forward, only the log-sum-exp of every anchor and dim is kept. Backward, each block goes around once more,
with the sum of its gradients over the ranks that it has visited (after Inf-CL,
[2410.17243](https://huggingface.co/papers/2410.17243), and ring attention,
[2310.01889](https://huggingface.co/papers/2310.01889)). While a rank computes with one block, the next one arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...losses import nested_info_nce
from ...losses.candidates import AnchorGradients, AnchorRows, CandidateBlock, only_own
from ...losses.common import precise
from ...losses.contrastive import check_dims, check_number_of_candidates
from .ranks import RankRows, Ring


CANDIDATES, GRADIENTS = 0, 1  # channels of the ring


def ring_info_nce(
    anchors: torch.Tensor,
    columns: Sequence[torch.Tensor],
    *,
    dims: Sequence[int],
    temperature: float | torch.Tensor,
    rows: RankRows,
    anchor_ids: torch.Tensor | None = None,
    candidate_ids: torch.Tensor | None = None,
    tile_size: tuple[int, int] | None = None,
) -> torch.Tensor:
    """
    [`nested_info_nce`] of this rank's anchors with the candidates of all ranks, in value and gradient. The gradient of
    a candidate is the sum of its gradients on all ranks, as that of [`RankRows.gather`]. All ranks must call it, and
    its backward pass, in the same order.

    A rank holds its own candidates and two blocks of other ranks, backward also their gradients, whatever the number
    of ranks. Candidates are passed in their own precision, gradients in float32 or wider.

    Args:
        anchors (`torch.Tensor` of shape `(batch, hidden_size)`): Anchors of this rank. Carries gradient.
        columns (`Sequence[torch.Tensor]`): Candidates of this rank, `(batch, hidden_size)` each: the positives of the
            anchors, in their order, then hard negatives. Carries gradient.
        dims (`Sequence[int]`): Prefix dims, ascending, at most `hidden_size`.
        temperature (`float` or scalar `torch.Tensor`): Cosines are divided by it. A tensor carries gradient.
        rows ([`RankRows`]): How the anchors are distributed over ranks.
        anchor_ids (`torch.LongTensor` of shape `(batch, num_ids)`, *optional*): Ids of the anchors of this rank. A
            candidate that has the same id as an anchor in any column is excluded from the anchor's negatives. The
            anchor's own positive is never excluded.
        candidate_ids (`torch.LongTensor` of shape `(columns * batch, num_ids)`, *optional*): Ids of the candidates of
            this rank. All ranks must pass ids, or none.
        tile_size (`tuple[int, int]`, *optional*): Numbers of anchors and candidates per tile. The default depends on
            the device.

    Returns:
        `torch.Tensor` of shape `(batch, len(dims))`, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size, or all ranks together have fewer than two
            candidates.
    """
    candidates = columns[0] if len(columns) == 1 else torch.cat(list(columns))
    if len(rows.counts) == 1:
        return nested_info_nce(
            anchors,
            candidates,
            dims=dims,
            temperature=temperature,
            anchor_ids=anchor_ids,
            candidate_ids=candidate_ids,
            tile_size=tile_size,
        )
    dims = check_dims(dims, anchors.shape[1])
    check_number_of_candidates(len(columns) * sum(rows.counts))
    ring = Ring(tuple(len(columns) * count for count in rows.counts), rows.rank)
    anchors = precise(anchors)
    scale = 1 / torch.as_tensor(temperature, dtype=anchors.dtype, device=anchors.device)
    return _RingInfoNCE.apply(anchors, candidates, scale, anchor_ids, candidate_ids, dims, tile_size, ring)


class _RingInfoNCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchors: torch.Tensor,
        candidates: torch.Tensor,
        scale: torch.Tensor,
        anchor_ids: torch.Tensor | None,
        candidate_ids: torch.Tensor | None,
        dims: tuple[int, ...],
        tile_size: tuple[int, int] | None,
        ring: Ring,
    ) -> torch.Tensor:
        ctx.dims, ctx.tile_size, ctx.ring = dims, tile_size, ring
        rows = AnchorRows(anchors, scale, dims, anchor_ids, tile_size)
        log_sums = rows.no_candidates()
        target_scores = torch.zeros_like(log_sums)
        for block in _blocks(ring, rows, candidates, candidate_ids):
            block.add_to_log_sums(log_sums)
            if block.targets is not None:  # this rank's own, with the positives
                target_scores = block.target_scores()
        ctx.save_for_backward(anchors, candidates, scale, anchor_ids, candidate_ids, log_sums)
        return log_sums - target_scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        anchors, candidates, scale, anchor_ids, candidate_ids, log_sums = ctx.saved_tensors
        needs_anchors, needs_candidates, needs_scale = ctx.needs_input_grad[:3]
        rows = AnchorRows(anchors, scale, ctx.dims, anchor_ids, ctx.tile_size)
        grads = AnchorGradients(rows, grad_outputs[0], log_sums, needs_anchors)
        grad_candidates = torch.zeros_like(precise(candidates)) if needs_candidates else None
        for passes, block in enumerate(_blocks(ctx.ring, rows, candidates, candidate_ids)):
            block.add_gradients(grads, grad_candidates)
            if grad_candidates is not None:  # the last pass brings it back to the rank of its candidates
                (grad_candidates,) = ctx.ring.pass_on([grad_candidates], passes, GRADIENTS)()
        grad_anchors, grad_scale = grads.finished()
        return (
            grad_anchors,
            None if grad_candidates is None else grad_candidates.to(candidates.dtype),
            grad_scale if needs_scale else None,
            *[None] * 5,
        )


def _blocks(
    ring: Ring, rows: AnchorRows, candidates: torch.Tensor, candidate_ids: torch.Tensor | None
) -> Iterator[CandidateBlock]:
    """The candidates of all ranks, this rank's first. The next block is under way while one is used."""
    held = [candidates] if candidate_ids is None else [candidates, candidate_ids]
    targets: torch.Tensor | None = torch.arange(len(rows.vectors), device=candidates.device)
    last = len(ring.counts) - 1
    for passes in range(last + 1):
        arrival = ring.pass_on(held, passes, CANDIDATES) if passes < last else None
        vectors, *ids = held
        needed = ids[0] if ids and rows.ids is not None and not only_own(rows.ids, ids[0], targets) else None
        yield CandidateBlock(rows, precise(vectors), needed, targets)
        targets = None
        if arrival is not None:
            held = arrival()
