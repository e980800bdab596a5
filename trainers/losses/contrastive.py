"""The contrastive loss of a whole set of prefix dims, at any batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ._blocks import Buffers, blocks, check_dims, no_autocast, precise, segments


# Similarities that exist at a time, (anchors, candidates): near the size of a cache, or enough to fill a GPU.
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

    The similarities pass in tiles, twice: for the log-sum-exp of every anchor and dim (forward), and for the gradients
    (backward). In a tile the dot products of a prefix are those of the prefix before it plus one product over the
    dims between them, then divided by the prefixes' norms; in the same way the gradient of a segment of dims is one
    product with the sum of the gradients of all prefixes that contain it. Memory beyond inputs and gradients:
    `len(dims) + 2` tiles, and a few numbers for every anchor, candidate and dim.

    Products and sums are in float32 at least, also under autocast: at a temperature of 0.05, a cosine rounded to
    bfloat16 is off by up to 0.04 in the exponent.

    Args:
        anchors (`torch.Tensor` of shape `(batch, hidden_size)`): Need not be normalised. Carries gradient.
        candidates (`torch.Tensor` of shape `(num_candidates, hidden_size)`): Positives and negatives of all anchors.
            Carries gradient.
        dims (`Sequence[int]`): Prefix dims, ascending, at most `hidden_size`.
        temperature (`float` or scalar `torch.Tensor`): Cosines are divided by it. A tensor carries gradient.
        targets (`torch.LongTensor` of shape `(batch,)`, *optional*): Row of each anchor's positive. By default the
            first `batch` candidates are the positives, in the order of the anchors.
        anchor_ids (`torch.LongTensor` of shape `(batch, num_ids)`, *optional*): With `candidate_ids` of shape
            `(num_candidates, num_ids)`: a candidate whose id equals the anchor's in any column is not a negative of
            it, but left out of its sum. The anchor's own positive always stays.
        candidate_ids (`torch.LongTensor`, *optional*): See `anchor_ids`.
        tile_size (`tuple[int, int]`, *optional*): Anchors and candidates of a tile; the default depends on the device.

    Returns:
        `torch.Tensor` of shape `(batch, len(dims))`, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size, there is nothing to contrast with (one
            candidate), or fewer candidates than anchors and no targets.
    """
    dims = check_dims(dims, anchors.shape[1])
    if len(candidates) < 2:
        raise ValueError(
            "A contrastive loss needs at least two candidates; a batch of one pair without hard negatives has one."
        )
    if targets is None:
        if len(candidates) < len(anchors):
            raise ValueError(
                f"{len(anchors)} anchors need as many positives, but there are {len(candidates)} candidates."
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
        # One prefix and one tile: nothing to share, and the plain form has fewer small steps.
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
    InfoNCE on cosines with the whole similarity matrix: [`nested_info_nce`] of one prefix.

    Args:
        anchors (`torch.Tensor` of shape `(batch, dim)`): Need not be normalised. Carries gradient.
        candidates (`torch.Tensor` of shape `(num_candidates, dim)`): Carries gradient.
        scale (scalar `torch.Tensor`): `1 / temperature`. Carries gradient.
        targets (`torch.LongTensor` of shape `(batch,)`): Row of each anchor's positive.
        left_out (`torch.Tensor` of shape `(batch, num_candidates)`, *optional*): Candidates that are no negatives.

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
    """Which candidates share an id with an anchor and are not its positive, `(batch, num_candidates)`. A target
    outside of the candidates is of none of them."""
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
                    # Finite even where a whole row of the tile is left out.
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
        # A score moves with both norms by itself over each of them: sums of score times its gradient tell how much.
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
            target_scores, own = tiles.target_scores(rows), targets[rows]
            row_sums -= weights * target_scores
            column_sums.index_add_(1, own, -(weights * target_scores).T)
            pull = tiles.expand(weights * tiles.row_factors[rows] * tiles.column_factors[:, own].T)
            lengthening = tiles.expand(row_sums * (tiles.row_factors[rows] / scale).square())
            grad_anchors[rows, : dims[-1]] -= (
                pull * candidates[own, : dims[-1]] + lengthening * anchors[rows, : dims[-1]]
            )
            if grad_candidates is not None:
                grad_candidates[:, : dims[-1]].index_add_(0, own, -pull * anchors[rows, : dims[-1]])
            grad_scale += row_sums.sum() / scale
        if grad_candidates is not None:
            for columns in blocks(len(candidates), tile_size[1]):
                lengthening = tiles.expand((column_sums * tiles.column_factors.square())[:, columns].T)
                grad_candidates[columns, : dims[-1]] -= lengthening * candidates[columns, : dims[-1]]
        return (
            grad_anchors if needs_anchors else None,
            grad_candidates,
            grad_scale if needs_scale else None,
            *[None] * 5,
        )


class _Tiles:
    """The scaled cosines of anchors and candidates, a tile and a prefix at a time."""

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
        """One over the norm of every prefix, `(vectors, dims)`."""
        squares = [torch.linalg.vector_norm(vectors[:, segment], dim=1).square_() for segment in self.segments]
        return torch.stack(squares, dim=1).cumsum(dim=1).sqrt_().clamp_(min=SMALLEST_NORM).reciprocal_()

    def scores(self, rows: slice, columns: slice, products: torch.Tensor, scores: torch.Tensor) -> Iterator[int]:
        """Yield the index of one dim after the other, its scaled cosines being in `scores`."""
        products.zero_()
        for index, segment in enumerate(self.segments):
            products.addmm_(self.anchors[rows, segment], self.candidates[columns, segment].T)
            torch.mul(products, self.column_factors[index, columns], out=scores)
            scores.mul_(self.row_factors[rows, index, None])
            yield index

    def target_scores(self, rows: slice) -> torch.Tensor:
        """Scaled cosines with the own positive, `(rows, dims)`."""
        own = self.targets[rows]
        anchors, positives = self.anchors[rows], self.candidates[own]
        products = [(anchors[:, segment] * positives[:, segment]).sum(dim=1) for segment in self.segments]
        return torch.stack(products, dim=1).cumsum(dim=1) * self.row_factors[rows] * self.column_factors[:, own].T

    def left_out(self, rows: slice, columns: slice) -> torch.Tensor | None:
        """Which candidates of a tile are no negatives though they are not the positive, `(rows, columns)`."""
        if self.anchor_ids is None or self.candidate_ids is None:
            return None
        return not_negatives(self.anchor_ids[rows], self.candidate_ids[columns], self.targets[rows] - columns.start)

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Values of prefixes `(rows, dims)` to those of single dims, `(rows, longest prefix)`: the sum over all
        prefixes that contain the dim."""
        return values.flip(1).cumsum(dim=1).flip(1).repeat_interleave(self.lengths, dim=1)


def _only_own(anchor_ids: torch.Tensor, candidate_ids: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether no anchor shares an id with a candidate other than its positive: then there is nothing to leave out."""
    for own, others in zip(anchor_ids.T, candidate_ids.T, strict=True):
        distinct, counts = torch.unique(others, return_counts=True)
        position = torch.searchsorted(distinct, own.contiguous()).clamp_(max=len(distinct) - 1)
        matches = torch.where(distinct[position] == own, counts[position], 0)
        if (matches > (others[targets] == own).long()).any():
            return False
    return True
