"""Exact search, two-stage search, and the metrics of ranked lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import nn

from ..core.extras import require_extra
from .embeddings import ROWS_AT_ONCE


SHORTLISTS = (10, 20, 50, 100, 200)  # lengths of shortlists that are measured


def exact_search(queries: torch.Tensor, documents: torch.Tensor, k: int) -> np.ndarray:
    """
    Find the documents with the highest cosine by comparing each query with every document (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), A.1).

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): Embeddings; need not be normalised.
        documents (`torch.Tensor` of shape `(documents, dim)`): Embeddings; need not be normalised.
        k (`int`): Number of documents to find per query; all documents if there are fewer.

    Returns:
        `np.ndarray` of shape `(queries, k)`: rows of `documents`, best first.
    """
    return ExactIndex(documents).search(queries, k)[1]


class ExactIndex:
    """
    An index for exact search by cosine. It uses faiss' `IndexFlatIP` if faiss is installed (extra `evaluation`),
    otherwise `torch.topk` over blocks of documents.

    Args:
        documents (`torch.Tensor` of shape `(documents, dim)`): Embeddings; need not be normalised.
    """

    engine = "torch" if find_spec("faiss") is None else "faiss"

    def __init__(self, documents: torch.Tensor):
        self.count = len(documents)
        blocks = (documents[start : start + ROWS_AT_ONCE] for start in range(0, self.count, ROWS_AT_ONCE))
        normalized = (nn.functional.normalize(block.float(), dim=1) for block in blocks)
        if self.engine == "torch":
            self._blocks = list(normalized)
            return
        import faiss

        self._index = faiss.IndexFlatIP(documents.shape[1])
        for block in normalized:
            self._index.add(block.numpy())

    def search(self, queries: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Find the documents with the highest cosine.

        Args:
            queries (`torch.Tensor` of shape `(queries, dim)`): Embeddings; need not be normalised.
            k (`int`): Number of documents to find per query; all documents if there are fewer.

        Returns:
            `tuple[np.ndarray, np.ndarray]`, both of shape `(queries, k)`: cosines and rows, best first.
        """
        queries, k = nn.functional.normalize(queries.float(), dim=1), min(k, self.count)
        if self.engine == "faiss":
            return self._index.search(queries.numpy(), k)
        best, rows, start = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long), 0
        for block in self._blocks:
            cosines = queries @ block.T
            best = torch.cat([best, cosines], dim=1)
            rows = torch.cat([rows, torch.arange(start, start + len(block)).expand(len(queries), -1)], dim=1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            rows, start = rows.gather(1, order), start + len(block)
        return best.numpy(), rows.numpy()


def rerank(
    queries: torch.Tensor, documents: torch.Tensor, shortlist: np.ndarray, sizes: Sequence[int]
) -> dict[int, np.ndarray]:
    """
    The second stage of a two-stage search: sort the first documents of a shortlist by cosine.

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): Embeddings at the granularity that re-ranks; need not be
            normalised.
        documents (`torch.Tensor` of shape `(documents, dim)`): Embeddings of the whole collection, at the same
            granularity.
        shortlist (`np.ndarray` of shape `(queries, length)`): Rows of `documents` found by the first stage, best
            first.
        sizes (`Sequence[int]`): Numbers of documents to re-rank; each number is a separate search.

    Returns:
        `dict[int, np.ndarray]`: size -> rows of shape `(queries, size)`, best first.
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
    """Multiplications of a two-stage search, as a share of those of an exact search at the dim of the second stage."""
    first, second = dims
    return (documents * first + size * second) / (documents * second)


def ranking_scores(
    ranked: np.ndarray, relevant: Sequence[Mapping[int, float]], cutoffs: Sequence[int] = (1, 10, 100)
) -> dict[str, float]:
    """
    Metrics of ranked lists, averaged over queries.

    Args:
        ranked (`np.ndarray` of shape `(queries, k)`): Documents found, best first.
        relevant (`Sequence[Mapping[int, float]]`): Per query: relevant document -> its grade, above 0.
        cutoffs (`Sequence[int]`, *optional*, defaults to `(1, 10, 100)`): Values of k for Recall@k; those above the
            length of the lists are left out.

    Returns:
        `dict[str, float]`: `recall@k`, the share of the relevant documents among the first k; `mrr@10`, the reciprocal
        rank of the first relevant document, 0 if it is not among the first 10; `ndcg@10`, with the grades as gains.

    Raises:
        ValueError: if a query has no relevant document, which leaves its metrics undefined.
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
    # The ideal ranking also has the relevant documents that were not found: append them to the list.
    found = np.pad(found, ((0, 0), (0, max(0, 10 - found.shape[1]))))
    missed = np.zeros((len(lists), counts.max()))
    for row, (rows, grades) in enumerate(zip(lists, relevant, strict=True)):
        rest = [grades[document] for document in grades.keys() - set(rows)]
        missed[row, : len(rest)] = rest
    gains = np.concatenate([found, missed], axis=1)
    order = np.broadcast_to(-np.arange(gains.shape[1]), gains.shape)
    metrics = require_extra("sklearn.metrics", "evaluation", "Retrieval")
    scores["ndcg@10"] = float(metrics.ndcg_score(gains, order, k=10, ignore_ties=True))
    return scores
