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
        return torch.bmm(states, anchors[:, :, None])[:, :, 0] / states.shape[2] ** 0.5


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
        return torch.bmm(torch.stack(queries, dim=1), states.transpose(1, 2)) / width**0.5


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


def nested_token_cka(states: torch.Tensor, counts: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    r"""
    `1 - CKA` with a linear kernel between the prefixes and the full states of the leading tokens (MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), Eqs. 7 to 12), for all dims at once. States are centred
    over tokens, `(I - 1 1^T / k) h`; Eq. 8 is printed with the centring matrix on the other side, where the shapes do
    not match.

    All dims use the same order of tokens, so their token sets are leading blocks of one Gram matrix. The Gram matrix
    of a prefix is that of the next shorter prefix plus one product over the dims between them. Only the states are
    saved for the backward pass.

    Args:
        states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Token states, most important token first.
            Carries gradient through the prefixes only: the full width is the teacher.
        counts (`torch.LongTensor` of shape `(batch, len(dims))`): Number of leading tokens that each dim is aligned
            on: at most `tokens`, and not descending over dims.
        dims (`Sequence[int]`): Prefix dims, ascending.

    Returns:
        `torch.Tensor` of shape `(batch, len(dims))`, in float32 or wider; 0 if there are fewer than two tokens, or all
        tokens are equal.

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size.
    """
    return NestedTokenCKA.apply(precise(states), counts, check_dims(dims, states.shape[2]))


class NestedTokenCKA(torch.autograd.Function):
    """See [`nested_token_cka`]."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, counts: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(states, counts)
        ctx.dims, ctx.longest = dims, counts.amax(dim=0).tolist() if len(counts) else [0] * len(dims)
        losses = states.new_zeros(len(states), len(dims))
        with no_autocast(states):
            for rows in blocks(len(states), _rows_at_once(states)):
                for index, student, teacher in _centred_grams(_shifted(states[rows]), counts[rows], dims, ctx.longest):
                    losses[rows, index] = _alignment(student, teacher)[0]
        return losses

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        states, counts = ctx.saved_tensors
        grad_states = torch.zeros_like(states)
        with no_autocast(states):
            for rows in blocks(len(states), _rows_at_once(states)):
                _add_gradients(grad_states[rows], _shifted(states[rows]), counts[rows], grad_outputs[0][rows], ctx)
        return grad_states, None, None


def _add_gradients(
    grad_states: torch.Tensor, states: torch.Tensor, counts: torch.Tensor, grads: torch.Tensor, ctx: Any
) -> None:
    """Write the gradient of a block of texts into `grad_states`."""
    dims, longest, grad_grams = ctx.dims, ctx.longest, []
    for index, student, teacher in _centred_grams(states, counts, dims, longest):
        _, by_teacher, by_student = _alignment(student, teacher)
        # Both matrices are already centred, and centring is idempotent.
        grad = 2 * grads[:, index]
        student.mul_((grad * by_student)[:, None, None])
        grad_grams.append(student.addcmul_(teacher, (grad * by_teacher)[:, None, None]))
    # The tokens of a shorter prefix are a leading block of the tokens of a longer one.
    total = grad_grams[-1]
    for index, segment in reversed(list(enumerate(segments(dims)))):
        kept = total.shape[1]
        grad_states[:, :kept, segment] = torch.bmm(total, states[:, :kept, segment])
        if index > 0:
            total[:, : longest[index - 1], : longest[index - 1]] += grad_grams[index - 1]


def _shifted(states: torch.Tensor) -> torch.Tensor:
    """The states minus the state of the first token. A large offset that all tokens share would make the products
    inaccurate. The shift does not change centred Gram matrices or the gradients."""
    return states - states[:, :1]


def _rows_at_once(states: torch.Tensor) -> int:
    """Number of texts whose Gram matrices fit in a CPU cache."""
    return max(1, GRAM_NUMBERS // max(1, states.shape[1] ** 2))


def _centred_grams(
    states: torch.Tensor, counts: torch.Tensor, dims: tuple[int, ...], longest: list[int]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield, for each prefix, its index, its centred Gram matrices over its tokens, and those of the full width over
    the same tokens. The caller may overwrite both."""
    teacher = torch.bmm(states, states.transpose(1, 2))
    gram = torch.zeros_like(teacher)
    for index, segment in enumerate(segments(dims)):
        part = states[:, :, segment]
        gram.baddbmm_(part, part.transpose(1, 2))
        kept = slice(longest[index])
        student_gram, teacher_gram = (_centred(matrix[:, kept, kept], counts[:, index]) for matrix in (gram, teacher))
        yield index, student_gram, teacher_gram


def _centred(gram: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Gram matrices centred over the `count` leading tokens of each text; 0 for all other tokens."""
    kept = (torch.arange(gram.shape[1], device=gram.device) < count[:, None]).to(gram.dtype)
    # Subtracted from every row and every column: its mean, less half of the mean of all entries.
    shares = kept / count.clamp(min=1)[:, None]
    means = torch.bmm(gram, shares[:, :, None])[:, :, 0]
    offsets = means - (means * shares).sum(dim=1, keepdim=True) / 2
    centred = gram - offsets[:, :, None]
    return centred.sub_(offsets[:, None, :]).mul_(kept[:, :, None]).mul_(kept[:, None, :])


def _alignment(student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`1 - CKA` of centred Gram matrices, and its gradient with respect to the student's matrix: the coefficients of
    the teacher's matrix and of the student's own matrix."""
    student, teacher = student.flatten(1), teacher.flatten(1)
    shared = (student * teacher).sum(dim=1)
    own = torch.linalg.vector_norm(student, dim=1)
    norms = own * torch.linalg.vector_norm(teacher, dim=1)
    differ = norms != 0  # true for NaN, which must not be hidden
    norms, own = torch.where(differ, norms, 1.0), torch.where(differ, own, 1.0)
    similarity = shared / norms
    return (
        torch.where(differ, 1 - similarity, 0.0),
        torch.where(differ, -1 / norms, 0.0),
        torch.where(differ, similarity / own.square(), 0.0),
    )
