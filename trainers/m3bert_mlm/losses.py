"""The multigranular masked-LM loss: all prefix dims at the cost of one product over all dims."""

from __future__ import annotations

import itertools
import os
import shutil
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from torch.autograd.function import once_differentiable
from transformers.utils import logging

from ...utils.numerics import Buffers, blocks, check_dims, segments, summed_from_the_longest


logger = logging.get_logger(__name__)

# Scores in memory at a time (rows x vocabulary block). On a CPU, they and their gradients at a few dims should stay in
# the cache: 2^19 float32 scores are 2 MiB per dim. Elsewhere, small blocks would leave the device waiting for the next
# kernel: 2^27 scores are 0.5 GiB per dim, so the four dims of the paper need 2.5 GiB.
CPU_BLOCK_SCORES = 2**19
BLOCK_SCORES = 2**27

Node = tuple[int, int]  # (index of a layer, index of a dim)


@torch.compiler.disable  # the loop over the blocks would be unrolled
def nested_cross_entropy(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    dims: Sequence[int],
    block_size: int | None = None,
) -> torch.Tensor:
    r"""
    Cross-entropy of every row at every prefix dim (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568),
    section 2.1): `loss[i, k] = -log softmax(states[i, :d_k] @ weight[:, :d_k].T + bias)[targets[i]]`, exact in value
    and gradient.

    The scores of a prefix continue those of the next shorter one, so all prefixes together cost one product of all
    dims, and so do their gradients. The vocabulary is processed in blocks, twice: for the log-sum-exp of every row and
    dim (forward), and for the gradients (backward). A full tensor of rows x vocabulary is never allocated. On a GPU,
    all that follows the products of a block is compiled into one pass over them.

    Memory in addition to the inputs and their gradients: `rows * block * (dims + 1)` numbers (on a GPU twice as many,
    in the type of the products), and one number per row, dim and block. On a CPU, if there are at most `hidden_size`
    rows, the gradient of `weight` is allocated in the forward pass and holds the scores of the longest prefix.

    Args:
        states (`torch.Tensor` of shape `(rows, hidden_size)`): Hidden states of the masked tokens. Carries gradient.
        weight (`torch.Tensor` of shape `(vocab_size, hidden_size)`): Vocabulary projection. Carries gradient.
        bias (`torch.Tensor` of shape `(vocab_size,)`, *optional*): Bias of the projection. Carries gradient.
        targets (`torch.LongTensor` of shape `(rows,)`): Token ids in 0..vocab_size - 1.
        dims (`Sequence[int]`): Prefix dims, ascending, at most `hidden_size`.
        block_size (`int`, *optional*): Number of vocabulary entries at a time.

    Returns:
        `torch.Tensor` of shape `(rows, len(dims))`, in float32 (float64 for float64 hidden states). Under autocast,
        products are computed in its dtype and summed in float32.

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size.
    """
    head = _Head.of(states, weight, dims, block_size)
    if is_compiled(states):
        return _CompiledCrossEntropy.apply(states, weight, bias, targets, head)
    return _NestedCrossEntropy.apply(states, weight, bias, targets, head)


