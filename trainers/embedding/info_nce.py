"""The contrastive loss at all prefix dims, for any batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...utils.numerics import Buffers, blocks, check_dims, precise, segments, summed_from_the_longest
from .scored_losses import nested_pair_cosines


# Similarities in memory at a time, (anchors, candidates): about one CPU cache, or enough to occupy a GPU.
TILE_SIZES = {"cpu": (256, 2048), "cuda": (4096, 4096)}
SMALLEST_NORM = 1e-12


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
    ring: Any = None,
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
    gradients: `len(dims) + 2` tiles, and a few numbers per anchor, candidate and dim. Products and sums are in float32
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
    parts = segments(check_dims(dims, anchors.shape[1]))
    tile_size = tile_size or TILE_SIZES.get(anchors.device.type, TILE_SIZES["cuda"])
    contrast = _Contrast(parts, targets, anchor_ids, None if anchor_ids is None else candidate_ids, ring, tile_size)
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

    segments: list[slice]
    targets: torch.Tensor
    anchor_ids: torch.Tensor | None
    candidate_ids: torch.Tensor | None
    ring: Any
    tile_size: tuple[int, int]

    def blocks(self, candidates: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
        """Yield candidates, their ids and each anchor's target among them: all candidates, or in a ring those of one
        rank at a time, this rank's first. Only this rank's have targets; elsewhere the target is -1."""
        held = [candidates] if self.candidate_ids is None else [candidates, self.candidate_ids]
        targets = self.targets
        for vectors, *ids in [held] if self.ring is None else self.ring.rounds(held):
            yield precise(vectors), ids[0] if ids else None, targets
            targets = torch.full_like(targets, -1)

    def inverse_norms(self, vectors: torch.Tensor) -> torch.Tensor:
        """`1 / |v|` of all prefixes, `(dims, vectors)`."""
        norms = torch.stack([torch.linalg.vector_norm(vectors[:, segment], dim=1) for segment in self.segments])
        return norms.square_().cumsum(dim=0).clamp_(min=SMALLEST_NORM**2).rsqrt_()

    def subtract_norms_(self, gradient: torch.Tensor, vectors: torch.Tensor, factors: torch.Tensor) -> None:
        """Subtract every prefix of `vectors` times its factor, `(dims, vectors)`, from a gradient. Changes the
        factors."""
        for segment, total in zip(self.segments, summed_from_the_longest(factors.unbind()), strict=True):
            gradient[:, segment].addcmul_(vectors[:, segment], total[:, None], value=-1)


class _Tile:
    """The similarities of some anchors and some candidates of a block."""

    def __init__(self, contrast: _Contrast, rows: slice, columns: slice, ids: Any, targets: torch.Tensor) -> None:
        self.rows, self.columns, self.segments = rows, columns, contrast.segments
        targets = targets[rows] - columns.start
        self.inside = (targets >= 0) & (targets < columns.stop - columns.start)
        self.targets = torch.where(self.inside, targets, 0)[:, None]
        self.left_out = None
        if ids is not None and contrast.anchor_ids is not None:
            self.left_out = false_negatives(contrast.anchor_ids[rows], ids[columns], targets)

    @classmethod
    def all(
        cls, contrast: _Contrast, anchors: int, candidates: int, ids: torch.Tensor | None, targets: torch.Tensor
    ) -> Iterator[_Tile]:
        """All tiles of a block."""
        for rows in blocks(anchors, contrast.tile_size[0]):
            for columns in blocks(candidates, contrast.tile_size[1]):
                yield cls(contrast, rows, columns, ids, targets)

    def scores(
        self,
        anchors: torch.Tensor,
        candidates: torch.Tensor,
        factors: torch.Tensor,
        inverses: torch.Tensor,
        products: torch.Tensor,
        scores: torch.Tensor,
    ) -> Iterator[int]:
        """Write the scaled cosines of each prefix to `scores`, shortest first, and yield the index of its dim."""
        for k, segment in enumerate(self.segments):
            products.addmm_(anchors[self.rows, segment], candidates[self.columns, segment].T, beta=min(k, 1))
            torch.mul(products, inverses[k, self.columns], out=scores).mul_(factors[k, self.rows, None])
            yield k


class _NestedInfoNCE(torch.autograd.Function):
    """
    With `p = softmax(s)` over the candidates of an anchor, and w the gradient of its loss, `dL/ds = w (p - onehot)`.
    As `s = (a . c) f / |c|` with `f = scale / |a|`, the gradients at every prefix are

        dL/da = sum over c of dL/ds (f / |c|) c - (sum over c of dL/ds s) a / |a|^2
        dL/dc = sum over a of dL/ds (f / |c|) a - (sum over a of dL/ds s) c / |c|^2
        dL/dscale = sum of dL/ds s / scale
    """

    @staticmethod
    def forward(
        ctx: Any, anchors: torch.Tensor, candidates: torch.Tensor, scale: torch.Tensor, contrast: _Contrast
    ) -> torch.Tensor:
        norms, all_inverses = contrast.inverse_norms(anchors), []
        factors = norms * scale
        log_sums, target_scores = torch.full_like(factors, -torch.inf), torch.zeros_like(factors)
        for vectors, ids, targets in contrast.blocks(candidates):
            inverses, buffers = contrast.inverse_norms(vectors), _buffers(contrast, anchors, vectors, 2)
            all_inverses.append(inverses)
            for tile in _Tile.all(contrast, len(anchors), len(vectors), ids, targets):
                products, scores = buffers.of(tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start)
                for k in tile.scores(anchors, vectors, factors, inverses, products, scores):
                    target_scores[k, tile.rows] += scores.gather(1, tile.targets)[:, 0] * tile.inside
                    if tile.left_out is not None:
                        scores.masked_fill_(tile.left_out, -torch.inf)
                    # Finite even if a whole row of the tile is left out.
                    largest = scores.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
                    sums = scores.sub_(largest).exp_().sum(dim=1).log_().add_(largest[:, 0])
                    log_sums[k, tile.rows] = torch.logaddexp(log_sums[k, tile.rows], sums)
        ctx.contrast = contrast
        ctx.save_for_backward(anchors, candidates, scale, log_sums, norms, *all_inverses)
        return (log_sums - target_scores).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        anchors, candidates, scale, log_sums, norms, *all_inverses = ctx.saved_tensors
        contrast, weights, factors = ctx.contrast, grad_outputs[0].T.contiguous(), norms * scale
        grad_anchors = torch.zeros_like(anchors) if ctx.needs_input_grad[0] else None
        grad_candidates = torch.zeros_like(precise(candidates)) if ctx.needs_input_grad[1] else None
        row_sums = torch.zeros_like(log_sums)  # of dL/ds s
        for passes, (vectors, ids, targets) in enumerate(contrast.blocks(candidates)):
            inverses = all_inverses[passes]
            column_sums = torch.zeros_like(inverses)
            buffers = _buffers(contrast, anchors, vectors, 2 + len(contrast.segments))
            for tile in _Tile.all(contrast, len(anchors), len(vectors), ids, targets):
                rows, columns = tile.rows, tile.columns
                products, scores, *gradients = buffers.of(rows.stop - rows.start, columns.stop - columns.start)
                for k in tile.scores(anchors, vectors, factors, inverses, products, scores):
                    gradient = torch.sub(scores, log_sums[k, rows, None], out=gradients[k]).exp_()
                    if tile.left_out is not None:
                        gradient.masked_fill_(tile.left_out, 0)
                    gradient.scatter_add_(1, tile.targets, -tile.inside.to(gradient.dtype)[:, None])
                    gradient.mul_(weights[k, rows, None])
                    scores.mul_(gradient)
                    row_sums[k, rows] += scores.sum(dim=1)
                    column_sums[k, columns] += scores.sum(dim=0)
                    gradient.mul_(factors[k, rows, None]).mul_(inverses[k, columns])
                for gradient, segment in zip(summed_from_the_longest(gradients), contrast.segments, strict=True):
                    if grad_anchors is not None:
                        grad_anchors[rows, segment].addmm_(gradient, vectors[columns, segment])
                    if grad_candidates is not None:
                        grad_candidates[columns, segment].addmm_(gradient.T, anchors[rows, segment])
            if grad_candidates is not None:
                contrast.subtract_norms_(grad_candidates, vectors, column_sums * inverses.square())
                if contrast.ring is not None:  # the last pass brings it back to the rank of its candidates
                    grad_candidates = contrast.ring.pass_on_gradients(grad_candidates, passes)
        if grad_anchors is not None:
            contrast.subtract_norms_(grad_anchors, anchors, row_sums * norms.square())
        grad_scale = row_sums.sum() / scale if ctx.needs_input_grad[2] else None
        in_own_precision = None if grad_candidates is None else grad_candidates.to(candidates.dtype)
        return grad_anchors, in_own_precision, grad_scale, None


def _buffers(contrast: _Contrast, anchors: torch.Tensor, candidates: torch.Tensor, count: int) -> Buffers:
    """Matrices as large as a tile."""
    height, width = contrast.tile_size
    return Buffers(anchors, count, min(height, len(anchors)) * min(width, len(candidates)), anchors.dtype)
