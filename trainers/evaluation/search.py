"""Exact search, search in two stages, and the metrics of ranked lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import faiss
import numpy as np
import torch
from sklearn.metrics import ndcg_score
from torch import nn

from .embeddings import ROWS_AT_ONCE


SHORTLISTS = (10, 20, 50, 100, 200)  # lengths that are measured


def exact_search(queries: torch.Tensor, documents: torch.Tensor, k: int) -> np.ndarray:
    """
    The documents of highest cosine, by comparing with every one (faiss' `IndexFlatIP` on normalised vectors; m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), A.1).

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): Need not be normalised.
        documents (`torch.Tensor` of shape `(documents, dim)`): Need not be normalised.
        k (`int`): Documents to find for each query; all of them where there are fewer.

    Returns:
        `np.ndarray` of shape `(queries, k)`: rows of `documents`, the best first.
    """
    index = faiss.IndexFlatIP(documents.shape[1])
    for start in range(0, len(documents), ROWS_AT_ONCE):
        rows = documents[start : start + ROWS_AT_ONCE]
        index.add(nn.functional.normalize(rows.float(), dim=1).numpy())
    return index.search(nn.functional.normalize(queries.float(), dim=1).numpy(), min(k, len(documents)))[1]


def rerank(
    queries: torch.Tensor, documents: torch.Tensor, shortlist: np.ndarray, sizes: Sequence[int]
) -> dict[int, np.ndarray]:
    """
    The second stage of a search: order the first documents of a shortlist by cosine.

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): At the granularity that re-ranks; need not be normalised.
        documents (`torch.Tensor` of shape `(documents, dim)`): Of the whole collection, at the same granularity.
        shortlist (`np.ndarray` of shape `(queries, length)`): Rows of `documents` that the first stage found, the best
            first.
        sizes (`Sequence[int]`): How many of them to re-rank; each size is a search of its own.

    Returns:
        `dict[int, np.ndarray]`: size -> `(queries, size)`, the best first.
    """
    queries = nn.functional.normalize(queries.float(), dim=1)
    cosines = torch.stack(
        [
            nn.functional.normalize(documents[rows].float(), dim=1) @ query
            for query, rows in zip(queries, torch.from_numpy(shortlist), strict=True)
        ]
    )
    orders = {size: cosines[:, :size].argsort(dim=1, descending=True, stable=True).numpy() for size in sizes}
    return {size: np.take_along_axis(shortlist[:, :size], order, axis=1) for size, order in orders.items()}


def products_share(documents: int, dims: tuple[int, int], size: int) -> float:
    """Multiplications of a two-stage search, as a share of those of an exact search with the second stage's dim."""
    first, second = dims
    return (documents * first + size * second) / (documents * second)


def ranking_scores(
    ranked: np.ndarray, relevant: Sequence[Mapping[int, float]], cutoffs: Sequence[int] = (1, 10, 100)
) -> dict[str, float]:
    """
    Metrics of ranked lists, means over queries.

    Args:
        ranked (`np.ndarray` of shape `(queries, k)`): Documents found, the best first.
        relevant (`Sequence[Mapping[int, float]]`): Of each query, the relevant documents and their grades, above 0.
        cutoffs (`Sequence[int]`, *optional*): The k of Recall@k; those beyond the lists' length are left out.

    Returns:
        `dict[str, float]`: `recall@k`, the share of the relevant documents among the first k; `mrr@10`, the reciprocal
        of the first relevant document's rank, 0 beyond 10; `ndcg@10`, whose gains are the grades.

    Raises:
        ValueError: if a query has no relevant document; such queries belong in no average.
    """
    if not all(relevant):
        raise ValueError("Some queries have no relevant document; leave them out.")
    lists = ranked.tolist()
    found = np.array([[grades.get(row, 0.0) for row in rows] for rows, grades in zip(lists, relevant, strict=True)])
    counts = np.array([len(grades) for grades in relevant])
    scores = {
        f"recall@{k}": float(((found[:, :k] > 0).sum(axis=1) / counts).mean()) for k in cutoffs if k <= len(lists[0])
    }
    hits = found[:, :10] > 0
    scores["mrr@10"] = float((hits.any(axis=1) / (1 + hits.argmax(axis=1))).mean())
    # The ideal order has the relevant documents that a list lacks as well: they stand behind all that was found.
    found = np.pad(found, ((0, 0), (0, max(0, 10 - found.shape[1]))))
    missed = np.zeros((len(lists), counts.max()))
    for row, (rows, grades) in enumerate(zip(lists, relevant, strict=True)):
        rest = [grades[document] for document in grades.keys() - set(rows)]
        missed[row, : len(rest)] = rest
    gains = np.concatenate([found, missed], axis=1)
    order = np.broadcast_to(-np.arange(gains.shape[1]), gains.shape)
    scores["ndcg@10"] = float(ndcg_score(gains, order, k=10, ignore_ties=True))
    return scores
