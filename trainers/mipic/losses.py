"""Losses of MIPIC within one layer: hidden states at all dims teach their prefixes the relations between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ...utils.numerics import blocks, check_dims, no_autocast, precise, segments, summed_from_the_longest


# Tolerance for rounding errors: share * tokens may be slightly above the exact integer.
ROUNDING = 1e-9
# Numbers in the Gram matrices of prefixes at a time: about one CPU cache, or 0.5 GiB of float32.
CPU_GRAM_NUMBERS = 2**19
GRAM_NUMBERS = 2**27


@torch.no_grad()
def token_importance(states: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    r"""
    Importance of each token for the anchor token at all dims, `s_j = h_anchor . h_j / sqrt(D)` (MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), Eq. 4, before temperature and softmax).

    Args:
        states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Hidden states of tokens of one layer.
        anchors (`torch.Tensor` of shape `(batch, hidden_size)`): Hidden state of each text's anchor token.

    Returns:
        `torch.Tensor` of shape `(batch, tokens)`, in float32 or wider. Has no gradient.
    """
    states, anchors = precise(states), precise(anchors)
    with no_autocast(states):
        return torch.bmm(anchors[:, None], states.transpose(1, 2))[:, 0] / states.shape[2] ** 0.5


def prefix_attention_scores(
    states: Sequence[torch.Tensor],
    anchors: Sequence[torch.Tensor],
    projections: Sequence[torch.Tensor],
    dims: Sequence[int],
) -> torch.Tensor:
    r"""
    [`token_importance`] from prefixes, which a learned map projects to all dims: `s_j = h_anchor . P_i^T h_j[:d_i]
    / sqrt(D)` (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), Eq. 5). It is computed as
    `(P_i h_anchor) . h_j[:d_i]`, one product for all dims.

    Args:
        states (`Sequence`): Of each layer, hidden states of tokens `(batch, tokens, hidden_size)`. Carry gradient.
        anchors (`Sequence`): Of each layer, the hidden state of each text's anchor token `(batch, hidden_size)`.
            Detached here.
        projections (`Sequence`): Of each layer, P_i of all dims, stacked, `(sum(dims), hidden_size)`. Carry gradient.
        dims (`Sequence[int]`): d_i.

    Returns:
        `torch.Tensor` of shape `(layers * batch, len(dims), tokens)`, in float32 or wider.
    """
    keys, anchors = [precise(layer) for layer in states], [precise(layer).detach() for layer in anchors]
    width = keys[0].shape[2]
    with no_autocast(keys[0]):
        products = [layer @ maps.to(layer.dtype).T for layer, maps in zip(anchors, projections, strict=True)]
        # Queries are padded with zeros, because truncated states would need a gradient tensor of full size each.
        queries = (torch.cat(products) / width**0.5).split(list(dims), dim=1)
        padded = torch.stack([nn.functional.pad(query, (0, width - query.shape[1])) for query in queries], dim=1)
        of_layers = padded.unflatten(0, (len(keys), -1))
        return torch.cat([torch.bmm(query, key.mT) for query, key in zip(of_layers, keys, strict=True)])


def attention_divergence(
    scores: torch.Tensor, importance: torch.Tensor, tokens: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    r"""
    KL divergence between the attention over tokens from prefixes (student) and from full hidden states (teacher),
    `KL(a_i || a_D)` with `a = softmax(s / temperature)` (MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), Eqs. 4 to 6, with the student first, as printed).

    Args:
        scores (`torch.Tensor` of shape `(batch, dims, tokens)`): [`prefix_attention_scores`]. Carries gradient.
        importance (`torch.Tensor` of shape `(batch, tokens)`): [`token_importance`] of the same hidden states.
            Detached here.
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


