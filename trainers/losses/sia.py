"""Losses of MIPIC within one layer: hidden states at all dims teach their prefixes the relations between tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .common import no_autocast, precise


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
        return Scores.apply(torch.stack(queries, dim=1) / width**0.5, states)


class Scores(torch.autograd.Function):
    """`queries @ states^T` for `(batch, queries, dims)` and `(batch, tokens, dims)`. The gradient of the hidden states
    has their layout; that of a plain product would be transposed, and then copied."""

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
