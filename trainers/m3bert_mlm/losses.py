"""The multigranular masked-LM loss: all prefix dims at the cost of one product over all dims."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers.utils import logging

from ...utils.numerics import blocks, check_dims, precise, segments


logger = logging.get_logger(__name__)

# Scores in memory at a time (rows x vocabulary block). On a CPU, they and their gradients at a few dims should stay in
# the cache: 2^19 float32 scores are 2 MiB per dim. Elsewhere, small blocks would leave the device waiting for the next
# kernel: 2^27 scores are 0.5 GiB per dim.
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
    dims. The vocabulary is processed in blocks, forward and once more backward: a full tensor of rows x vocabulary is
    never allocated. On a GPU, all that follows the products of a block is compiled.

    Memory in addition to the inputs and their gradients: a few times `rows * block * dims` numbers, and two numbers
    per row, dim and block.

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
    return _in_blocks(states, weight, bias, targets, dims, block_size)[0]


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
    divergences = _Divergences(tuple(pairs), tokens, reverse, temperature)
    losses, *parts = _in_blocks(
        states.flatten(0, 1), weight, bias, targets.repeat(layers), dims, block_size, divergences
    )
    return losses.view(layers, tokens, len(dims)), divergences.values(*parts)


def default_block_size(rows: torch.Tensor) -> int:
    """Default number of vocabulary entries at a time for these rows."""
    scores = CPU_BLOCK_SCORES if rows.device.type == "cpu" else BLOCK_SCORES
    return max(256, scores // max(1, len(rows)) // 64 * 64)  # products of odd widths take a slow kernel


def _in_blocks(
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    dims: Sequence[int],
    block_size: int | None,
    divergences: _Divergences | None = None,
) -> tuple[torch.Tensor, ...]:
    """The cross-entropies `(rows, dims)`, and the parts of the divergences of all blocks, stacked."""
    dims, kind = check_dims(dims, states.shape[1]), states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    size = min(block_size or default_block_size(states), len(weight))
    offset = precise(weight.new_zeros(len(weight)) if bias is None else bias)
    offset = offset.clamp(min=1e-6 * torch.finfo(offset.dtype).min)  # of words that are switched off
    return _NestedCrossEntropy.apply(states, weight, offset, targets, _Head(dims, dtype, size, divergences))


@dataclass(frozen=True)
class _Head:
    """Prefix dims, the type of the products, the size of a block, and divergences to compute."""

    dims: Sequence[int]
    dtype: torch.dtype
    size: int
    divergences: _Divergences | None

    def products(self, rows: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
        """The products `(rows, block)` of the segments."""
        pairs = zip(segments(rows, self.dims), segments(weight, self.dims), strict=True)
        return [row @ word.T for row, word in pairs]

    def target_scores(
        self, rows: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """The scores of the targets at every prefix dim, `(rows, dims)`, in float32 or wider."""
        parts = segments(rows * weight[targets].to(self.dtype), self.dims)
        scores = torch.stack([part.sum(dim=1, dtype=offset.dtype) for part in parts], dim=1).cumsum(dim=1)
        return scores + offset[targets][:, None]

    def compiled(self, function: Callable[..., Any], rows: torch.Tensor) -> Callable[..., Any]:
        """On a GPU, the function as one kernel."""
        return compiled(function) if rows.is_cuda else function


def prefix_scores(products: Sequence[torch.Tensor], bias: torch.Tensor) -> Iterator[torch.Tensor]:
    """The scores `(rows, block)` of each prefix, from the products of the segments and the bias, which has their
    type."""
    scores = bias
    for product in products:
        scores = scores + product.to(bias.dtype)
        yield scores


def prefix_log_sums(products: Sequence[torch.Tensor], bias: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of a block's scores at every prefix dim, `(dims, rows)`, from the arguments of
    [`prefix_scores`]."""
    return torch.stack([scores.logsumexp(dim=1) for scores in prefix_scores(products, bias)])


