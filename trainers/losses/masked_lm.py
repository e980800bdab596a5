"""The multigranular masked-LM loss: all prefix dims at the cost of one product over all dims."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ._divergence import DivergenceGradients, Divergences, RunningDivergences
from .common import Buffers, blocks, check_dims, segments


# Scores in memory at a time (rows x vocabulary block). On a CPU, they and their gradients at a few dims should stay in
# the cache: 2^19 float32 scores are 2 MiB per dim. Elsewhere, small blocks would leave the device idle.
CPU_BLOCK_SCORES = 2**19
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

    The scores of a prefix are those of the next shorter prefix plus one product over the dims between them, so all
    prefixes together cost one product of all dims. Likewise, the gradient of a segment of dims is one product with
    the sum of the gradients of all prefixes that contain it. The vocabulary is processed in blocks, twice: for the
    log-sum-exp of every row and dim (forward), and for the gradients (backward). A full tensor of rows x vocabulary
    is never allocated.

    Memory in addition to the inputs and their gradients: `rows * block * (dims + 1)` numbers, and one number per row,
    dim and block. If there are at most
    `hidden_size` rows, the gradient of `weight` is already allocated in the forward pass, and stores the scores of the
    longest prefix until the backward pass.

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
    dims = check_dims(dims, states.shape[1])
    dtype = _product_dtype(states)
    size = min(block_size or default_block_size(states), len(weight))
    score_buffer = _score_buffer(states, weight, dtype)
    return NestedCrossEntropy.apply(states, weight, bias, targets, dims, size, dtype, score_buffer, None)[0]


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

    Memory in addition to that of [`nested_cross_entropy`]: `tokens * block` numbers per granularity in `pairs`.

    Args:
        states (`torch.Tensor` of shape `(layers, tokens, hidden_size)`): Hidden states of the masked tokens. Carries
            gradient.
        weight (`torch.Tensor` of shape `(vocab_size, hidden_size)`): Vocabulary projection. Carries gradient.
        bias (`torch.Tensor` of shape `(vocab_size,)`, *optional*): Bias of the projection. An entry of -inf excludes
            its token. Carries gradient.
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
    layers, tokens, width = states.shape
    rows = states.reshape(layers * tokens, width)
    dims = check_dims(dims, width)
    dtype = _product_dtype(rows)
    size = min(block_size or default_block_size(rows), len(weight))
    divergences = Divergences(tuple(pairs), tokens, reverse, temperature)
    losses, values = NestedCrossEntropy.apply(
        rows, weight, bias, targets.repeat(layers), dims, size, dtype, _score_buffer(rows, weight, dtype), divergences
    )
    return losses.view(layers, tokens, len(dims)), values


def default_block_size(rows: torch.Tensor) -> int:
    """Default number of vocabulary entries at a time for these rows."""
    scores = CPU_BLOCK_SCORES if rows.device.type == "cpu" else BLOCK_SCORES
    return max(256, scores // max(1, len(rows)))


def _product_dtype(states: torch.Tensor) -> torch.dtype:
    device_type = states.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else states.dtype


class NestedCrossEntropy(torch.autograd.Function):
    """See [`nested_cross_entropy`] and [`nested_cross_entropy_and_divergence`]."""

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
        score_buffer: torch.Tensor | None,
        divergences: Divergences | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.dims, ctx.block_size, ctx.dtype = dims, block_size, dtype
        ctx.score_buffer, ctx.divergences = score_buffer, divergences
        precise = torch.promote_types(dtype, torch.float32)
        rows, parts = states.to(dtype), blocks(len(weight), block_size)
        buffers = Buffers(rows, 2, len(rows) * block_size, precise)
        block_log_sums = states.new_empty((len(parts), len(dims), len(rows)), dtype=precise)
        running = None if divergences is None else RunningDivergences(divergences, block_log_sums, block_size)
        for block, log_sums in zip(parts, block_log_sums, strict=True):
            nested, probabilities = buffers.of(len(rows), block.stop - block.start)
            for index, scores in enumerate(_nested_scores(rows, weight[block].to(dtype), bias, block, dims, nested)):
                # A softmax is one pass over memory, where `logsumexp` is several. The largest score s has the
                # probability p = exp(s - log_sum). If a bias of -inf excludes a whole block, p is undefined.
                largest = scores.amax(dim=1)
                largest_probability = torch.softmax(scores, dim=1, out=probabilities).amax(dim=1)
                log_sums[index] = torch.where(largest.isneginf(), largest, largest - largest_probability.log_())
                if running is not None:
                    running.keep(index, scores, log_sums[index])
            if score_buffer is not None:
                _stored_scores(score_buffer, block, len(rows)).copy_(nested)
            if running is not None:
                running.add_block(nested.shape[1], _excluded(bias, block))
        all_log_sums = block_log_sums.logsumexp(dim=0)
        block_shares = block_log_sums.sub_(all_log_sums).exp_()
        target_scores = torch.stack(
            [
                (rows[:, segment] * weight[targets, segment].to(dtype)).sum(dim=1, dtype=precise)
                for segment in segments(dims)
            ],
            dim=1,
        ).cumsum(dim=1)
        if bias is not None:
            target_scores += bias[targets].to(precise).unsqueeze(1)
        values = None if running is None else running.values()
        node_log_sums = None if running is None else running.log_sums
        ctx.save_for_backward(states, weight, bias, targets, block_shares, values, node_log_sums)
        return all_log_sums.T.contiguous() - target_scores, values

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, bias, targets, block_shares, values, node_log_sums = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dims, dtype, precise = ctx.dims, ctx.dtype, block_shares.dtype
        grad_losses = grad_outputs[0].to(precise)
        rows = states.to(dtype)
        grad_states = torch.zeros_like(states, dtype=precise) if needs_states else None
        # The buffer becomes grad_weight below, so a second backward pass cannot use its scores.
        score_buffer, ctx.score_buffer = ctx.score_buffer, None
        grad_weight = (torch.empty_like(weight) if score_buffer is None else score_buffer) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None

        divergence_gradients = None
        if ctx.divergences is not None:
            grads = grad_outputs[1].to(precise)
            divergence_gradients = DivergenceGradients(ctx.divergences, node_log_sums, values, grads, ctx.block_size)
        buffers = Buffers(rows, 1 + len(dims), len(rows) * ctx.block_size, precise)
        for block, shares in zip(blocks(len(weight), ctx.block_size), block_shares, strict=True):
            block_weight = weight[block].to(dtype)
            hits = ((targets >= block.start) & (targets < block.stop)).nonzero().squeeze(1)
            excluded = _excluded(bias, block)
            nested, *gradients = buffers.of(len(rows), block.stop - block.start)
            if score_buffer is None:
                all_scores = _nested_scores(rows, block_weight, bias, block, dims, nested)
            else:
                shorter_prefixes = _nested_scores(rows, block_weight, bias, block, dims[:-1], nested)
                all_scores = itertools.chain(shorter_prefixes, [_stored_scores(score_buffer, block, len(rows))])
            for index, scores in enumerate(all_scores):
                if divergence_gradients is not None:
                    divergence_gradients.keep(index, scores)
                if excluded is not None and excluded.all():
                    gradients[index].zero_()
                else:
                    probabilities = torch.softmax(scores, dim=1, out=gradients[index])
                    probabilities.mul_((shares[index] * grad_losses[:, index])[:, None])
                # Subtract before rounding: in half precision, a probability close to 1 minus 1 would be 0.
                gradients[index][hits, targets[hits] - block.start] -= grad_losses[hits, index]
            if divergence_gradients is not None:
                divergence_gradients.add_to(gradients, excluded)
            # A segment of dims is in its own prefix and in all longer ones.
            for shorter, longer in zip(reversed(gradients[:-1]), reversed(gradients[1:]), strict=True):
                shorter.add_(longer)
            for gradient, segment in zip(gradients, segments(dims), strict=True):
                gradient = gradient.to(dtype)
                if grad_states is not None:
                    _add_product(grad_states[:, segment], gradient, block_weight[:, segment])
                if grad_weight is not None:
                    grad_weight[block, segment] = gradient.T @ rows[:, segment]
            if grad_weight is not None:
                grad_weight[block, dims[-1] :] = 0
            if grad_bias is not None:
                grad_bias[block] = gradients[0].sum(dim=0)

        grad_states = grad_states.to(states.dtype) if grad_states is not None else None
        return grad_states, grad_weight, grad_bias, *[None] * 6


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add `left @ right` to `total`, in place. Half-precision operands may have a total in float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _excluded(bias: torch.Tensor | None, block: slice) -> torch.Tensor | None:
    """Mask of the entries of a block whose bias is -inf; `None` if there are none."""
    excluded = None if bias is None else bias[block].isneginf()
    return excluded if excluded is not None and excluded.any() else None


def _score_buffer(states: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """
    Memory for the gradient of `weight`, allocated in the forward pass to store the scores of the longest prefix until
    the backward pass, which then need not compute them again. `None` if `weight` needs no gradient, or if its gradient
    is smaller than the scores or has a lower precision.
    """
    fits = len(states) <= weight.shape[1] and weight.dtype == torch.promote_types(dtype, torch.float32)
    return torch.empty_like(weight) if fits and torch.is_grad_enabled() and weight.requires_grad else None


def _stored_scores(score_buffer: torch.Tensor, block: slice, rows: int) -> torch.Tensor:
    """The scores `(rows, block)` of the longest prefix, stored in the rows of the buffer that belong to this block."""
    width = block.stop - block.start
    return score_buffer[block].view(-1)[: rows * width].view(rows, width)


def _nested_scores(
    rows: torch.Tensor,
    block_weight: torch.Tensor,
    bias: torch.Tensor | None,
    block: slice,
    dims: tuple[int, ...],
    scores: torch.Tensor,
) -> Iterator[torch.Tensor]:
    """Yield the scores `(rows, block)` of each prefix, shortest first. All are the tensor `scores`, updated in
    place."""
    if bias is None:
        scores.zero_()
    else:
        scores.copy_(bias[block])
    for segment in segments(dims):
        _add_product(scores, rows[:, segment], block_weight[:, segment].T)
        yield scores
