"""The contrastive loss at all prefix dims, for any batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ._blocks import Buffers, blocks, check_dims, segments
from .precision import no_autocast, precise


# Similarities in memory at a time, (anchors, candidates): about one CPU cache, or enough to occupy a GPU.
TILE_SIZES = {"cpu": (256, 2048), "cuda": (4096, 4096)}
SMALLEST_NORM = 1e-12


def nested_info_nce(
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    *,
    dims: Sequence[int],
    temperature: float | torch.Tensor,
    targets: torch.Tensor | None = None,
    anchor_ids: torch.Tensor | None = None,
    candidate_ids: torch.Tensor | None = None,
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
        tile_size (`tuple[int, int]`, *optional*): Numbers of anchors and candidates per tile. The default depends on
            the device.

    Returns:
        `torch.Tensor` of shape `(batch, len(dims))`, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size, if there are fewer than two candidates, or
            if there are fewer candidates than anchors and no `targets`.
    """
    dims = check_dims(dims, anchors.shape[1])
    if len(candidates) < 2:
        raise ValueError(
            "A contrastive loss needs at least two candidates; a batch of one pair without hard negatives has one."
        )
    if targets is None:
        if len(candidates) < len(anchors):
            raise ValueError(
                f"{len(anchors)} anchors need as many positives, but there are {len(candidates)} candidates: pass "
                "targets."
            )
        targets = torch.arange(len(anchors), device=anchors.device)
    if anchor_ids is not None and candidate_ids is not None and _only_own(anchor_ids, candidate_ids, targets):
        anchor_ids = candidate_ids = None
    if tile_size is None:
        tile_size = TILE_SIZES.get(anchors.device.type, TILE_SIZES["cuda"])
    tile_size = min(tile_size[0], max(1, len(anchors))), min(tile_size[1], len(candidates))
    anchors, candidates = precise(anchors), precise(candidates)
    scale = 1 / torch.as_tensor(temperature, dtype=anchors.dtype, device=anchors.device)
    if len(dims) == 1 and tile_size[0] >= len(anchors) and tile_size[1] >= len(candidates):
        # With one prefix and one tile, the plain form is faster.
        return info_nce(
            anchors[:, : dims[0]],
            candidates[:, : dims[0]],
            scale,
            targets,
            not_negatives(anchor_ids, candidate_ids, targets),
        )[:, None]
    return NestedInfoNCE.apply(anchors, candidates, scale, targets, anchor_ids, candidate_ids, dims, tile_size)


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


def not_negatives(
    anchor_ids: torch.Tensor | None, candidate_ids: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor | None:
    """Mask `(batch, num_candidates)` of the candidates that share an id with an anchor and are not its positive.
    Targets may be outside the candidates, for example when these are one tile of all candidates."""
    if anchor_ids is None or candidate_ids is None:
        return None
    same = (anchor_ids[:, None] == candidate_ids[None]).any(dim=2)
    inside = ((targets >= 0) & (targets < len(candidate_ids))).nonzero().squeeze(1)
    same[inside, targets[inside]] = False
    return same


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
    ) -> torch.Tensor:
        ctx.dims, ctx.tile_size = dims, tile_size
        tiles = _Tiles(anchors, candidates, scale, targets, anchor_ids, candidate_ids, dims)
        buffers = Buffers(anchors, 2, tile_size[0] * tile_size[1], anchors.dtype)
        log_sums = anchors.new_full((len(anchors), len(dims)), -torch.inf)
        losses = torch.empty_like(log_sums)
        for rows in blocks(len(anchors), tile_size[0]):
            for columns in blocks(len(candidates), tile_size[1]):
                left_out = tiles.left_out(rows, columns)
                products, scores = buffers.of(rows.stop - rows.start, columns.stop - columns.start)
                for index in tiles.scores(rows, columns, products, scores):
                    if left_out is not None:
                        scores.masked_fill_(left_out, -torch.inf)
                    # Finite even if a whole row of the tile is left out.
                    largest = scores.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
                    sums = scores.sub_(largest).exp_().sum(dim=1)
                    log_sums[rows, index] = torch.logaddexp(log_sums[rows, index], sums.log_().add_(largest[:, 0]))
            losses[rows] = log_sums[rows] - tiles.target_scores(rows)
        ctx.save_for_backward(anchors, candidates, scale, targets, anchor_ids, candidate_ids, log_sums)
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        anchors, candidates, scale, targets, anchor_ids, candidate_ids, log_sums = ctx.saved_tensors
        needs_anchors, needs_candidates, needs_scale = ctx.needs_input_grad[:3]
        dims, tile_size, (grads,) = ctx.dims, ctx.tile_size, grad_outputs
        tiles = _Tiles(anchors, candidates, scale, targets, anchor_ids, candidate_ids, dims)
        grad_anchors = torch.zeros_like(anchors)
        grad_candidates = torch.zeros_like(candidates) if needs_candidates else None
        grad_scale = torch.zeros_like(scale)
        # The derivative of a score with respect to the norm of its anchor or candidate is minus the score over the
        # norm. The gradients of the norms need the sums of score times gradient over rows and over columns.
        column_sums = torch.zeros_like(tiles.column_factors)
        buffers = Buffers(anchors, 2 + len(dims), tile_size[0] * tile_size[1], anchors.dtype)
        for rows in blocks(len(anchors), tile_size[0]):
            weights = grads[rows]
            row_sums = torch.zeros_like(weights)
            for columns in blocks(len(candidates), tile_size[1]):
                left_out = tiles.left_out(rows, columns)
                products, scores, *gradients = buffers.of(rows.stop - rows.start, columns.stop - columns.start)
                for index in tiles.scores(rows, columns, products, scores):
                    gradient = torch.sub(scores, log_sums[rows, index, None], out=gradients[index]).exp_()
                    gradient.mul_(weights[:, index, None])
                    if left_out is not None:
                        gradient.masked_fill_(left_out, 0)
                    scores.mul_(gradient)
                    row_sums[:, index] += scores.sum(dim=1)
                    column_sums[index, columns] += scores.sum(dim=0)
                    gradient.mul_(tiles.row_factors[rows, index, None]).mul_(tiles.column_factors[index, columns])
                for shorter, longer in zip(reversed(gradients[:-1]), reversed(gradients[1:]), strict=True):
                    shorter.add_(longer)
                for gradient, segment in zip(gradients, tiles.segments, strict=True):
                    if needs_anchors:
                        grad_anchors[rows, segment].addmm_(gradient, candidates[columns, segment])
                    if grad_candidates is not None:
                        grad_candidates[columns, segment].addmm_(gradient.T, anchors[rows, segment])
            target_scores, positives = tiles.target_scores(rows), targets[rows]
            row_sums -= weights * target_scores
            column_sums.index_add_(1, positives, -(weights * target_scores).T)
            positive_gradient = tiles.expand(weights * tiles.row_factors[rows] * tiles.column_factors[:, positives].T)
            norm_gradient = tiles.expand(row_sums * (tiles.row_factors[rows] / scale).square())
            grad_anchors[rows, : dims[-1]] -= (
                positive_gradient * candidates[positives, : dims[-1]] + norm_gradient * anchors[rows, : dims[-1]]
            )
            if grad_candidates is not None:
                grad_candidates[:, : dims[-1]].index_add_(0, positives, -positive_gradient * anchors[rows, : dims[-1]])
            grad_scale += row_sums.sum() / scale
        if grad_candidates is not None:
            for columns in blocks(len(candidates), tile_size[1]):
                norm_gradient = tiles.expand((column_sums * tiles.column_factors.square())[:, columns].T)
                grad_candidates[columns, : dims[-1]] -= norm_gradient * candidates[columns, : dims[-1]]
        return (
            grad_anchors if needs_anchors else None,
            grad_candidates,
            grad_scale if needs_scale else None,
            *[None] * 5,
        )


