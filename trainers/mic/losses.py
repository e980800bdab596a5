"""Losses of MIC: low correlation between a prefix and the dims after it, equal variances, and uniformity."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...utils.numerics import check_dims, no_autocast, precise, segments
from ..embedding.similarity import nested_cosines


EPSILON = 1e-8
# A deviation below this many rounding errors of the mean counts as 0.
ROUNDINGS = 8


def standardized(states: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Hidden states of tokens standardised over the tokens of each text, per dim: `(h - mean) / (deviation + epsilon)`
    (MIC, [2605.29987](https://huggingface.co/papers/2605.29987), Eq. 1 and below). Mean and standard deviation are
    those of the real tokens.

    Args:
        states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Hidden states of tokens. Carries gradient.
        mask (`torch.Tensor` of shape `(batch, tokens)`): 1 for real tokens.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the standardised hidden states, 0 for padding, and the standard deviations
        `(batch, hidden_size)`, both in float32 or wider. A dim that is constant in a text is 0 there, without
        gradient.
    """
    states = precise(states)
    real = mask.to(states.dtype)[:, :, None]
    count = real.sum(dim=1).clamp(min=1)
    means = (states * real).sum(dim=1) / count
    centred = (states - means[:, None]) * real
    variances = centred.square().sum(dim=1) / count
    # Equal numbers may differ from their mean by its rounding error. The inner `where` avoids the infinite gradient of
    # the square root at 0.
    varies = variances.detach().sqrt() > ROUNDINGS * torch.finfo(means.dtype).eps * means.detach().abs()
    deviations = torch.where(varies, torch.where(varies, variances, 1.0).sqrt(), 0.0)
    inverses = torch.where(varies, 1 / (deviations + EPSILON), 0.0)
    return centred * inverses[:, None], deviations


def prefix_residual_products(
    standardized_states: torch.Tensor, mask: torch.Tensor, dims: Sequence[int]
) -> list[torch.Tensor]:
    r"""
    Sum over texts of the mean over tokens of `x_prefix x_residual^T` for all dims at once, where the residual is the
    dims after the prefix (MIC, [2605.29987](https://huggingface.co/papers/2605.29987), section 2.1: C times the number
    of texts). The sums of several batches can be added.

    Because hidden states are standardised per dim, the blocks of all prefixes are parts of one matrix. Only the part
    of it above the diagonal of segments is computed.

    Args:
        standardized_states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): From [`standardized`]. Carries
            gradient.
        mask (`torch.Tensor` of shape `(batch, tokens)`): 1 for real tokens.
        dims (`Sequence[int]`): Prefix dims, ascending, below the hidden size.

    Returns:
        `list[torch.Tensor]`: per dim d_i, the products of the dims from d_{i-1} to d_i with all dims after d_i, of
        shape `(d_i - d_{i-1}, hidden_size - d_i)`.

    Raises:
        ValueError: if the dims are not ascending and below the hidden size.
    """
    dims = check_dims(dims, standardized_states.shape[2] - 1)
    count = mask.sum(dim=1).clamp(min=1).to(standardized_states.dtype)
    rows = standardized_states.flatten(0, 1)
    weighted = (standardized_states / count[:, None, None]).flatten(0, 1)
    with no_autocast(rows):
        return [part.T @ rows[:, dim:] for part, dim in zip(segments(weighted, dims), dims, strict=True)]


def correlation_penalty(correlations: Sequence[torch.Tensor], *, threshold: float) -> torch.Tensor:
    r"""
    Penalty on the correlations between a prefix and the dims after it, for all dims at once (MIC,
    [2605.29987](https://huggingface.co/papers/2605.29987), section 2.1): `sum_uv max(0, |C_uv| - threshold)^2 /
    (d * d_res)` over dims u of the prefix and v after it.

    Each pair of dims is computed once: the penalty of a prefix sums the rows of all its segments, over the dims after
    the prefix.

    Args:
        correlations (`Sequence[torch.Tensor]`): [`prefix_residual_products`], averaged over texts. Carry gradient.
        threshold (`float`): tau_corr; smaller correlations are not penalised.

    Returns:
        `torch.Tensor` of shape `(len(correlations),)`
    """
    penalties, dim = [], 0
    residual_sums = correlations[0].new_zeros(correlations[0].shape[1])  # per dim v after the prefix: sum over all u
    for rows in correlations:
        dim += len(rows)
        residual_sums = residual_sums[-rows.shape[1] :] + (rows.abs() - threshold).clamp(min=0).square().sum(dim=0)
        penalties.append(residual_sums.sum() / (dim * rows.shape[1]))
    return torch.stack(penalties)


