"""Losses of MIPIC within one layer: hidden states at all dims teach their prefixes the relations between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...encode.numerics import check_dims, no_autocast, precise


# Tolerance for rounding errors: share * tokens may be slightly above the exact integer.
ROUNDING = 1e-9


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
    states: torch.Tensor, anchors: torch.Tensor, projections: Sequence[torch.Tensor]
) -> torch.Tensor:
    r"""
    [`token_importance`] from prefixes, which a learned map projects to all dims: `s_j = h_anchor . P_i^T h_j[:d_i]
    / sqrt(D)` (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), Eq. 5). It is computed as
    `(P_i h_anchor) . h_j[:d_i]`, one product for all dims.

    Args:
        states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Hidden states of tokens of one layer. Carries
            gradient.
        anchors (`torch.Tensor` of shape `(batch, hidden_size)`): Hidden state of each text's anchor token. Detached
            here.
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
        return torch.bmm(torch.stack(queries, dim=1) / width**0.5, states.transpose(1, 2))


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
    again = partial(checkpoint, _token_cka, use_reentrant=False, preserve_rng_state=False)
    dims = check_dims(dims, states.shape[2])
    return torch.stack([again(states, *each) for each in zip(counts.unbind(dim=1), dims, strict=True)], dim=1)


def _token_cka(states: torch.Tensor, counts: torch.Tensor, dim: int) -> torch.Tensor:
    """`1 - CKA` of the first `counts` tokens of each text at one dim, `(batch,)`."""
    states = precise(states[:, : int(counts.max()) if len(counts) else 0])
    # The shift keeps digits where tokens share a large offset, and makes equal tokens exactly 0.
    states = states - states[:, :1].detach()
    kept = (torch.arange(states.shape[1], device=counts.device) < counts[:, None]).to(states.dtype)[:, :, None]

    def gram(vectors: torch.Tensor) -> torch.Tensor:
        vectors = vectors * kept
        centred = (vectors - vectors.sum(dim=1, keepdim=True) / kept.sum(dim=1, keepdim=True).clamp(min=1)) * kept
        return torch.bmm(centred, centred.transpose(1, 2)).flatten(1)

    with no_autocast(states):
        student, teacher = gram(states[:, :, :dim]), gram(states.detach())
        norms = torch.linalg.vector_norm(student, dim=1) * torch.linalg.vector_norm(teacher, dim=1)
        differ = norms != 0  # true for NaN, which must not be hidden
        return torch.where(differ, 1 - torch.linalg.vecdot(student, teacher) / torch.where(differ, norms, 1.0), 0.0)
