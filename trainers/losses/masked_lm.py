"""The multigranular masked-LM loss: every prefix dim of a state for the price of one full-width product."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._blocks import Buffers, blocks, check_dims, segments


# Scores that exist at a time, (rows x vocabulary block); 2^21 in float32 are 8 MiB a dim, near the size of a cache.
BLOCK_SCORES = 2**21


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

    The scores of prefix d are those of the prefix before it plus one product over the dims between them, so all
    prefixes together cost one product of full width; in the same way the gradient of a block of dims is one product
    with the sum of the gradients of all prefixes that contain it. The vocabulary passes in blocks, twice: for the
    log-sum-exp of every row and dim (forward), and for the gradients (backward). A tensor of (rows x vocabulary)
    never exists.

    Memory beyond the inputs and their gradients: `rows * block * (dims + 1)` numbers. With no more rows than
    `hidden_size`, the gradient of `weight` takes its memory in forward already, where the scores of the longest prefix
    wait in it.

    Args:
        states (`torch.Tensor` of shape `(rows, hidden_size)`): Carries gradient.
        weight (`torch.Tensor` of shape `(vocab_size, hidden_size)`): Carries gradient.
        bias (`torch.Tensor` of shape `(vocab_size,)`, *optional*): Carries gradient.
        targets (`torch.LongTensor` of shape `(rows,)`): In 0..vocab_size - 1.
        dims (`Sequence[int]`): Prefix dims, ascending, at most `hidden_size`.
        block_size (`int`, *optional*): Vocabulary entries at a time.

    Returns:
        `torch.Tensor` of shape `(rows, len(dims))`, in float32 (float64 for float64 states). Under autocast the
        products are taken in its dtype and summed in float32.

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size.
    """
    dims = check_dims(dims, states.shape[1])
    device_type = states.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else states.dtype
    if block_size is None:
        block_size = max(256, BLOCK_SCORES // max(1, len(states)))
    return NestedCrossEntropy.apply(
        states, weight, bias, targets, dims, min(block_size, len(weight)), dtype, _lend(states, weight, dtype)
    )


class NestedCrossEntropy(torch.autograd.Function):
    """See [`nested_cross_entropy`]."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dims: tuple[int, ...],
        block_size: int,
        dtype: torch.dtype,
        lent: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.dims, ctx.block_size, ctx.dtype, ctx.lent = dims, block_size, dtype, lent
        precise = torch.promote_types(dtype, torch.float32)
        log_sums = states.new_full((len(states), len(dims)), -torch.inf, dtype=precise)
        rows = states.to(dtype)
        buffers = Buffers(rows, 2, len(rows) * block_size, precise)
        for block in blocks(len(weight), block_size):
            nested, powers = buffers.of(len(rows), block.stop - block.start)
            for index, scores in enumerate(_nested_scores(rows, weight[block].to(dtype), bias, block, dims, nested)):
                # Finite even where a bias of -inf rules out a whole block.
                largest = scores.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(precise).min)
                sums = torch.sub(scores, largest, out=powers).exp_().sum(dim=1)
                log_sums[:, index] = torch.logaddexp(log_sums[:, index], sums.log_().add_(largest[:, 0]))
            if lent is not None:
                _kept_scores(lent, block, len(rows)).copy_(nested)
        target_scores = torch.stack(
            [
                (rows[:, segment] * weight[targets, segment].to(dtype)).sum(dim=1, dtype=precise)
                for segment in segments(dims)
            ],
            dim=1,
        ).cumsum(dim=1)
        if bias is not None:
            target_scores += bias[targets].to(precise).unsqueeze(1)
        ctx.save_for_backward(states, weight, bias, targets, log_sums)
        return log_sums - target_scores

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, targets, log_sums = ctx.saved_tensors
        grad_losses = grad_outputs[0].to(log_sums.dtype)
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dims, dtype, precise = ctx.dims, ctx.dtype, log_sums.dtype
        rows = states.to(dtype)
        grad_states = torch.zeros_like(states, dtype=precise) if needs_states else None
        lent, ctx.lent = ctx.lent, None  # overwritten below: a second backward finds nothing in it
        grad_weight = (torch.empty_like(weight) if lent is None else lent) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None

        buffers = Buffers(rows, 1 + len(dims), len(rows) * ctx.block_size, precise)
        for block in blocks(len(weight), ctx.block_size):
            block_weight = weight[block].to(dtype)
            hits = ((targets >= block.start) & (targets < block.stop)).nonzero().squeeze(1)
            nested, *gradients = buffers.of(len(rows), block.stop - block.start)
            if lent is None:
                all_scores = _nested_scores(rows, block_weight, bias, block, dims, nested)
            else:
                shorter_prefixes = _nested_scores(rows, block_weight, bias, block, dims[:-1], nested)
                all_scores = itertools.chain(shorter_prefixes, [_kept_scores(lent, block, len(rows))])
            for index, scores in enumerate(all_scores):
                torch.sub(scores, log_sums[:, index, None], out=gradients[index])
                gradients[index].exp_().mul_(grad_losses[:, index, None])
                # Before anything is rounded: a probability near 1 minus 1 has no digits left afterwards.
                gradients[index][hits, targets[hits] - block.start] -= grad_losses[hits, index]
            # A segment of dims belongs to its own prefix and to all longer ones.
            for shorter, longer in zip(reversed(gradients[:-1]), reversed(gradients[1:]), strict=True):
                shorter.add_(longer)
            for gradient, segment in zip(gradients, segments(dims), strict=True):
                gradient = gradient.to(dtype)
                if grad_states is not None:
                    grad_states[:, segment] += gradient @ block_weight[:, segment]
                if grad_weight is not None and grad_weight.dtype == dtype:
                    torch.mm(gradient.T, rows[:, segment], out=grad_weight[block, segment])  # no copy
                elif grad_weight is not None:
                    grad_weight[block, segment] = gradient.T @ rows[:, segment]
            if grad_weight is not None:
                grad_weight[block, dims[-1] :] = 0
            if grad_bias is not None:
                grad_bias[block] = gradients[0].sum(dim=0)

        grad_states = grad_states.to(states.dtype) if grad_states is not None else None
        return grad_states, grad_weight, grad_bias, None, None, None, None, None


def _lend(states: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """
    The memory that the gradient of `weight` will take, if it can hold a score a row in place of a number a dim until
    then: the widest product need not be taken again in the backward pass. None where there will be no such gradient,
    or where it is too small or too coarse.
    """
    fits = len(states) <= weight.shape[1] and weight.dtype == torch.promote_types(dtype, torch.float32)
    return torch.empty_like(weight) if fits and torch.is_grad_enabled() and weight.requires_grad else None


def _kept_scores(lent: torch.Tensor, block: slice, rows: int) -> torch.Tensor:
    """The scores `(rows, block)` of the longest prefix, in the part of `lent` that is the gradient of this block."""
    width = block.stop - block.start
    return lent[block].view(-1)[: rows * width].view(rows, width)


def _nested_scores(
    rows: torch.Tensor,
    block_weight: torch.Tensor,
    bias: torch.Tensor | None,
    block: slice,
    dims: tuple[int, ...],
    scores: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """Yield the scores `(rows, block)` of one prefix after the other, all in `scores`, which each step adds to."""
    if bias is None:
        scores.zero_()
    else:
        scores.copy_(bias[block])
    for segment in segments(dims):
        left, right = rows[:, segment], block_weight[:, segment].T
        if scores.dtype == rows.dtype:
            scores.addmm_(left, right)
        else:
            scores += left @ right
        yield scores