class _Tiles:
    """The scaled cosines of anchors and candidates, one tile and one prefix at a time."""

    def __init__(
        self,
        anchors: torch.Tensor,
        candidates: torch.Tensor,
        scale: torch.Tensor,
        targets: torch.Tensor,
        anchor_ids: torch.Tensor | None,
        candidate_ids: torch.Tensor | None,
        dims: tuple[int, ...],
    ) -> None:
        self.anchors, self.candidates, self.targets = anchors, candidates, targets
        self.anchor_ids, self.candidate_ids = anchor_ids, candidate_ids
        self.segments = segments(dims)
        self.lengths = torch.tensor([s.stop - s.start for s in self.segments], device=anchors.device)
        self.row_factors = self._inverse_norms(anchors) * scale
        self.column_factors = self._inverse_norms(candidates).T.contiguous()

    def _inverse_norms(self, vectors: torch.Tensor) -> torch.Tensor:
        """The inverse norms of all prefixes, `(vectors, dims)`."""
        squares = [torch.linalg.vector_norm(vectors[:, segment], dim=1).square_() for segment in self.segments]
        return torch.stack(squares, dim=1).cumsum(dim=1).sqrt_().clamp_(min=SMALLEST_NORM).reciprocal_()

    def scores(self, rows: slice, columns: slice, products: torch.Tensor, scores: torch.Tensor) -> Iterator[int]:
        """Write the scaled cosines of each prefix to `scores`, shortest first, and yield the index of its dim."""
        products.zero_()
        for index, segment in enumerate(self.segments):
            products.addmm_(self.anchors[rows, segment], self.candidates[columns, segment].T)
            torch.mul(products, self.column_factors[index, columns], out=scores)
            scores.mul_(self.row_factors[rows, index, None])
            yield index

    def target_scores(self, rows: slice) -> torch.Tensor:
        """Scaled cosines of each anchor and its positive, `(rows, dims)`."""
        targets = self.targets[rows]
        anchors, positives = self.anchors[rows], self.candidates[targets]
        products = [(anchors[:, segment] * positives[:, segment]).sum(dim=1) for segment in self.segments]
        return torch.stack(products, dim=1).cumsum(dim=1) * self.row_factors[rows] * self.column_factors[:, targets].T

    def left_out(self, rows: slice, columns: slice) -> torch.Tensor | None:
        """Mask `(rows, columns)` of the candidates of a tile that are neither the positive nor a negative."""
        if self.anchor_ids is None or self.candidate_ids is None:
            return None
        return not_negatives(self.anchor_ids[rows], self.candidate_ids[columns], self.targets[rows] - columns.start)

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Expand values per prefix `(rows, dims)` to values per single dim `(rows, longest prefix)`: the sum over all
        prefixes that contain the dim."""
        return values.flip(1).cumsum(dim=1).flip(1).repeat_interleave(self.lengths, dim=1)


def _only_own(anchor_ids: torch.Tensor, candidate_ids: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether every anchor shares ids with no candidate except its positive, so that nothing must be left out."""
    for own, others in zip(anchor_ids.T, candidate_ids.T, strict=True):
        distinct, counts = torch.unique(others, return_counts=True)
        position = torch.searchsorted(distinct, own.contiguous()).clamp_(max=len(distinct) - 1)
        matches = torch.where(distinct[position] == own, counts[position], 0)
        if (matches > (others[targets] == own).long()).any():
            return False
    return True
