"""Losses of MIPIC within one layer: hidden states at all dims teach their prefixes the relations between tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...utils.numerics import check_dims, no_autocast, precise, segments


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
    states, dims = precise(states), check_dims(dims, states.shape[2])
    numbers = CPU_GRAM_NUMBERS if states.device.type == "cpu" else GRAM_NUMBERS
    size = max(1, numbers // max(1, len(dims) * states.shape[1] ** 2))  # texts at a time
    losses = [
        checkpoint(_token_cka, *texts, dims, use_reentrant=False, preserve_rng_state=False)
        for texts in zip(states.split(size), counts.split(size), strict=True)
    ]
    return torch.cat(losses)


def _token_cka(states: torch.Tensor, counts: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """[`nested_token_cka`] of some texts: `1 - sum S T / (|S| |T|)` of the centred Gram matrices S of a prefix and T
    of all dims."""
    compared = (torch.arange(states.shape[1], device=counts.device) < counts.T[:, :, None]).to(states.dtype)
    # The shift keeps digits where tokens share a large offset, and makes equal tokens exactly 0.
    vectors = (states - states[:, :1]) * compared.amax(dim=0)[:, :, None]
    with no_autocast(states):
        grams = [torch.bmm(part, part.mT) for part in segments(vectors, dims)]
        students = _centred(torch.stack(grams).cumsum(dim=0), compared).flatten(2)
        full = vectors.detach()
        teachers = _centred(torch.bmm(full, full.mT)[None], compared).flatten(2)
        norms = torch.linalg.vector_norm(students, dim=2) * torch.linalg.vector_norm(teachers, dim=2)
        differ = norms != 0  # true for NaN, which must not be hidden
        similarities = torch.linalg.vecdot(students, teachers) / torch.where(differ, norms, 1)
    return torch.where(differ, 1 - similarities, 0.0).T


def _centred(grams: torch.Tensor, compared: torch.Tensor) -> torch.Tensor:
    """Gram matrices `(dims, texts, tokens, tokens)` of vectors that are centred over the tokens with a 1 in
    `compared`, of shape `(dims, texts, tokens)`; 0 for other tokens."""
    shares = compared / compared.sum(dim=2, keepdim=True).clamp(min=1)
    means = torch.einsum("ntij,ntj->nti", grams.expand(len(compared), -1, -1, -1), shares)
    rest = means - torch.linalg.vecdot(means, shares)[:, :, None]
    return (grams - means[..., None] - rest[:, :, None]) * compared[..., None] * compared[:, :, None]
