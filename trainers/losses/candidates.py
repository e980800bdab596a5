"""
Scores of anchors and blocks of candidates, in tiles: the log-sum-exp and the gradients of InfoNCE at all prefix dims,
added up block by block. A block holds all candidates ([`nested_info_nce`]) or those of one rank (a ring).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .common import Buffers, blocks, segments
from .false_negatives import Guide, unmark


# Similarities in memory at a time, (anchors, candidates): about one CPU cache, or enough to occupy a GPU.
TILE_SIZES = {"cpu": (256, 2048), "cuda": (4096, 4096)}
SMALLEST_NORM = 1e-12


def not_negatives(
    anchor_ids: torch.Tensor | None, candidate_ids: torch.Tensor | None, targets: torch.Tensor | None
) -> torch.Tensor | None:
    """Mask `(batch, num_candidates)` of the candidates that share an id with an anchor and are not its positive.
    Targets may be outside the candidates, for example when these are one tile of all candidates."""
    if anchor_ids is None or candidate_ids is None:
        return None
    same = (anchor_ids[:, None] == candidate_ids[None]).any(dim=2)
    return same if targets is None else unmark(same, targets)


def left_out(
    rows: slice,
    columns: slice,
    anchor_ids: torch.Tensor | None,
    candidate_ids: torch.Tensor | None,
    targets: torch.Tensor | None,
    guide: Guide | None = None,
) -> torch.Tensor | None:
    """Mask of the candidates in `columns` that are neither the positive nor a negative of the anchors in `rows`: equal
    texts ([`not_negatives`]), and those that a guide finds too close. `None` if there are neither ids nor a guide."""
    inside = None if targets is None else targets[rows] - columns.start
    same = None
    if anchor_ids is not None and candidate_ids is not None:
        same = not_negatives(anchor_ids[rows], candidate_ids[columns], inside)
    if guide is None:
        return same
    closer = guide.tile(rows, columns, inside)
    return closer if same is None else closer.logical_or_(same)


def only_own(anchor_ids: torch.Tensor, candidate_ids: torch.Tensor, targets: torch.Tensor | None) -> bool:
    """Whether every anchor shares ids with no candidate except its positive, so that nothing must be left out. Without
    targets, no positive is among the candidates."""
    if not len(candidate_ids):
        return True
    for own, others in zip(anchor_ids.T, candidate_ids.T, strict=True):
        distinct, counts = torch.unique(others, return_counts=True)
        position = torch.searchsorted(distinct, own.contiguous()).clamp_(max=len(distinct) - 1)
        matches = torch.where(distinct[position] == own, counts[position], 0)
        expected = torch.zeros_like(matches) if targets is None else (others[targets] == own).long()
        if (matches > expected).any():
            return False
    return True


class AnchorRows:
    """
    Anchors, and what all blocks of their candidates need of them.

    Args:
        vectors (`torch.Tensor` of shape `(batch, hidden_size)`): The anchors, in float32 or wider.
        scale (scalar `torch.Tensor`): `1 / temperature`.
        dims (`tuple[int, ...]`): Prefix dims, ascending.
        ids (`torch.LongTensor` of shape `(batch, num_ids)`, *optional*): See [`nested_info_nce`].
        tile_size (`tuple[int, int]`, *optional*): See [`nested_info_nce`].
    """

    def __init__(
        self,
        vectors: torch.Tensor,
        scale: torch.Tensor,
        dims: tuple[int, ...],
        ids: torch.Tensor | None = None,
        tile_size: tuple[int, int] | None = None,
    ) -> None:
        self.vectors, self.scale, self.dims, self.ids = vectors, scale, dims, ids
        self.tile_size = tile_size or TILE_SIZES.get(vectors.device.type, TILE_SIZES["cuda"])
        self.segments = segments(dims)
        self.lengths = torch.tensor([s.stop - s.start for s in self.segments], device=vectors.device)
        self.factors = self.inverse_norms(vectors) * scale

    def inverse_norms(self, vectors: torch.Tensor) -> torch.Tensor:
        """The inverse norms of all prefixes of anchors or candidates, `(vectors, dims)`."""
        squares = [torch.linalg.vector_norm(vectors[:, segment], dim=1).square_() for segment in self.segments]
        return torch.stack(squares, dim=1).cumsum(dim=1).sqrt_().clamp_(min=SMALLEST_NORM).reciprocal_()

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Expand values per prefix `(rows, dims)` to values per single dim `(rows, longest prefix)`: the sum over all
        prefixes that contain the dim."""
        return values.flip(1).cumsum(dim=1).flip(1).repeat_interleave(self.lengths, dim=1)

    def blocks(self) -> list[slice]:
        """The rows of each tile."""
        return blocks(len(self.vectors), self.tile_size[0])

    def no_candidates(self) -> torch.Tensor:
        """The log-sum-exp over no candidates, `(batch, dims)`, to which blocks are added."""
        return self.vectors.new_full((len(self.vectors), len(self.dims)), -torch.inf)


