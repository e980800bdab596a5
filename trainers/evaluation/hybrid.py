"""
Hybrid search: BM25 over words beside a search by embeddings, fused by scores or by ranks.

Each of both searches gives its best documents. A document that only one of them found has, in the other, the lowest
score or the last rank that the other gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .words import Words


CANDIDATES = 1000  # documents per query that each search gives
BM25_WEIGHT = 0.5  # a round value; benchmarks/static_peers.py compares others
RANK_CONSTANT = 60


@dataclass(frozen=True)
class Ranking:
    """
    The best documents of each query.

    Args:
        scores (`np.ndarray` of shape `(queries, k)`): Scores, best first.
        rows (`np.ndarray` of shape `(queries, k)`): Rows of the documents.
    """

    scores: np.ndarray
    rows: np.ndarray


def bm25_search(queries: Sequence[str], documents: Sequence[str], k: int = CANDIDATES) -> Ranking:
    """
    Search documents by BM25 over their words ([`Words`]).

    Args:
        queries (`Sequence[str]`): Queries.
        documents (`Sequence[str]`): Documents.
        k (`int`, *optional*, defaults to 1000): Number of documents to find per query; all if there are fewer. Those
            without a word of the query have the score 0.

    Returns:
        [`Ranking`]

    Raises:
        ValueError: if SQLite has no full-text search.
    """
    words, k = Words(), min(k, len(documents))
    words.add(enumerate(documents))
    rows, scores = np.empty((len(queries), k), np.int64), np.zeros((len(queries), k))
    for query, text in enumerate(queries):
        found = words.search(text, k)
        keys = [key for key, _ in found]
        others = np.setdiff1d(np.arange(k), keys)  # the first ones that were not found are among the first k
        rows[query] = [*keys, *others[: k - len(keys)]]
        scores[query, : len(keys)] = [score for _, score in found]
    return Ranking(scores, rows)


def fuse_scores(first: Ranking, second: Ranking, k: int, weight: float = BM25_WEIGHT) -> np.ndarray:
    """
    Fuse two searches by `z(first) + weight z(second)`, where z standardises the scores of a query over the documents
    that either search found.

    Args:
        first ([`Ranking`]): A search.
        second ([`Ranking`]): Another search of the same queries.
        k (`int`): Number of documents per query.
        weight (`float`, *optional*, defaults to 0.5): Weight of the second search.

    Returns:
        `np.ndarray` of shape `(queries, k)`: rows of documents, best first; fewer if fewer were found for some query.
    """
    return fused_by_scores(first, second, k, weight).rows


def fused_by_scores(first: Ranking, second: Ranking, k: int, weight: float = BM25_WEIGHT) -> Ranking:
    """As [`fuse_scores`], with the fused scores."""
    found = [
        (rows, _standardised(one) + weight * _standardised(other))
        for rows, one, other in _unions(first.rows, first.scores, second.rows, second.scores)
    ]
    return _best(found, k)


def fuse_ranks(first: Ranking, second: Ranking, k: int, constant: float = RANK_CONSTANT) -> np.ndarray:
    """
    Fuse two searches by `1 / (constant + rank)` summed over both (reciprocal rank fusion). Arguments and result are
    those of [`fuse_scores`].
    """
    values = [
        np.broadcast_to(1 / (constant + 1 + np.arange(its.rows.shape[1])), its.rows.shape) for its in (first, second)
    ]
    found = [(rows, one + other) for rows, one, other in _unions(first.rows, values[0], second.rows, values[1])]
    return _best(found, k).rows


FUSIONS = {"scores": fuse_scores, "ranks": fuse_ranks}


def _unions(
    first_rows: np.ndarray, first: np.ndarray, second_rows: np.ndarray, second: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Per query: the documents that either search found, in ascending order, and their values in both."""
    for query in range(len(first_rows)):
        rows = np.union1d(first_rows[query], second_rows[query])
        values = []
        for its_rows, its in ((first_rows[query], first[query]), (second_rows[query], second[query])):
            of_all = np.full(len(rows), its[-1])
            of_all[np.searchsorted(rows, its_rows)] = its
            values.append(of_all)
        yield rows, values[0], values[1]


def _standardised(scores: np.ndarray) -> np.ndarray:
    """Mean 0 and deviation 1; equal scores become 0."""
    return (scores - scores.mean()) / (scores.std() or 1.0)


def _best(found: list[tuple[np.ndarray, np.ndarray]], k: int) -> Ranking:
    """The best `k` rows of each query. Of equal values, the first rows."""
    k = min([k, *(len(rows) for rows, _ in found)])
    orders = [np.argsort(-values, kind="stable")[:k] for _, values in found]
    scores = np.stack([values[order] for (_, values), order in zip(found, orders, strict=True)])
    return Ranking(scores, np.stack([rows[order] for (rows, _), order in zip(found, orders, strict=True)]))