def segment_gradients(
    products: Sequence[torch.Tensor],
    bias: torch.Tensor,
    log_sums: torch.Tensor,
    grad_losses: torch.Tensor,
    targets: torch.Tensor,
    others: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """
    The gradients of the products `(rows, block)` of the segments, in their type, and of the bias `(block,)`, from the
    arguments of [`prefix_scores`], the log-sum-exps over the whole vocabulary and the gradients of the losses, both
    `(dims, rows)`, the targets `(rows,)`, counted from the first entry of the block, and the gradients of divergences
    at each prefix.
    """
    hits = (torch.arange(len(bias), device=bias.device) == targets[:, None]).to(bias.dtype)
    every = zip(prefix_scores(products, bias), log_sums[..., None], grad_losses[..., None], strict=True)
    gradients = [(scores - log_sum).exp_().sub_(hits).mul_(grad) for scores, log_sum, grad in every]
    for gradient, other in zip(gradients, others, strict=False):
        gradient.add_(other)
    for shorter, longer in zip(gradients[-2::-1], gradients[:0:-1], strict=True):
        shorter.add_(longer)  # a segment is in its own prefix and in all longer ones
    return [each.to(products[0].dtype) for each in gradients], gradients[0].sum(dim=0)


class _NestedCrossEntropy(torch.autograd.Function):
    """See [`nested_cross_entropy_and_divergence`]. The backward pass repeats the products of each block."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, targets: torch.Tensor, head: _Head
    ) -> tuple[torch.Tensor, ...]:
        rows, log_sums, parts = states.to(head.dtype), [], []
        for block in blocks(len(weight), head.size):
            products = head.products(rows, weight[block].to(head.dtype))
            log_sums.append(head.compiled(prefix_log_sums, rows)(products, offset[block]))
            if head.divergences is not None:
                parts.append(head.divergences.of_block(list(prefix_scores(products, offset[block]))))
        totals = torch.stack(log_sums).logsumexp(dim=0)
        ctx.head = head
        ctx.save_for_backward(states, weight, offset, targets, totals)
        losses = totals.T.contiguous() - head.target_scores(rows, weight, offset, targets)
        return losses, *(torch.stack(each) for each in zip(*parts, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, offset, targets, log_sums = ctx.saved_tensors
        needs_states, needs_weight, _ = ctx.needs_input_grad[:3]
        head, rows, others = ctx.head, states.to(ctx.head.dtype), ()
        grad_states = torch.zeros_like(states, dtype=log_sums.dtype) if needs_states else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_offset, grad_losses = torch.empty_like(offset), grad_outputs[0].T.contiguous()
        for number, block in enumerate(blocks(len(weight), head.size)):
            block_weight = weight[block].to(head.dtype)
            products = head.products(rows, block_weight)
            if head.divergences is not None:
                scores = list(prefix_scores(products, offset[block]))
                others = head.divergences.score_gradients(scores, [grad[number] for grad in grad_outputs[1:]])
            gradients, grad_offset[block] = head.compiled(segment_gradients, rows)(
                products, offset[block], log_sums, grad_losses, targets - block.start, others
            )
            del products
            if grad_states is not None:
                for total, gradient, word in zip(
                    segments(grad_states, head.dims), gradients, segments(block_weight, head.dims), strict=True
                ):
                    total += gradient @ word
            if grad_weight is not None:
                for total, gradient, row in zip(
                    segments(grad_weight[block], head.dims), gradients, segments(rows, head.dims), strict=True
                ):
                    total += gradient.T @ row
        return grad_states.to(states.dtype) if grad_states is not None else None, grad_weight, grad_offset, None, None


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


@dataclass(frozen=True)
class _Divergences:
    """
    KL divergences from blocks of scores. With the scores s_p and s_q of two distributions,
    `KL(p || q) = E_p[s_p - s_q] - logsumexp(s_p) + logsumexp(s_q)`. The parts of a block are its log-sum-exps and its
    means `E_p[s_p - s_q]`; those of all blocks give the divergence. The rows of layer i are `i * tokens` to
    `(i + 1) * tokens`.
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

    def score_gradients(
        self, scores: Sequence[torch.Tensor], part_gradients: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        """The gradients of a block's scores at each dim, from its parts' gradients."""
        with torch.enable_grad():
            leaves = [each.requires_grad_() for each in scores]
            return torch.autograd.grad(self.of_block(leaves), leaves, part_gradients, materialize_grads=True)