class AnchorGradients:
    """
    The gradients of anchors and scale, which blocks of candidates add to.

    Args:
        rows ([`AnchorRows`]): The anchors.
        weights (`torch.Tensor` of shape `(batch, dims)`): Gradients of the losses.
        log_sums (`torch.Tensor` of shape `(batch, dims)`): Log-sum-exp over the candidates of all blocks.
        needed (`bool`, *optional*, defaults to `True`): Whether the anchors need a gradient.
    """

    def __init__(self, rows: AnchorRows, weights: torch.Tensor, log_sums: torch.Tensor, needed: bool = True) -> None:
        self.rows, self.weights, self.log_sums = rows, weights, log_sums
        self.anchors = torch.zeros_like(rows.vectors) if needed else None
        # The derivative of a score with respect to the norm of its anchor or candidate is minus the score over the
        # norm. The gradients of the norms need the sums of score times gradient over rows and over columns.
        self.row_sums = torch.zeros_like(log_sums)

    def finished(self) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Gradients of the anchors and of the scale, after all blocks."""
        rows, longest = self.rows, self.rows.dims[-1]
        if self.anchors is not None:
            for part in rows.blocks():
                norms = rows.expand(self.row_sums[part] * (rows.factors[part] / rows.scale).square())
                self.anchors[part, :longest] -= norms * rows.vectors[part, :longest]
        return self.anchors, self.row_sums.sum() / rows.scale


class CandidateBlock:
    """
    The scaled cosines of all anchors and a block of their candidates, one tile and one prefix at a time. The
    log-sum-exp and the gradients of several blocks, added one after another, are those of all candidates at once.

    Args:
        rows ([`AnchorRows`]): The anchors.
        vectors (`torch.Tensor` of shape `(candidates, hidden_size)`): The candidates of the block, in the precision of
            the anchors.
        ids (`torch.LongTensor` of shape `(candidates, num_ids)`, *optional*): See [`nested_info_nce`].
        targets (`torch.LongTensor` of shape `(batch,)`, *optional*): Index of each anchor's positive in the block.
            Default: the block has no positive of these anchors.
        guide ([`Guide`], *optional*): Finds false negatives among the candidates of the block.
    """

    def __init__(
        self,
        rows: AnchorRows,
        vectors: torch.Tensor,
        ids: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.rows, self.vectors, self.ids, self.targets, self.guide = rows, vectors, ids, targets, guide
        self.factors = rows.inverse_norms(vectors).T.contiguous()

    def blocks(self) -> list[slice]:
        """The candidates of each tile."""
        return blocks(len(self.vectors), self.rows.tile_size[1])

    def buffers(self, count: int) -> Buffers:
        """Matrices as large as a tile."""
        height, width = self.rows.tile_size
        size = min(height, len(self.rows.vectors)) * min(width, len(self.vectors))
        return Buffers(self.rows.vectors, count, size, self.rows.vectors.dtype)

    def scores(self, rows: slice, columns: slice, products: torch.Tensor, scores: torch.Tensor) -> Iterator[int]:
        """Write the scaled cosines of each prefix to `scores`, shortest first, and yield the index of its dim."""
        products.zero_()
        for index, segment in enumerate(self.rows.segments):
            products.addmm_(self.rows.vectors[rows, segment], self.vectors[columns, segment].T)
            torch.mul(products, self.factors[index, columns], out=scores)
            scores.mul_(self.rows.factors[rows, index, None])
            yield index

    def left_out(self, rows: slice, columns: slice) -> torch.Tensor | None:
        """Mask `(rows, columns)` of the candidates of a tile that are neither the positive nor a negative."""
        return left_out(rows, columns, self.rows.ids, self.ids, self.targets, self.guide)

    def add_to_log_sums(self, log_sums: torch.Tensor) -> None:
        """Add the exponentials of the scores of the block to a running log-sum-exp `(batch, dims)`, in place."""
        buffers = self.buffers(2)
        for rows in self.rows.blocks():
            for columns in self.blocks():
                left_out = self.left_out(rows, columns)
                products, scores = buffers.of(rows.stop - rows.start, columns.stop - columns.start)
                for index in self.scores(rows, columns, products, scores):
                    if left_out is not None:
                        scores.masked_fill_(left_out, -torch.inf)
                    # Finite even if a whole row of the tile is left out.
                    largest = scores.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
                    sums = scores.sub_(largest).exp_().sum(dim=1)
                    log_sums[rows, index] = torch.logaddexp(log_sums[rows, index], sums.log_().add_(largest[:, 0]))

    def target_scores(self) -> torch.Tensor:
        """Scaled cosines of the anchors and their positives, which must be in this block, `(batch, dims)`."""
        if self.targets is None:
            raise ValueError("The block has no positives of these anchors: it was made without targets.")
        scores = torch.empty_like(self.rows.factors)
        for rows in self.rows.blocks():
            scores[rows] = self._target_scores(rows, self.targets[rows])
        return scores

    def _target_scores(self, rows: slice, targets: torch.Tensor) -> torch.Tensor:
        """[`target_scores`] of some rows."""
        anchors, positives = self.rows.vectors[rows], self.vectors[targets]
        products = [(anchors[:, segment] * positives[:, segment]).sum(dim=1) for segment in self.rows.segments]
        return torch.stack(products, dim=1).cumsum(dim=1) * self.rows.factors[rows] * self.factors[:, targets].T

    def add_gradients(self, grads: AnchorGradients, grad_candidates: torch.Tensor | None) -> None:
        """
        Add the gradients of the block, in place.

        Args:
            grads ([`AnchorGradients`]): Gradients of the anchors.
            grad_candidates (`torch.Tensor` of shape `(candidates, hidden_size)`, *optional*): Gradients of the
                candidates of the block. Default: they are not computed.
        """
        column_sums = torch.zeros_like(self.factors)
        buffers = self.buffers(2 + len(self.rows.dims))
        for rows in self.rows.blocks():
            weights = grads.weights[rows]
            for columns in self.blocks():
                left_out = self.left_out(rows, columns)
                products, scores, *gradients = buffers.of(rows.stop - rows.start, columns.stop - columns.start)
                for index in self.scores(rows, columns, products, scores):
                    gradient = torch.sub(scores, grads.log_sums[rows, index, None], out=gradients[index]).exp_()
                    gradient.mul_(weights[:, index, None])
                    if left_out is not None:
                        gradient.masked_fill_(left_out, 0)
                    scores.mul_(gradient)
                    grads.row_sums[rows, index] += scores.sum(dim=1)
                    column_sums[index, columns] += scores.sum(dim=0)
                    gradient.mul_(self.rows.factors[rows, index, None]).mul_(self.factors[index, columns])
                for shorter, longer in zip(reversed(gradients[:-1]), reversed(gradients[1:]), strict=True):
                    shorter.add_(longer)
                for gradient, segment in zip(gradients, self.rows.segments, strict=True):
                    if grads.anchors is not None:
                        grads.anchors[rows, segment].addmm_(gradient, self.vectors[columns, segment])
                    if grad_candidates is not None:
                        grad_candidates[columns, segment].addmm_(gradient.T, self.rows.vectors[rows, segment])
            if self.targets is not None:
                self._subtract_positives(rows, self.targets[rows], grads, column_sums, grad_candidates)
        if grad_candidates is not None:
            longest = self.rows.dims[-1]
            for columns in self.blocks():
                norms = self.rows.expand((column_sums * self.factors.square())[:, columns].T)
                grad_candidates[columns, :longest] -= norms * self.vectors[columns, :longest]

    def _subtract_positives(
        self,
        rows: slice,
        positives: torch.Tensor,
        grads: AnchorGradients,
        column_sums: torch.Tensor,
        grad_candidates: torch.Tensor | None,
    ) -> None:
        """The gradient of `-s(i, t_i)`, for some rows."""
        weights, longest = grads.weights[rows], self.rows.dims[-1]
        weighted = weights * self._target_scores(rows, positives)
        grads.row_sums[rows] -= weighted
        column_sums.index_add_(1, positives, -weighted.T)
        gradient = self.rows.expand(weights * self.rows.factors[rows] * self.factors[:, positives].T)
        if grads.anchors is not None:
            grads.anchors[rows, :longest] -= gradient * self.vectors[positives, :longest]
        if grad_candidates is not None:
            grad_candidates[:, :longest].index_add_(0, positives, -gradient * self.rows.vectors[rows, :longest])