@torch.compiler.disable
def nested_cross_entropy_and_divergence(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    dims: Sequence[int],
    pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]],
    reverse: bool = True,
    temperature: float = 1.0,
    block_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    [`nested_cross_entropy`] of the hidden states of several layers, and KL divergences between the predictions at
    pairs of granularities (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), Eq. 2). Both are computed
    from the same scores, in the same passes over the vocabulary. With `P = softmax(scores / temperature)` and teachers
    without gradient, the divergence is `KL(P_student || P_teacher)`, as in Eq. 2, or the reverse. It is not multiplied
    by `temperature^2`.

    Memory in addition to that of [`nested_cross_entropy`]: a few times `tokens * block` numbers per pair.

    Args:
        states (`torch.Tensor` of shape `(layers, tokens, hidden_size)`): Hidden states of the masked tokens. Carries
            gradient.
        weight (`torch.Tensor` of shape `(vocab_size, hidden_size)`): Vocabulary projection. Carries gradient.
        bias (`torch.Tensor` of shape `(vocab_size,)`, *optional*): Bias of the projection. Carries gradient.
        targets (`torch.LongTensor` of shape `(tokens,)`): Token ids in 0..vocab_size - 1.
        dims (`Sequence[int]`): Prefix dims, ascending, at most `hidden_size`.
        pairs (`Sequence[tuple]`): Pairs (student, teacher); each is a tuple (index of a layer, index of a dim).
        reverse (`bool`, *optional*, defaults to `True`): Whether to compute KL(student || teacher) rather than
            KL(teacher || student).
        temperature (`float`, *optional*, defaults to 1.0): tau_D; scores are divided by it.
        block_size (`int`, *optional*): Number of vocabulary entries at a time.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: cross-entropies `(layers, tokens, dims)` and divergences
        `(pairs, tokens)`, in float32 (float64 for float64 hidden states).

    Raises:
        ValueError: as [`nested_cross_entropy`].
    """
    layers, tokens, _ = states.shape
    rows = states.flatten(0, 1)
    head = _Head.of(rows, weight, dims, block_size)
    divergences = _Divergences(tuple(pairs), tokens, reverse, temperature)
    losses, values = _CrossEntropyAndDivergence.apply(rows, weight, bias, targets.repeat(layers), head, divergences)
    return losses.view(layers, tokens, len(dims)), values


def default_block_size(rows: torch.Tensor) -> int:
    """Default number of vocabulary entries at a time for these rows."""
    scores = CPU_BLOCK_SCORES if rows.device.type == "cpu" else BLOCK_SCORES
    return max(256, scores // max(1, len(rows)) // 64 * 64)  # products of odd widths take a slow kernel


@dataclass
class _Head:
    """
    How the scores of a vocabulary projection are computed.

    Args:
        segments (`list[slice]`): The dims between consecutive prefix dims.
        blocks (`list[slice]`): Blocks of the vocabulary.
        dtype (`torch.dtype`): Type of the products.
        stored (`torch.Tensor`, *optional*): Memory for the gradient of the weight. Until the backward pass, it holds
            the scores of the longest prefix, which then need not be computed again. `None` if the weight needs no
            gradient, or if its gradient is smaller than the scores or has a lower precision.
    """

    segments: list[slice]
    blocks: list[slice]
    dtype: torch.dtype
    stored: torch.Tensor | None

    @classmethod
    def of(cls, rows: torch.Tensor, weight: torch.Tensor, dims: Sequence[int], block_size: int | None) -> Self:
        kind = rows.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
        fits = (
            not is_compiled(rows)
            and len(rows) <= weight.shape[1]
            and weight.dtype == torch.promote_types(dtype, torch.float32)
        )
        stored = torch.empty_like(weight) if fits and torch.is_grad_enabled() and weight.requires_grad else None
        size = min(block_size or default_block_size(rows), len(weight))
        return cls(segments(check_dims(dims, rows.shape[1])), blocks(len(weight), size), dtype, stored)

    @property
    def precise(self) -> torch.dtype:
        """Type of the scores: float32 or wider."""
        return torch.promote_types(self.dtype, torch.float32)

    def buffers(self, rows: torch.Tensor, count: int) -> Buffers:
        """Matrices `(rows, block)`."""
        return Buffers(rows, count, len(rows) * (self.blocks[0].stop if self.blocks else 0), self.precise)

    def products(self, rows: torch.Tensor, block_weight: torch.Tensor) -> list[torch.Tensor]:
        """The products `(rows, block)` of the segments."""
        return [rows[:, segment] @ block_weight[:, segment].T for segment in self.segments]

    def nested_scores(
        self, rows: torch.Tensor, block_weight: torch.Tensor, bias: torch.Tensor | None, scores: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield the scores `(rows, block)` of each prefix, shortest first: always the tensor `scores`, updated in
        place."""
        if bias is None:
            scores.zero_()
        else:  # a block of words that are all switched off has a softmax, too
            scores.copy_(bias.clamp(min=1e-6 * torch.finfo(scores.dtype).min))
        for segment in self.segments:
            _add_product_(scores, rows[:, segment], block_weight[:, segment].T)
            yield scores


def target_scores(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, head: _Head
) -> torch.Tensor:
    """The scores of the targets at every prefix dim, `(rows, dims)`, in float32 or wider."""
    products = [rows[:, segment] * weight[targets, segment].to(head.dtype) for segment in head.segments]
    scores = torch.stack([product.sum(dim=1, dtype=head.precise) for product in products], dim=1).cumsum(dim=1)
    return scores if bias is None else scores + bias[targets].to(head.precise)[:, None]


def _add_product_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to `total`, in place. Half-precision operands may have a total in float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _stored_scores(stored: torch.Tensor, block: slice, rows: int) -> torch.Tensor:
    """The scores `(rows, block)` that are held in the memory of a block of the weight's gradient."""
    width = block.stop - block.start
    return stored[block].view(-1)[: rows * width].view(rows, width)


read_all: Callable[[Iterable[Any]], object] = partial(deque, maxlen=0)  # values that are not needed again


