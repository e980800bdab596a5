"""Losses that align embeddings, or their similarities, with those of a teacher. Teachers get no gradient."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .common import blocks


# Rows of the similarity matrix in memory at a time, in `similarity_kl`.
SIMILARITY_ROWS = 1024


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


def similarity_kl(
    anchors: torch.Tensor,
    candidates: torch.Tensor,
    teacher_anchors: torch.Tensor,
    teacher_candidates: torch.Tensor,
    *,
    temperature: float | torch.Tensor,
    block_size: int = SIMILARITY_ROWS,
) -> torch.Tensor:
    r"""
    KL divergence between the teacher's and the student's distribution over the candidates of each anchor,
    `KL(softmax(cos_T / tau) || softmax(cos_S / tau))` (Starbucks,
    [2410.13230](https://huggingface.co/papers/2410.13230), fine-tuning).

    Args:
        anchors (`torch.Tensor` of shape `(batch, dim)`): Student embeddings; need not be normalised. Carries gradient.
        candidates (`torch.Tensor` of shape `(num_candidates, dim)`): Student embeddings. Carries gradient.
        teacher_anchors (`torch.Tensor` of shape `(batch, teacher_dim)`): Teacher embeddings. Detached here.
        teacher_candidates (`torch.Tensor` of shape `(num_candidates, teacher_dim)`): Teacher embeddings. Detached
            here.
        temperature (`float` or scalar `torch.Tensor`): tau, of both distributions. Detached here.
        block_size (`int`, *optional*): Number of anchors at a time. Similarities are computed again in the backward
            pass.

    Returns:
        `torch.Tensor` of shape `(batch,)`
    """
    anchors, candidates = (nn.functional.normalize(vectors, dim=1) for vectors in (anchors, candidates))
    teacher_anchors, teacher_candidates = (
        nn.functional.normalize(vectors.detach(), dim=1) for vectors in (teacher_anchors, teacher_candidates)
    )
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.detach()

    def divergence(rows: torch.Tensor, teacher_rows: torch.Tensor) -> torch.Tensor:
        log_student = (rows @ candidates.T / temperature).log_softmax(dim=1)
        log_teacher = (teacher_rows @ teacher_candidates.T / temperature).log_softmax(dim=1)
        return nn.functional.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(dim=1)

    parts = []
    for block in blocks(len(anchors), block_size):
        rows = anchors[block], teacher_anchors[block]
        # For a single block, recomputing the similarities would save no memory.
        parts.append(
            checkpoint(divergence, *rows, use_reentrant=False) if len(anchors) > block_size else divergence(*rows)
        )
    return torch.cat(parts)
