"""Losses of ESE and 2DMSE that align embeddings with those of a teacher. Teachers get no gradient."""

from __future__ import annotations

import torch
from torch import nn


def embedding_kl(student: torch.Tensor, teacher: torch.Tensor, *, temperature: float) -> torch.Tensor:
    r"""
    KL divergence between the softmax distributions of embeddings over their dims, `T * KL(softmax(teacher / T) ||
    softmax(student / T))` (2DMSE, [2402.14776v1](https://huggingface.co/papers/2402.14776), alignment of layers; with
    T = 1 also the second term of the alignment in version 3, ESE).

    Args:
        student (`torch.Tensor` of shape `(rows, dim)`): Embeddings of the student. Carries gradient.
        teacher (`torch.Tensor` of shape `(rows, dim)`): Embeddings of the teacher. Detached here.
        temperature (`float`): T.

    Returns:
        `torch.Tensor` of shape `(rows,)`
    """
    log_student = (student / temperature).log_softmax(dim=1)
    log_teacher = (teacher.detach() / temperature).log_softmax(dim=1)
    divergence = nn.functional.kl_div(log_student, log_teacher, reduction="none", log_target=True)
    return temperature * divergence.sum(dim=1)


@torch.no_grad()
def principal_map(gram: torch.Tensor) -> torch.Tensor:
    r"""
    The map to principal components of ESE ([2402.14776v3](https://huggingface.co/papers/2402.14776), learning to
    compress): `U diag(s)` of the singular value decomposition of `A = softmax(gram / sqrt(d))`, where each row is
    normalised. `embeddings @ principal_map(gram)[:, :k]` is the target of the first k dims, for every k.

    It is computed as `U diag(s) = A V` with the eigenvectors V of `A^T A`, at a third of the cost of a full
    decomposition. The signs of the columns, which a decomposition leaves open, are chosen such that the entry with the
    largest absolute value is positive. Otherwise the sign of the target could change from batch to batch.

    Args:
        gram (`torch.Tensor` of shape `(d, d)`): `embeddings^T embeddings` of the whole batch.

    Returns:
        `torch.Tensor` of shape `(d, d)`, with columns by descending singular value. Has no gradient.
    """
    attention = (gram / len(gram) ** 0.5).softmax(dim=1)
    _, vectors = torch.linalg.eigh(attention.T @ attention)
    scaled = attention @ vectors.flip(1)
    largest = scaled.gather(0, scaled.abs().argmax(dim=0, keepdim=True))
    return scaled * torch.where(largest < 0, -1.0, 1.0).to(scaled)


def compression_alignment(student: torch.Tensor, components: torch.Tensor) -> torch.Tensor:
    """
    Distance between a prefix and the principal components of the full embedding (ESE,
    [2402.14776v3](https://huggingface.co/papers/2402.14776), learning to compress): mean squared error plus
    [`embedding_kl`] with T = 1.

    Args:
        student (`torch.Tensor` of shape `(rows, k)`): Prefixes. Carries gradient.
        components (`torch.Tensor` of shape `(rows, k)`): The first k principal components. Detached here.

    Returns:
        `torch.Tensor` of shape `(rows,)`
    """
    errors = (student - components.detach()).square().mean(dim=1)
    return errors + embedding_kl(student, components, temperature=1.0)
