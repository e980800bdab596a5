"""Retrieval by exact search."""

from __future__ import annotations

import torch
from torch import nn


def retrieval_metrics(queries: torch.Tensor, documents: torch.Tensor, k: int = 10) -> dict[str, float]:
    """
    Recall@k and MRR@k of exact cosine search, where document i is the one relevant to query i.

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): Need not be normalised.
        documents (`torch.Tensor` of shape `(documents, dim)`): At least as many as queries; more are distractors.
        k (`int`, *optional*, defaults to 10): Length of the result list.

    Returns:
        `dict[str, float]`: `recall@k` and `mrr@k`, in 0..1. Of equal scores the earlier document ranks first.

    Raises:
        ValueError: if an embedding is not finite, or there are fewer documents than queries.
    """
    if len(documents) < len(queries):
        raise ValueError(f"{len(queries)} queries need as many documents; there are {len(documents)}.")
    if not (torch.isfinite(queries).all() and torch.isfinite(documents).all()):
        raise ValueError("Some embeddings are not finite.")
    scores = nn.functional.normalize(queries, dim=1) @ nn.functional.normalize(documents, dim=1).T
    own = scores.diagonal().unsqueeze(1)
    earlier = torch.ones_like(scores, dtype=torch.bool).tril(diagonal=-1)
    ranks = 1 + (scores > own).sum(dim=1) + ((scores == own) & earlier).sum(dim=1)
    found = ranks <= k
    return {
        f"recall@{k}": found.double().mean().item(),
        f"mrr@{k}": (found / ranks).double().mean().item(),
    }
