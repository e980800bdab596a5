"""Losses of MIPIC within one layer: token states at full width teach their prefixes the relations between tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ._blocks import blocks, check_dims, segments
from .precision import no_autocast, precise


# Entries of the Gram matrices of one prefix in memory at a time, in `nested_token_cka`: about 1 MB.
GRAM_NUMBERS = 2**18
# Tolerance for rounding errors: share * tokens may be slightly above the exact integer.
ROUNDING = 1e-9


@torch.no_grad()
def token_importance(states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    r"""
    Importance of each token for the anchor token at full width, `s_j = h_anchor . h_j / sqrt(D)` (MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), Eq. 4, before temperature and softmax).

    Args:
        states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Token states of one layer.
        anchors (`torch.Tensor` of shape `(batch, hidden_size)`): State of each text's anchor token.

    Returns:
        `torch.Tensor` of shape `(batch, tokens)`, in float32 or wider. Has no gradient.
    """
    states, anchors = precise(states), precise(anchors)
    with no_autocast(states):
        return torch.bmm(anchors[:, None], states.transpose(1, 2))[:, 0] / states.shape[2] ** 0.5


def prefix_attention_scores(
    states: torch.Tensor, anchors: torch.Tensor, projections: Sequence[torch.Tensor]
) -> torch.Tensor:
    r"""
    [`token_importance`] from prefixes, which a learned map projects to full width: `s_j = h_anchor . P_i^T h_j[:d_i] /
    sqrt(D)` (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), Eq. 5). It is computed as
    `(P_i h_anchor) . h_j[:d_i]`, one product for all dims.

    Args:
        states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Token states of one layer. Carries gradient.
        anchors (`torch.Tensor` of shape `(batch, hidden_size)`): State of each text's anchor token. Detached here.
        projections (`Sequence[torch.Tensor]`): One P_i of shape `(d_i, hidden_size)` per dim. Carry gradient.

    Returns:
        `torch.Tensor` of shape `(batch, len(projections), tokens)`, in float32 or wider.
    """
    states, anchors = precise(states), precise(anchors).detach()
    width = states.shape[2]
    with no_autocast(states):
        # Queries are padded with zeros, because truncated states would need a gradient tensor of full size each.
        queries = [
            nn.functional.pad(anchors @ projection.to(anchors.dtype).T, (0, width - len(projection)))
            for projection in projections
        ]
        return Scores.apply(torch.stack(queries, dim=1) / width**0.5, states)


class Scores(torch.autograd.Function):
    """`queries @ states^T` for `(batch, queries, dims)` and `(batch, tokens, dims)`. The gradient of the states has
    their layout; that of a plain product would be transposed, and then copied."""

    @staticmethod
    def forward(ctx: Any, queries: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(queries, states)
        return torch.bmm(queries, states.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, states = ctx.saved_tensors
        with no_autocast(states):
            return torch.bmm(grad_outputs[0], states), torch.bmm(grad_outputs[0].transpose(1, 2), queries)


def attention_divergence(
    scores: torch.Tensor, importance: torch.Tensor, tokens: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    r"""
    KL divergence between the attention over tokens from prefixes (student) and from full states (teacher),
    `KL(a_i || a_D)` with `a = softmax(s / temperature)` (MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), Eqs. 4 to 6, with the student first, as printed).

    Args:
        scores (`torch.Tensor` of shape `(batch, dims, tokens)`): [`prefix_attention_scores`]. Carries gradient.
        importance (`torch.Tensor` of shape `(batch, tokens)`): [`token_importance`] of the same states. Detached here.
        tokens (`torch.Tensor` of shape `(batch, tokens)`): 1 for the tokens to attend to, 0 for the anchor token and
            padding.
        temperature (`float`): tau, of both distributions.

    Returns:
        `torch.Tensor` of shape `(batch, dims)`; 0 for a text without tokens to attend to.
    """
    real, lowest = tokens.bool()[:, None, :], torch.finfo(scores.dtype).min
    teacher = importance.detach().to(scores.dtype)[:, None, :]
    log_student = (scores / temperature).masked_fill(~real, lowest).log_softmax(dim=2)
    log_teacher = (teacher / temperature).masked_fill(~real, lowest).log_softmax(dim=2)
    # Without tokens to attend to, both distributions are uniform over all positions, so their divergence is 0.
    return (log_student.exp() * (log_student - log_teacher)).sum(dim=2)


def nested_token_counts(num_tokens: torch.Tensor, shares: Sequence[float], *, smallest: int) -> torch.Tensor:
    """
    Number of tokens that each dim is aligned on: `min(m, max(smallest, ceil(gamma_i * m)))` for a text of m tokens
    (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), A.5). The leading tokens of one ranking then form
    nested sets.

    Args:
        num_tokens (`torch.Tensor` of shape `(batch,)`): m, number of tokens of each text.
        shares (`Sequence[float]`): gamma_i, one share per dim.
        smallest (`int`): Minimum number of tokens, if a text has that many.

    Returns:
        `torch.LongTensor` of shape `(batch, len(shares))`
    """
    exact = num_tokens[:, None].double() * torch.tensor(shares, dtype=torch.float64, device=num_tokens.device)
    counts = (exact - ROUNDING).ceil().clamp_(min=smallest)
    return torch.minimum(counts, num_tokens[:, None].double()).long()


def nested_token_cka(
    states: torch.Tensor | Sequence[torch.Tensor],
    counts: torch.Tensor,
    dims: Sequence[int],
    *,
    orders: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    r"""
    `1 - CKA` with a linear kernel between the prefixes and the full states of the leading tokens (MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), Eqs. 7 to 12), for all dims at once. States are centred
    over tokens, `(I - 1 1^T / k) h`; Eq. 8 is printed with the centring matrix on the other side, where the shapes do
    not match.

    All dims use the same order of tokens, so their token sets are leading blocks of one Gram matrix. The Gram matrix
    of a prefix is that of the next shorter prefix plus one product over the dims between them, and so is that of the
    full width. Nothing larger than the states themselves is saved for the backward pass.

    Args:
        states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Token states. Carries gradient through the
            prefixes only: the full width is the teacher. A sequence of such tensors stands for all their texts, one
            after the other.
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
        precision = torch.promote_types(states[0].dtype, torch.float32)
        losses = states[0].new_zeros(len(counts), len(dims), dtype=precision)
        coefficients = losses.new_zeros(len(dims), 2, len(counts))
        ctx.grams = None
        with no_autocast(losses):
            for rows in ctx.parts:
                grams = _centred_grams(_leading(states, orders, rows), counts[rows], dims, ctx.sets)
                for index, pair in enumerate(grams):
                    losses[rows, index], coefficients[index, :, rows] = _alignment(pair)
                # A single block of texts is so small that its matrices can wait for the backward pass.
                ctx.grams = grams if len(ctx.parts) == 1 else None
        ctx.save_for_backward(counts, coefficients, *states, *orders)
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        counts, coefficients, *saved = ctx.saved_tensors
        states, orders = saved[: len(saved) // 2], saved[len(saved) // 2 :]
        grads = [torch.zeros_like(own) for own in states]
        # Both matrices are already centred, and centring is idempotent.
        weights = 2 * coefficients * grad_outputs[0].T[:, None]
        with no_autocast(counts):
            for rows in ctx.parts:
                leading = _leading(states, orders, rows)
                grams = ctx.grams or _centred_grams(leading, counts[rows], ctx.dims, ctx.sets)
                gradient = _gradient(leading, grams, weights[:, :, rows], ctx.dims)
                longest, dim = gradient.shape[1:]
                for own, texts, order, within in _pieces(grads, orders, rows):
                    kept = order[:, :longest]
                    own[texts, :, :dim][torch.arange(len(kept), device=kept.device)[:, None], kept] = gradient[
                        within, : kept.shape[1]
                    ].to(own.dtype)
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
    The states of the leading tokens of some texts, `(rows, leading, hidden_size)`, minus the state of the first of
    them; 0 after the last. A large offset that all tokens share would make the products inaccurate. The shift changes
    neither centred Gram matrices nor the gradients.
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
    """For each prefix, its centred Gram matrices over its tokens, and those of the full width over the same tokens:
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


def _alignment(pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`1 - CKA` of centred Gram matrices, and its gradient with respect to the student's matrix: the coefficients of
    the student's own matrix and of the teacher's matrix, `(2, texts)`."""
    matrices = pair.flatten(2)
    shared = torch.linalg.vecdot(matrices[0], matrices[1])
    own, other = torch.linalg.vector_norm(matrices, dim=2)
    norms = own * other
    differ = norms != 0  # true for NaN, which must not be hidden
    norms, own = torch.where(differ, norms, 1.0), torch.where(differ, own, 1.0)
    similarity = shared / norms
    coefficients = torch.stack([similarity / own.square(), -1 / norms])
    return torch.where(differ, 1 - similarity, 0.0), torch.where(differ, coefficients, 0.0)


def _gradient(
    states: torch.Tensor, grams: list[torch.Tensor], weights: torch.Tensor, dims: tuple[int, ...]
) -> torch.Tensor:
    """The gradient `(texts, tokens, dims[-1])` with respect to the prefixes of the leading tokens, from
    [`_centred_grams`] and their weights in it, `(dims, 2, texts)`. Changes no argument."""
    by_gram = [
        (student * by_student).addcmul_(teacher, by_teacher)
        for (student, teacher), (by_student, by_teacher) in zip(grams, weights[..., None, None], strict=True)
    ]
    total = by_gram[-1]
    longest = total.shape[1]
    gradient = states.new_empty(len(states), longest, dims[-1])
    # The tokens of a shorter prefix are a leading block of the tokens of a longer one.
    for index, segment in reversed(list(enumerate(segments(dims)))):
        gradient[:, :, segment] = torch.bmm(total, states[:, :longest, segment])
        if index > 0:
            shorter = by_gram[index - 1].shape[1]
            total[:, :shorter, :shorter] += by_gram[index - 1]
    return gradient
