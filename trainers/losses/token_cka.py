"""The alignment of MIPIC between the Gram matrices of prefixes and those of all dims."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .common import blocks, check_dims, no_autocast, precise, segments


# Entries of the Gram matrices of one prefix in memory at a time, in `nested_token_cka`: about 1 MB.
GRAM_NUMBERS = 2**18


def nested_token_cka(
    states: torch.Tensor | Sequence[torch.Tensor],
    counts: torch.Tensor,
    dims: Sequence[int],
    *,
    orders: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    r"""
    `1 - CKA` with a linear kernel between the prefixes and the full hidden states of the leading tokens (MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), Eqs. 7 to 12), for all dims at once. Hidden states are
    centred over tokens, `(I - 1 1^T / k) h`; Eq. 8 is printed with the centring matrix on the other side, where the
    shapes do not match.

    All dims use the same order of tokens, so their token sets are leading blocks of one Gram matrix. The Gram matrix
    of a prefix is that of the next shorter prefix plus one product over the dims between them, and so is that of
    all dims. What is saved for the backward pass is at most as large as the hidden states.

    Args:
        states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Hidden states of tokens. Carries gradient
            through the prefixes only: all dims are the teacher. A sequence of such tensors stands for all their texts,
            one after the other.
        counts (`torch.LongTensor` of shape `(batch, len(dims))`): Number of leading tokens that each dim is aligned
            on: at most `leading`, and not descending over dims.
        dims (`Sequence[int]`): Prefix dims, ascending.
        orders (`Sequence[torch.LongTensor]` of shapes `(batch, leading)`, *optional*): For each tensor of `states`,
            the positions of the leading tokens, most important first. Default: all tokens in their order.

    Returns:
        `torch.Tensor` of shape `(batch, len(dims))`, in float32 or wider; 0 if there are fewer than two tokens, or all
        tokens are equal.

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size.
    """
    states = [states] if isinstance(states, torch.Tensor) else list(states)
    if orders is None:
        orders = [torch.arange(own.shape[1], device=own.device).expand(own.shape[:2]) for own in states]
    return NestedTokenCKA.apply(counts, tuple(orders), check_dims(dims, states[0].shape[2]), *states)


class NestedTokenCKA(torch.autograd.Function):
    """See [`nested_token_cka`]."""

    @staticmethod
    def forward(
        ctx: Any, counts: torch.Tensor, orders: tuple[torch.Tensor, ...], dims: tuple[int, ...], *states: torch.Tensor
    ) -> torch.Tensor:
        ctx.dims, ctx.sets = dims, _token_sets(counts)
        ctx.parts = blocks(len(counts), _rows_at_once(max(order.shape[1] for order in orders)))
        # The matrices of long texts are larger than their states. They are computed again in the backward pass.
        fits = sum(longest**2 for longest, _ in ctx.sets) <= states[0][0].numel() if len(counts) else True
        keeps = fits and any(ctx.needs_input_grad)
        losses, kept = [], []
        with no_autocast(counts):
            for rows in ctx.parts:
                pairs = _centred_grams(_leading(states, orders, rows), counts[rows], dims, ctx.sets)
                aligned = [_alignment(pair) for pair in pairs]
                losses.append(torch.stack([loss for loss, _ in aligned], dim=1))
                kept += [_by_gram(pair, own) for pair, (_, own) in zip(pairs, aligned, strict=True)] if keeps else []
        ctx.save_for_backward(counts, *states, *orders, *kept)
        return torch.cat(losses) if losses else precise(states[0]).new_zeros(counts.shape)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        counts, *saved = ctx.saved_tensors
        tensors = len(ctx.needs_input_grad) - 3
        states, orders, kept = saved[:tensors], saved[tensors : 2 * tensors], iter(saved[2 * tensors :])
        grads = [torch.zeros_like(own) for own in states]
        with no_autocast(counts):
            for rows in ctx.parts:
                leading = _leading(states, orders, rows)
                by_gram = list(itertools.islice(kept, len(ctx.dims)))
                if not by_gram:
                    pairs = _centred_grams(leading, counts[rows], ctx.dims, ctx.sets)
                    by_gram = [_by_gram(pair, _alignment(pair)[1]) for pair in pairs]
                gradient = _gradient(leading, by_gram, grad_outputs[0][rows], ctx.dims)
                longest, dim = gradient.shape[1:]
                for own, texts, order, within in _pieces(grads, orders, rows):
                    tokens = order[:, :longest]
                    text = torch.arange(len(tokens), device=tokens.device)[:, None]
                    own[texts, :, :dim][text, tokens] = gradient[within, : tokens.shape[1]].to(own.dtype)
        return None, None, None, *grads


def _pieces(
    states: Sequence[torch.Tensor], orders: Sequence[torch.Tensor], rows: slice
) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor, slice]]:
    """Yield the tensors that hold the texts `rows`, which texts of a tensor these are, the order of their tokens, and
    their place within `rows`."""
    start = 0
    for own, order in zip(states, orders, strict=True):
        first, last = max(rows.start - start, 0), min(rows.stop - start, len(own))
        if first < last:
            texts = slice(first, last)
            yield own, texts, order[texts], slice(first + start - rows.start, last + start - rows.start)
        start += len(own)


def _leading(states: Sequence[torch.Tensor], orders: Sequence[torch.Tensor], rows: slice) -> torch.Tensor:
    """
    The hidden states of the leading tokens of some texts, `(rows, leading, hidden_size)`, minus the hidden state of
    the first of them; 0 after the last. A large offset that all tokens share would make the products inaccurate. The
    shift changes neither centred Gram matrices nor the gradients.
    """
    longest, width = max(order.shape[1] for order in orders), states[0].shape[2]
    precision = torch.promote_types(states[0].dtype, torch.float32)
    leading = states[0].new_empty((rows.stop - rows.start, longest, width), dtype=precision)
    for own, texts, order, within in _pieces(states, orders, rows):
        tokens = order + own.shape[1] * torch.arange(len(order), device=order.device)[:, None]
        chosen = own[texts].flatten(0, 1).index_select(0, tokens.flatten()).view(*order.shape, width).to(precision)
        torch.sub(chosen, chosen[:, :1], out=leading[within, : order.shape[1]])
        leading[within, order.shape[1] :] = 0
    return leading


def _rows_at_once(tokens: int) -> int:
    """Number of texts whose Gram matrices fit in a CPU cache."""
    return max(1, GRAM_NUMBERS // max(1, tokens**2))


def _token_sets(counts: torch.Tensor) -> list[tuple[int, bool]]:
    """For each dim, the largest number of leading tokens, and whether some texts have fewer."""
    if not len(counts):
        return [(0, False)] * counts.shape[1]
    smallest, largest = torch.stack([counts.amin(dim=0), counts.amax(dim=0)]).tolist()
    return [(most, fewest < most) for fewest, most in zip(smallest, largest, strict=True)]


def _centred_grams(
    states: torch.Tensor, counts: torch.Tensor, dims: tuple[int, ...], sets: list[tuple[int, bool]]
) -> list[torch.Tensor]:
    """For each prefix, its centred Gram matrices over its tokens, and those of all dims over the same tokens:
    `(2, texts, tokens, tokens)`."""
    gram = states.new_empty(len(states), states.shape[1], states.shape[1])
    grams: list[torch.Tensor] = []
    for (longest, _), segment in zip(sets, segments(dims), strict=True):
        part = states[:, :, segment]
        gram.baddbmm_(part, part.transpose(1, 2), beta=1 if grams else 0)  # a beta of 0 ignores what is there
        grams.append(gram.new_empty(2, len(gram), longest, longest))
        grams[-1][0] = gram[:, :longest, :longest]
    rest = states[:, :, dims[-1] :]
    gram.baddbmm_(rest, rest.transpose(1, 2))
    for index, (pair, (longest, differ)) in enumerate(zip(grams, sets, strict=True)):
        pair[1] = gram[:, :longest, :longest]
        _centre_(pair, counts[:, index], differ)
    return grams


def _centre_(pair: torch.Tensor, count: torch.Tensor, differ: bool) -> None:
    """Centre Gram matrices over the `count` leading tokens of each text, in place; 0 for all other tokens. `differ`
    says that there are other tokens."""
    kept = (torch.arange(pair.shape[2], device=pair.device) < count[:, None]).to(pair.dtype)
    if differ:
        pair.mul_(kept[:, :, None]).mul_(kept[:, None, :])
    # Subtracted from every row and every column: its mean, less half of the mean of all entries.
    means = pair.sum(dim=3) / count.clamp(min=1)[:, None]
    offsets = means - means.sum(dim=2, keepdim=True) / (2 * count.clamp(min=1)[:, None])
    if differ:
        offsets *= kept
    pair.sub_(offsets[:, :, :, None]).sub_(offsets[:, :, None, :])
    if differ:
        pair.mul_(kept[:, :, None]).mul_(kept[:, None, :])


def _by_gram(pair: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """The gradient of a loss with respect to the student's matrices, from [`_alignment`]."""
    (student, teacher), (by_student, by_teacher) = pair, coefficients
    return (student * by_student).addcmul_(teacher, by_teacher)