def variance_floor(deviations: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    r"""
    Penalty on small standard deviations, which keeps dims from shrinking to reduce their correlation (MIC,
    [2605.29987](https://huggingface.co/papers/2605.29987), section 2.1): `max(0, 1 - mean deviation of the prefix) +
    0.5 max(0, 1 - mean deviation after it)`.

    Args:
        deviations (`torch.Tensor` of shape `(hidden_size,)`): Standard deviation of each dim over tokens, averaged
            over texts. Carries gradient.
        dims (`Sequence[int]`): Prefix dims, ascending, below the hidden size.

    Returns:
        `torch.Tensor` of shape `(len(dims),)`

    Raises:
        ValueError: if the dims are not ascending and below the hidden size.
    """
    dims = check_dims(dims, len(deviations) - 1)
    sums, lengths = deviations.cumsum(dim=0), torch.tensor(dims, device=deviations.device)
    prefix = sums[lengths - 1]
    residual = sums[-1] - prefix
    return (1 - prefix / lengths).clamp(min=0) + 0.5 * (1 - residual / (len(deviations) - lengths)).clamp(min=0)


def variance_variation(vectors: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    r"""
    Coefficient of variation of the variances of a prefix's dims (MIC,
    [2605.29987](https://huggingface.co/papers/2605.29987), section 2.2): the standard deviation of the variances
    divided by their mean. Variances are over texts.

    Args:
        vectors (`torch.Tensor` of shape `(batch, hidden_size)`): Pooled embeddings. Carries gradient.
        dims (`Sequence[int]`): Prefix dims, ascending.

    Returns:
        `torch.Tensor` of shape `(len(dims),)`, in float32 or wider; 0 if all dims have the same variance.

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size.
    """
    dims, vectors = check_dims(dims, vectors.shape[1]), precise(vectors)
    variances = (vectors - vectors.mean(dim=0)).square().mean(dim=0)
    lengths = torch.tensor(dims, device=vectors.device)
    within = torch.arange(vectors.shape[1], device=vectors.device) < lengths[:, None]
    means = (variances * within).sum(dim=1) / lengths
    spreads = ((variances - means[:, None]) * within).square().sum(dim=1) / lengths
    # The inner `where` avoids the infinite gradient of the square root at 0.
    return torch.where(spreads > 0, torch.where(spreads > 0, spreads, 1.0).sqrt(), 0.0) / (means + EPSILON)


def nested_uniformity(vectors: torch.Tensor, dims: Sequence[int], *, scale: float = 2.0) -> torch.Tensor:
    r"""
    Uniformity of prefixes on the unit sphere (MIC, [2605.29987](https://huggingface.co/papers/2605.29987), section
    2.2): `log(mean over pairs of exp(-2 t (1 - cos)) + epsilon)`, over pairs of different rows. Lower is more uniform.

    Args:
        vectors (`torch.Tensor` of shape `(batch, hidden_size)`): Pooled embeddings; need not be normalised. Carries
            gradient.
        dims (`Sequence[int]`): Prefix dims, ascending.
        scale (`float`, *optional*, defaults to 2.0): t.

    Returns:
        `torch.Tensor` of shape `(len(dims),)`, in float32 or wider.

    Raises:
        ValueError: if the dims are not ascending and within 1..hidden_size, or there are fewer than two rows.
    """
    count = len(vectors)
    if count < 2:
        raise ValueError(f"Uniformity needs pairs of texts; a batch of {count} has none.")
    kernel = torch.exp(2 * scale * (nested_cosines(vectors, vectors, check_dims(dims, vectors.shape[1])) - 1))
    different = ~torch.eye(count, dtype=torch.bool, device=vectors.device)
    return torch.log((kernel * different).sum(dim=(1, 2)) / (count * (count - 1)) + EPSILON)
