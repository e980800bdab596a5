"""Losses on texts with scores: pairs with a similarity, and candidates with the scores of a reranker."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...utils.numerics import no_autocast, precise


def nested_pair_cosines(vectors: torch.Tensor, others: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """
    Cosine of each vector and its counterpart, at every prefix.

    Args:
        vectors (`torch.Tensor` of shape `(batch, width)`): Vectors; need not be normalised. Carries gradient.
        others (`torch.Tensor` of shape `(batch, width)`): Their counterparts. Carries gradient.
        dims (`Sequence[int]`): Prefix dims, ascending, at most `width`.

    Returns:
        `torch.Tensor` of shape `(len(dims), batch)`, in float32 or wider.
    """
    vectors, others = precise(vectors), precise(others)
    with no_autocast(vectors):
        return torch.stack([nn.functional.cosine_similarity(vectors[:, :dim], others[:, :dim]) for dim in dims])


def nested_pair_products(vectors: torch.Tensor, others: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Dot product of each vector and its counterpart, at every prefix; otherwise as [`nested_pair_cosines`]."""
    sums = (precise(vectors) * precise(others)).cumsum(dim=1)
    return sums.T[[dim - 1 for dim in dims]]


def nested_pair_angles(vectors: torch.Tensor, others: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    r"""
    Angle similarity of each vector and its counterpart, at every prefix (AnglE,
    [2309.12871](https://huggingface.co/papers/2309.12871), section 3.3). With the halves of a prefix as real and
    imaginary parts, `z = a + ib` and `w = c + id`, both of length 1:

        | sum (a c + b d) + sum (b c - a d) |

    The second half of an odd prefix ends with a 0. Arguments and result are those of [`nested_pair_cosines`].
    """
    similarities = []
    for dim in dims:
        unit = (nn.functional.normalize(precise(side[:, :dim])) for side in (vectors, others))
        (a, b), (c, d) = (nn.functional.pad(side, (0, dim % 2)).chunk(2, dim=1) for side in unit)
        similarities.append(((a * c + b * d) + (b * c - a * d)).sum(dim=1).abs())
    return torch.stack(similarities)


def cosent(similarities: torch.Tensor, scores: torch.Tensor, *, temperature: float) -> torch.Tensor:
    r"""
    CoSENT: `log(1 + sum over score_i < score_j of exp((s_i - s_j) / temperature))`, low if pairs with higher scores
    are more similar.

    Args:
        similarities (`torch.Tensor` of shape `(dims, batch)`): s. Carries gradient.
        scores (`torch.Tensor` of shape `(batch,)`): Scores of the pairs, of which only the order counts.
        temperature (`float`): 0.05 is the scale of 20 of other implementations.

    Returns:
        `torch.Tensor` of shape `(dims,)`: 0 for pairs with equal scores.
    """
    values = precise(similarities) / temperature
    differences = values[:, :, None] - values[:, None, :]
    differences = differences.masked_fill(scores[:, None] >= scores[None, :], -torch.inf).flatten(1)
    return nn.functional.pad(differences, (0, 1)).logsumexp(dim=1)


def margin_mse(similarities: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """
    Mean squared error between the margins of the student and of a reranker, `(s_0 - s_j) - (r_0 - r_j)` for every
    negative j (MarginMSE, [2010.02666](https://huggingface.co/papers/2010.02666), Eq. 7).

    Args:
        similarities (`torch.Tensor` of shape `(dims, batch, candidates)`): Those of a query to its positive and its
            negatives. Carries gradient.
        scores (`torch.Tensor` of shape `(batch, candidates)` or `(batch, candidates - 1)`): The reranker's scores of
            all candidates, or its margins.

    Returns:
        `torch.Tensor` of shape `(dims,)`
    """
    margins = scores[:, :1] - scores[:, 1:] if scores.shape[1] == similarities.shape[2] else scores
    learned = precise(similarities[..., :1] - similarities[..., 1:])
    return (learned - margins.to(learned)).square().flatten(1).mean(dim=1)


def score_divergence(
    similarities: torch.Tensor, scores: torch.Tensor, *, temperature: float, score_temperature: float
) -> torch.Tensor:
    """
    `KL(softmax(r / score_temperature) || softmax(s / temperature))` over the candidates of a query, averaged over
    queries ([2010.11386](https://huggingface.co/papers/2010.11386)).

    Args:
        similarities (`torch.Tensor` of shape `(dims, batch, candidates)`): s. Carries gradient.
        scores (`torch.Tensor` of shape `(batch, candidates)`): r, scores of a reranker.
        temperature (`float`): Temperature of the student.
        score_temperature (`float`): Temperature of the reranker.

    Returns:
        `torch.Tensor` of shape `(dims,)`
    """
    student = (precise(similarities) / temperature).log_softmax(dim=-1)
    teacher = (precise(scores) / score_temperature).log_softmax(dim=-1).expand_as(student)
    return nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(dim=-1).mean(dim=1)