class _LogSums:
    """The log-sum-exps of all blocks at every prefix dim, in a forward pass."""

    def __init__(self, head: _Head, rows: torch.Tensor) -> None:
        shape, self.head = (len(head.blocks), len(head.segments), len(rows)), head
        self.largest, self.probabilities = (rows.new_empty(shape, dtype=head.precise) for _ in range(2))

    def blocks(
        self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Iterator[Iterator[torch.Tensor]]:
        """Yield the scores of each block, which are added as they are read: `(rows, block)` at each dim."""
        rows, buffers = states.to(self.head.dtype), self.head.buffers(states, 2)
        for number, block in enumerate(self.head.blocks):
            nested, room = buffers.of(len(rows), block.stop - block.start)
            block_weight, block_bias = weight[block].to(self.head.dtype), None if bias is None else bias[block]
            yield self.adding(number, self.head.nested_scores(rows, block_weight, block_bias, nested), room)
            if self.head.stored is not None:
                _stored_scores(self.head.stored, block, len(rows)).copy_(nested)

    def adding(self, number: int, every_score: Iterator[torch.Tensor], room: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the scores of a block after adding them; `room` has their shape."""
        for index, scores in enumerate(every_score):
            # A softmax is one pass over memory, where `logsumexp` is several. The largest score s has the
            # probability p = exp(s - log_sum).
            torch.amax(torch.softmax(scores, dim=1, out=room), dim=1, out=self.probabilities[number, index])
            torch.amax(scores, dim=1, out=self.largest[number, index])
            yield scores

    def totals(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-sum-exps over the vocabulary `(dims, rows)`, and the share of each block `(blocks, dims, rows)`."""
        block_log_sums = self.largest.sub_(self.probabilities.log_())
        log_sums = block_log_sums.logsumexp(dim=0)
        return log_sums, block_log_sums.sub_(log_sums).exp_()


class _Gradients:
    """The gradients of hidden states, weight and bias, which grow block by block, in a backward pass."""

    def __init__(self, ctx: Any, grad_losses: torch.Tensor) -> None:
        self.head: _Head = ctx.head
        self.states, self.weight, self.bias, targets, shares = ctx.saved_tensors[:5]
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_losses, self.rows = grad_losses.to(shares.dtype), self.states.to(self.head.dtype)
        self.of_states = torch.zeros_like(self.states, dtype=shares.dtype) if needs_states else None
        # The memory becomes the gradient of the weight, so a second backward pass cannot use its scores.
        self.stored, self.head.stored = self.head.stored, None
        room = torch.empty_like(self.weight) if needs_weight and self.stored is None else self.stored
        self.of_weight = room if needs_weight else None
        self.of_bias = torch.empty_like(self.bias) if needs_bias else None
        self.buffers, self.factors = self.head.buffers(self.rows, 1 + len(self.head.segments)), shares * grad_losses.T
        # In the order of the targets, the rows whose target is in a block are next to each other. Their bounds are the
        # only numbers that the host waits for.
        self.targets, self.order = targets.sort()
        starts = torch.arange(0, len(self.weight), self.head.blocks[0].stop, device=targets.device)
        self.bounds = [*torch.searchsorted(self.targets, starts).tolist(), len(targets)]
        self.target_grads = grad_losses[self.order].T

    def scores(self, number: int) -> Iterator[torch.Tensor]:
        """Begin a block: yield its scores at each dim, and then set the gradients of their log-sum-exps."""
        block, bias = self.head.blocks[number], self.bias
        self.buffer = self.buffers.of(len(self.rows), block.stop - block.start)
        nested, *self.gradients = self.buffer
        self.block_weight = self.weight[block].to(self.head.dtype)
        every = self.head.nested_scores(self.rows, self.block_weight, None if bias is None else bias[block], nested)
        if self.stored is not None:
            shorter_prefixes = itertools.islice(every, len(self.head.segments) - 1)
            every = itertools.chain(shorter_prefixes, [_stored_scores(self.stored, block, len(self.rows))])
        for gradient, scores, factor in zip(self.gradients, every, self.factors[number], strict=True):
            yield scores
            torch.softmax(scores, dim=1, out=gradient).mul_(factor[:, None])

    def finish(self, number: int, others: Iterable[torch.Tensor] = ()) -> None:
        """End a block: add its part of the gradients, also from other gradients of the scores at each dim."""
        block = self.head.blocks[number]
        # Subtract before rounding: in half precision, a probability close to 1 minus 1 would be 0.
        hits = slice(self.bounds[number], self.bounds[number + 1])
        self.buffer[1:, self.order[hits], self.targets[hits] - block.start] -= self.target_grads[:, hits]
        for gradient, other in zip(self.gradients, others, strict=False):
            gradient.add_(other)
        for gradient, segment in zip(summed_from_the_longest(self.gradients), self.head.segments, strict=True):
            gradient = gradient.to(self.head.dtype)
            if self.of_states is not None:
                _add_product_(self.of_states[:, segment], gradient, self.block_weight[:, segment])
            if self.of_weight is not None:
                self.of_weight[block, segment] = gradient.T @ self.rows[:, segment]
        if self.of_weight is not None:
            self.of_weight[block, self.head.segments[-1].stop :] = 0
        if self.of_bias is not None:
            self.of_bias[block] = self.gradients[0].sum(dim=0)

    def all(self) -> tuple[torch.Tensor | None, ...]:
        """The gradients of hidden states, weight and bias."""
        of_states = self.of_states.to(self.states.dtype) if self.of_states is not None else None
        return of_states, self.of_weight, self.of_bias


class _NestedCrossEntropy(torch.autograd.Function):
    """See [`nested_cross_entropy`]."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: _Head,
    ) -> torch.Tensor:
        sums = _LogSums(head, states)
        for every_score in sums.blocks(states, weight, bias):
            read_all(every_score)
        log_sums, shares = sums.totals()
        ctx.head = head
        ctx.save_for_backward(states, weight, bias, targets, shares)
        return log_sums.T.contiguous() - target_scores(states.to(head.dtype), weight, bias, targets, head)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = _Gradients(ctx, grad_losses)
        for number in range(len(ctx.head.blocks)):
            read_all(gradients.scores(number))
            gradients.finish(number)
        return *gradients.all(), None, None


class _CrossEntropyAndDivergence(torch.autograd.Function):
    """See [`nested_cross_entropy_and_divergence`]."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: _Head,
        divergences: _Divergences,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = _LogSums(head, states)
        blocks = sums.blocks(states, weight, bias)
        parts = [divergences.of_block([scores.clone() for scores in every_score]) for every_score in blocks]
        log_sums, shares = sums.totals()
        ctx.head, ctx.divergences = head, divergences
        block_parts = [torch.stack(each) for each in zip(*parts, strict=True)]
        ctx.save_for_backward(states, weight, bias, targets, shares, *block_parts)
        losses = log_sums.T.contiguous() - target_scores(states.to(head.dtype), weight, bias, targets, head)
        return losses, divergences.values(*block_parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, shares, block_parts = _Gradients(ctx, grad_outputs[0]), ctx.saved_tensors[4], ctx.saved_tensors[5:]
        grad_parts = ctx.divergences.part_gradients(block_parts, grad_outputs[1].to(shares.dtype))
        for number in range(len(ctx.head.blocks)):
            every_score = [scores.clone() for scores in gradients.scores(number)]
            others = ctx.divergences.score_gradients(every_score, [part[number] for part in grad_parts])
            gradients.finish(number, others)
        return *gradients.all(), None, None, None


def is_compiled(states: torch.Tensor) -> bool:
    """Whether the loss of these hidden states is compiled: on a GPU."""
    return states.is_cuda


def prefix_log_sums(products: Sequence[torch.Tensor], bias: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of a block's scores at every prefix dim, `(dims, rows)`, from the bias `(block,)`, which has
    their type, and the products `(rows, block)` of the segments."""
    scores, log_sums = bias, []
    for product in products:
        scores = scores + product.to(bias.dtype)
        log_sums.append(scores.logsumexp(dim=1))
    return torch.stack(log_sums)


def segment_gradients(
    products: Sequence[torch.Tensor],
    bias: torch.Tensor,
    log_sums: torch.Tensor,
    grad_losses: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """
    The gradients of the products `(rows, block)` of the segments, in their type, and of the bias `(block,)`, from the
    arguments of [`prefix_log_sums`], the log-sum-exps over the whole vocabulary and the gradients of the losses, both
    `(dims, rows)`, and the targets `(rows,)`, counted from the first entry of the block.
    """
    scores, gradients = bias, []
    hits = torch.arange(len(bias), device=bias.device) == targets[:, None]
    for product, log_sum, grad in zip(products, log_sums, grad_losses, strict=True):
        scores = scores + product.to(bias.dtype)
        gradients.append(((scores - log_sum[:, None]).exp() - hits.to(bias.dtype)) * grad[:, None])
    for index in range(len(gradients) - 1, 0, -1):  # a segment is in its own prefix and in all longer ones
        gradients[index - 1] = gradients[index - 1] + gradients[index]
    return [each.to(products[0].dtype) for each in gradients], gradients[0].sum(dim=0)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as one kernel for any number of rows and columns, where there is what compiles it: Triton, and the C
    compiler and Python's headers that it needs. Else the function as it is, with a warning."""
    needed = {
        "Triton": find_spec("triton"),
        "a C compiler": any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))),
        "Python's headers": Path(sysconfig.get_path("include"), "Python.h").is_file(),
    }
    if missing := [name for name, available in needed.items() if not available]:
        logger.warning_once(f"The masked-LM head is not compiled, which makes it slower: {missing[0]} is missing.")
        return function
    return torch.compile(function, dynamic=True)


class _CompiledCrossEntropy(torch.autograd.Function):
    """See [`nested_cross_entropy`]."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: _Head,
    ) -> torch.Tensor:
        rows = states.to(head.dtype)
        offset = (weight.new_zeros(len(weight)) if bias is None else bias).to(head.precise)
        parts = [
            compiled(prefix_log_sums)(head.products(rows, weight[block].to(head.dtype)), offset[block])
            for block in head.blocks
        ]
        log_sums = torch.stack(parts).logsumexp(dim=0)
        ctx.head = head
        ctx.save_for_backward(states, weight, offset, targets, log_sums)
        return log_sums.T - target_scores(rows, weight, offset, targets, head)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, offset, targets, log_sums = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        head, rows = ctx.head, states.to(ctx.head.dtype)
        grad_states = torch.zeros_like(states, dtype=log_sums.dtype) if needs_states else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias, grads = torch.empty_like(offset), grad_losses.T.contiguous()
        for block in head.blocks:
            block_weight = weight[block].to(head.dtype)
            products = head.products(rows, block_weight)
            gradients, grad_bias[block] = compiled(segment_gradients)(
                products, offset[block], log_sums, grads, targets - block.start
            )
            del products
            for gradient, segment in zip(gradients, head.segments, strict=True):
                if grad_states is not None:
                    _add_product_(grad_states[:, segment], gradient, block_weight[:, segment])
                if grad_weight is not None:
                    grad_weight[block, segment] = gradient.T @ rows[:, segment]
        grad_states = grad_states.to(states.dtype) if grad_states is not None else None
        return grad_states, grad_weight, grad_bias if needs_bias else None, None, None


@dataclass(frozen=True)
class _Divergences:
    """
    KL divergences from blocks of scores. With the scores s_p and s_q of two distributions,
    `KL(p || q) = E_p[s_p - s_q] - logsumexp(s_p) + logsumexp(s_q)`. The parts of a block are its log-sum-exps and its
    means `E_p[s_p - s_q]`; those of all blocks give the divergence. Autograd differentiates each of the two steps. The
    rows of layer i are `i * tokens` to `(i + 1) * tokens`.
    """

    pairs: tuple[tuple[Node, Node], ...]
    tokens: int
    reverse: bool
    temperature: float

    def of_block(self, scores: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """From the scores of each dim, `(layers * tokens, block)`: the log-sum-exp of the two sides of each pair,
        `(pairs, 2, tokens)`, and the means, `(pairs, tokens)`."""
        log_sums, means = [], []
        for pair in self.pairs:
            sides = (scores[dim][layer * self.tokens : (layer + 1) * self.tokens] for layer, dim in pair)
            student, teacher = (side / self.temperature for side in sides)
            p, q = (student, teacher.detach()) if self.reverse else (teacher.detach(), student)
            means.append((p.softmax(dim=1) * (p - q)).sum(dim=1))
            log_sums.append(torch.stack([p.logsumexp(dim=1), q.logsumexp(dim=1)]))
        return torch.stack(log_sums), torch.stack(means)

    def values(self, log_sums: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
        """The divergences `(pairs, tokens)` from the parts of all blocks, stacked."""
        totals = log_sums.logsumexp(dim=0)
        shares = (log_sums - totals).exp()
        return (shares[:, :, 0] * means).sum(dim=0) - totals[:, 0] + totals[:, 1]

    def part_gradients(self, parts: Sequence[torch.Tensor], grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The gradients of the parts of all blocks, from the divergences' gradients."""
        with torch.enable_grad():
            leaves = [part.detach().requires_grad_() for part in parts]
            return torch.autograd.grad(self.values(*leaves), leaves, grads)

    def score_gradients(
        self, scores: Sequence[torch.Tensor], part_gradients: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of a block's scores at each dim, from its parts' gradients."""
        with torch.enable_grad():
            leaves = [each.requires_grad_() for each in scores]
            return torch.autograd.grad(self.of_block(leaves), leaves, part_gradients, materialize_grads=True)