@torch.compiler.disable
def nested_token_cka(states: torch.Tensor, counts: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    r"""
    `1 - CKA` with a linear kernel between the prefixes and the full hidden states of the leading tokens (MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), Eqs. 7 to 12). Hidden states are centred over tokens,
    `(I - 1 1^T / k) h`; Eq. 8 is printed with the centring matrix on the other side, where the shapes do not match.
    The Gram matrices are computed again in the backward pass: those of long texts are larger than their hidden states.

    Args:
        states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Hidden states of tokens, most important first.
            Carries gradient through the prefixes only: all dims are the teacher.
        counts (`torch.LongTensor` of shape `(batch, len(dims))`): Number of leading tokens that each dim is aligned
            on.
        dims (`Sequence[int]`): Prefix dims, ascending.

    Returns:
        `torch.Tensor` of shape `(batch, len(dims))`, in float32 or wider; 0 if there are fewer than two tokens, or all
        tokens are equal.

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size.
    """
    return _TokenCKA.apply(precise(states), counts, check_dims(dims, states.shape[2]))


class _TokenCKA(torch.autograd.Function):
    """
    With centred Gram matrices S of a prefix and T of all dims, divided by their norms s and t, CKA is `sum S T`, and
    `d(1 - CKA) / dG = (CKA S - T) / s` for the Gram matrix G of the prefix before centring.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, counts: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
        ctx.dims = dims
        ctx.save_for_backward(states, counts)
        losses = [states.new_zeros(0, len(dims))]
        for texts in _text_blocks(states, dims):
            grams = _Grams.of(states[texts], counts[texts], dims)
            losses.append(torch.where(grams.differ, 1 - grams.similarities, 0.0).T)
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (states, counts), parts = ctx.saved_tensors, segments(ctx.dims)
        gradient = torch.zeros_like(states)
        for texts in _text_blocks(states, ctx.dims):
            grams = _Grams.of(states[texts], counts[texts], ctx.dims)
            factors = torch.where(grams.differ, 2 * grad_outputs[0][texts].T / grams.norms, 0.0)
            slopes = grams.students.mul_(grams.similarities[..., None, None]).sub_(grams.teachers)
            slopes.mul_(factors[..., None, None])
            with no_autocast(states):
                for slope, part in zip(summed_from_the_longest(slopes.unbind()), parts, strict=True):
                    gradient[texts, :, part] = torch.bmm(slope, grams.vectors[:, :, part])
        return gradient, None, None


def _text_blocks(states: torch.Tensor, dims: tuple[int, ...]) -> list[slice]:
    """The texts whose Gram matrices are in memory at a time."""
    numbers = CPU_GRAM_NUMBERS if states.device.type == "cpu" else GRAM_NUMBERS
    return blocks(len(states), max(1, numbers // max(1, len(dims) * states.shape[1] ** 2)))


class _Grams(NamedTuple):
    """Gram matrices `(dims, texts, tokens, tokens)` of the leading tokens of texts, at prefixes and at all dims,
    centred and divided by their norms; of each pair the norm of the first, whether neither norm is 0, and CKA,
    `(dims, texts)`. `vectors` are the shifted hidden states."""

    vectors: torch.Tensor
    students: torch.Tensor
    teachers: torch.Tensor
    norms: torch.Tensor
    differ: torch.Tensor
    similarities: torch.Tensor

    @classmethod
    def of(cls, states: torch.Tensor, counts: torch.Tensor, dims: tuple[int, ...]) -> Self:
        tokens = torch.arange(states.shape[1], device=counts.device)
        compared = (tokens < counts.T[:, :, None]).to(states.dtype)
        # The shift keeps digits where tokens share a large offset, and makes equal tokens exactly 0.
        vectors = (states - states[:, :1]) * compared.amax(dim=0)[:, :, None]
        parts = segments(dims if dims[-1] == states.shape[2] else (*dims, states.shape[2]))
        grams = states.new_zeros(len(parts) + 1, len(states), len(tokens), len(tokens))
        with no_autocast(states):
            for shorter, longer, part in zip(grams[:-1], grams[1:], parts, strict=True):
                torch.baddbmm(shorter, vectors[:, :, part], vectors[:, :, part].mT, out=longer)
            students, teachers = _centred(grams[1 : 1 + len(dims)], compared), _centred(grams[-1:], compared)
            norms, teacher_norms = (torch.linalg.vector_norm(each, dim=(2, 3)) for each in (students, teachers))
            differ = norms * teacher_norms != 0  # true for NaN, which must not be hidden
            norms = torch.where(differ, norms, 1)
            students.div_(norms[..., None, None])
            teachers.div_(torch.where(differ, teacher_norms, 1)[..., None, None])
            similarities = torch.linalg.vecdot(students.flatten(2), teachers.flatten(2))
        return cls(vectors, students, teachers, norms, differ, similarities)


def _centred(grams: torch.Tensor, compared: torch.Tensor) -> torch.Tensor:
    """Gram matrices `(dims, texts, tokens, tokens)` of vectors that are centred over the tokens with a 1 in
    `compared`, of shape `(dims, texts, tokens)`; 0 for other tokens."""
    shares = compared / compared.sum(dim=2, keepdim=True).clamp(min=1)
    means = torch.einsum("ntij,ntj->nti", grams.expand(len(compared), -1, -1, -1), shares)
    rest = means - torch.linalg.vecdot(means, shares)[:, :, None]
    return (grams - means[..., None]).sub_(rest[:, :, None]).mul_(compared[..., None]).mul_(compared[:, :, None])
