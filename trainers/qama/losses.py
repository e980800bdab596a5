"""The losses of QAMA: embeddings that stay similar when they are truncated and quantised. Teachers get no gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from ...utils.numerics import no_autocast, precise


SMALLEST_NUMBER = 1e-6  # below it, the information bottleneck has no gradient: its slope at 0 is infinite
LEAST_RAMP = 0.2


def similarity_error(similarities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """
    Mean squared difference of similarities (QAMA, L_sim).

    Args:
        similarities (`torch.Tensor` of shape `(texts, candidates)`): Cosines of the student. Carries gradient.
        targets (`torch.Tensor` of shape `(texts, candidates)`): Cosines of the teacher.

    Returns:
        `torch.Tensor` of shape `(texts,)`
    """
    return (similarities - targets.detach()).square().mean(dim=1)


def similarity_divergence(
    similarities: torch.Tensor, targets: torch.Tensor, *, temperature: float = 0.1
) -> torch.Tensor:
    """
    Half the sum of both KL divergences between the distributions over candidates, softmax(similarity / temperature)
    (QAMA, L_kl).

    Args:
        similarities (`torch.Tensor` of shape `(texts, candidates)`): Cosines of the student. Carries gradient.
        targets (`torch.Tensor` of shape `(texts, candidates)`): Cosines of the teacher.
        temperature (`float`, *optional*, defaults to 0.1): Cosines are divided by it.

    Returns:
        `torch.Tensor` of shape `(texts,)`
    """
    student = (similarities / temperature).log_softmax(dim=1)
    teacher = (targets.detach() / temperature).log_softmax(dim=1)
    return 0.5 * ((teacher.exp() - student.exp()) * (teacher - student)).sum(dim=1)


def rank_error(similarities: torch.Tensor, targets: torch.Tensor, *, scale: float = 10.0) -> torch.Tensor:
    """
    Mean squared difference of soft orders: `sigmoid(scale * (s_ij - s_ik))` for all pairs of candidates j, k of a text
    i (QAMA, L_rank, as in the released code; the text of the paper multiplies the two sides).

    Args:
        similarities (`torch.Tensor` of shape `(texts, candidates)`): Cosines of the student. Carries gradient.
        targets (`torch.Tensor` of shape `(texts, candidates)`): Cosines of the teacher.
        scale (`float`, *optional*, defaults to 10.0): Factor of the differences.

    Returns:
        `torch.Tensor` of shape `(texts,)`. Memory: `texts * candidates^2` numbers.
    """
    orders = [
        torch.sigmoid(scale * (side.unsqueeze(2) - side.unsqueeze(1))) for side in (similarities, targets.detach())
    ]
    return (orders[0] - orders[1]).square().mean(dim=(1, 2))


def added_dims_overlap(vectors: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """
    How much the dims that each nested dim adds repeat those before: `sum_l sum_{j<l} ||D_l^T E_j||_F / texts`, where
    D_l are the dims that are new in l and E_j those up to j, each with normalised rows (QAMA, L_orth; the division
    keeps it independent of the batch).

    Args:
        vectors (`torch.Tensor` of shape `(texts, width)`): Embeddings. Carries gradient.
        dims (`Sequence[int]`): Nested dims, ascending.

    Returns:
        `torch.Tensor`, a scalar; 0 for a single dim.
    """
    vectors = precise(vectors)
    total = vectors.new_zeros(())
    with no_autocast(vectors):
        for level, (start, end) in enumerate(zip(dims[:-1], dims[1:], strict=True)):
            added = nn.functional.normalize(vectors[:, start:end], dim=1)
            for dim in dims[: level + 1]:
                earlier = nn.functional.normalize(vectors[:, :dim], dim=1)
                total = total + torch.linalg.matrix_norm(added.T @ earlier) / len(vectors)
    return total


def information_bottleneck(vectors: torch.Tensor, *, offset: float = 0.1, exponent: float = 0.3) -> torch.Tensor:
    """
    A penalty on information in late dims: `sum_i i/n (x_i^2 / (offset + |x_i|))^exponent` (QAMA, L_ib).

    Args:
        vectors (`torch.Tensor` of shape `(texts, n)`): Embeddings. Carries gradient.
        offset (`float`, *optional*, defaults to 0.1): x_0 in the paper.
        exponent (`float`, *optional*, defaults to 0.3): alpha in the paper.

    Returns:
        `torch.Tensor` of shape `(texts,)`
    """
    sizes = precise(vectors).abs().clamp(min=SMALLEST_NUMBER)
    weights = torch.arange(1, vectors.shape[1] + 1, dtype=sizes.dtype, device=sizes.device) / vectors.shape[1]
    return (weights * (sizes.square() / (offset + sizes)).pow(exponent)).sum(dim=1)


def variance_control(vectors: torch.Tensor) -> torch.Tensor:
    """
    A penalty on dims that hardly vary: `sum_d exp(-std_d)` over a batch (QAMA, adaptive variance control, without its
    ramp over training).

    Args:
        vectors (`torch.Tensor` of shape `(texts, dims)`): Embeddings. Carries gradient.

    Returns:
        `torch.Tensor`, a scalar.
    """
    variance = precise(vectors).var(dim=0, correction=0)
    return (-(variance + SMALLEST_NUMBER**2).sqrt()).exp().sum()


def threshold_repulsion(numbers: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """
    A penalty on numbers close to a threshold: the mean of `exp(-min_i |x - threshold_i|)` over dims (QAMA, L_quant).

    Args:
        numbers (`torch.Tensor` of shape `(texts, dims)`): Numbers before quantisation. Carries gradient.
        thresholds (`torch.Tensor` of shape `(levels - 1, dims)`): Thresholds of each dim.

    Returns:
        `torch.Tensor` of shape `(texts,)`
    """
    distances = (numbers.unsqueeze(1) - thresholds.detach()).abs().amin(dim=1)
    return (-distances).exp().mean(dim=1)


def range_penalty(numbers: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """
    A penalty on numbers out of a range: the mean of `relu(low - x)^2 + relu(x - high)^2` over dims (QAMA, L_range).

    Args:
        numbers (`torch.Tensor` of shape `(texts, dims)`): Numbers. Carries gradient.
        low (`torch.Tensor` of shape `(dims,)`): Lower ends.
        high (`torch.Tensor` of shape `(dims,)`): Upper ends.

    Returns:
        `torch.Tensor` of shape `(texts,)`
    """
    below, above = nn.functional.relu(low.detach() - numbers), nn.functional.relu(numbers - high.detach())
    return (below.square() + above.square()).mean(dim=1)


def soft_bits(margins: torch.Tensor) -> torch.Tensor:
    """
    Bits as 1 and -1, with the gradient of a soft step: `2 sigmoid(margin / t) - 1`, where t is half the standard
    deviation of the margins of each bit over the batch.

    Args:
        margins (`torch.Tensor` of shape `(texts, bits)`): Numbers minus the threshold of each bit. Carries gradient.

    Returns:
        `torch.Tensor` of shape `(texts, bits)`: exactly 1 or -1.
    """
    spread = 0.5 * margins.detach().std(dim=0, correction=0).clamp(min=SMALLEST_NUMBER)
    soft = 2 * torch.sigmoid(margins / spread) - 1
    # The difference is exactly 0 and carries the gradient.
    return torch.where(margins > 0, 1.0, -1.0) + (soft - soft.detach())


def ramp(progress: float) -> float:
    """The weight of variance control and of the quantisation loss, when a share p in 0..1 of the training is done:
    `max(0.2, (e^p - 1) / (e - 1))` (QAMA)."""
    return max(LEAST_RAMP, math.expm1(progress) / math.expm1(1.0))