def _alignment(pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`1 - CKA` of centred Gram matrices, those of the student and of the teacher, and the coefficients of both in its
    gradient, `(2, texts, 1, 1)`."""
    matrices = pair.flatten(2)
    shared = torch.linalg.vecdot(matrices[0], matrices[1])
    own, other = torch.linalg.vector_norm(matrices, dim=2)
    norms = own * other
    differ = norms != 0  # true for NaN, which must not be hidden
    norms, own = torch.where(differ, norms, 1.0), torch.where(differ, own, 1.0)
    similarity = shared / norms
    coefficients = torch.stack([similarity / own.square(), -1 / norms])
    return torch.where(differ, 1 - similarity, 0.0), torch.where(differ, coefficients, 0.0)[..., None, None]


def _gradient(
    states: torch.Tensor, by_gram: list[torch.Tensor], grads: torch.Tensor, dims: tuple[int, ...]
) -> torch.Tensor:
    """The gradient `(texts, tokens, dims[-1])` with respect to the prefixes of the leading tokens, from the gradients
    `grads` of the losses `(texts, dims)` and those of the losses with respect to the Gram matrices."""
    # The matrices are already centred, and centring is idempotent.
    weights = 2 * grads.T[:, :, None, None]
    total = by_gram[-1] * weights[-1]
    longest = total.shape[1]
    gradient = states.new_empty(len(states), longest, dims[-1])
    # The tokens of a shorter prefix are a leading block of the tokens of a longer one.
    for index, segment in reversed(list(enumerate(segments(dims)))):
        gradient[:, :, segment] = torch.bmm(total, states[:, :longest, segment])
        if index > 0:
            shorter = by_gram[index - 1].shape[1]
            total[:, :shorter, :shorter].addcmul_(by_gram[index - 1], weights[index - 1])
    return gradient
