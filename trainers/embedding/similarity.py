"""Similarity distillation: match a text's similarities to many candidates, at every prefix of the dims."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...utils.numerics import no_autocast, precise, segments


def nested_cosines(vectors: torch.Tensor, candidates: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """
    Cosines of prefixes. Dot products of longer prefixes continue those of shorter ones. The cosines of a zero vector
    are 0, without gradient.

    Args:
        vectors (`torch.Tensor` of shape `(batch, width)`): Vectors; need not be normalised. Carries gradient.
        candidates (`torch.Tensor` of shape `(num_candidates, width)`): Vectors to compare with. Carries gradient.
        dims (`Sequence[int]`): Prefix dims, ascending, at most `width`.

    Returns:
        `torch.Tensor` of shape `(len(dims), batch, num_candidates)`, in float32 or wider.
    """
    sides = [segments(precise(side), dims) for side in (vectors, candidates)]
    with no_autocast(vectors):
        products = torch.stack([part @ other.T for part, other in zip(*sides, strict=True)]).cumsum(dim=0)
    squares, others = (torch.stack([part.square().sum(dim=1) for part in side]).cumsum(dim=0) for side in sides)
    return products * _inverse_roots(squares)[:, :, None] * _inverse_roots(others)[:, None, :]


def _inverse_roots(squares: torch.Tensor) -> torch.Tensor:
    """`1 / sqrt(x)`, and for 0 a 0 without gradient; the inner `where` avoids the infinite one."""
    return torch.where(squares > 0, torch.where(squares > 0, squares, 1.0).rsqrt(), 0.0)


def nested_similarity_distillation(
    students: torch.Tensor,
    teachers: torch.Tensor,
    candidates: torch.Tensor,
    dims: Sequence[int],
    *,
    teacher_candidates: torch.Tensor | None = None,
    temperature: float | torch.Tensor = 0.05,
) -> torch.Tensor:
    """
    `KL(P_teacher || P_student)` between distributions over candidates. P is the softmax of a text's cosines to all
    candidates, divided by the temperature: the teacher's at all dims, the student's at each prefix (Starbucks,
    [2410.13230](https://huggingface.co/papers/2410.13230), fine-tuning; exit distillation).

    Args:
        students (`torch.Tensor` of shape `(batch, width)`): The student's embeddings. Carries gradient.
        teachers (`torch.Tensor` of shape `(batch, teacher_width)`): The teacher's embeddings of the same texts.
            Detached here, as its candidates.
        candidates (`torch.Tensor` of shape `(num_candidates, width)`): Embeddings of the candidates. Carries gradient.
        dims (`Sequence[int]`): Prefix dims, ascending, at most `width`.
        teacher_candidates (`torch.Tensor` of shape `(num_candidates, teacher_width)`, *optional*): The teacher's
            embeddings of the candidates. Default: `candidates`.
        temperature (`float` or scalar `torch.Tensor`, *optional*, defaults to 0.05): Cosines are divided by it.
            Detached here.

    Returns:
        `torch.Tensor` of shape `(len(dims), batch)`: losses, 0 where the similarities are equal.
    """
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.detach()
    with torch.no_grad():
        teacher_candidates = candidates if teacher_candidates is None else teacher_candidates
        (teacher,) = nested_cosines(teachers, teacher_candidates, (teachers.shape[1],))
        teacher = nn.functional.log_softmax(teacher / temperature, dim=1)
    student = nn.functional.log_softmax(nested_cosines(students, candidates, dims) / temperature, dim=2)
    return (teacher.exp() * (teacher - student)).sum(dim=2)
