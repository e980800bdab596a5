"""
Hybrid search: BM25 over words beside a search by embeddings, fused by scores or by ranks.

Each of both searches gives its best documents. A document that only one of them found has, in the other, the lowest
score or the last rank that the other gave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.extras import require_extra


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


def bm25_search(
    queries: Sequence[str], documents: Sequence[str], k: int = CANDIDATES, *, k1: float = 1.2, b: float = 0.75
) -> Ranking:
    """
    Search documents with BM25 over their lower-case words without English stop words, by the library bm25s.

    Args:
        queries (`Sequence[str]`): Queries.
        documents (`Sequence[str]`): Documents.
        k (`int`, *optional*, defaults to 1000): Number of documents to find per query; all if there are fewer.
        k1 (`float`, *optional*, defaults to 1.2): Saturation of the count of a word.
        b (`float`, *optional*, defaults to 0.75): Weight of the document's length.

    Returns:
        [`Ranking`]

    Raises:
        ValueError: if bm25s is not installed.
    """
    bm25s = require_extra("bm25s", "hybrid", "BM25")
    index = bm25s.BM25(k1=k1, b=b)
    index.index(bm25s.tokenize(list(documents), show_progress=False), show_progress=False)
    words = bm25s.tokenize(list(queries), show_progress=False, return_ids=False)
    rows, scores = index.retrieve(words, k=min(k, len(documents)), show_progress=False, backend_selection="numpy")
    return Ranking(np.asarray(scores, np.float64), np.asarray(rows, np.int64))


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
    return _best(found, k)


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


def _best(found: list[tuple[np.ndarray, np.ndarray]], k: int) -> np.ndarray:
    """The best `k` rows of each query. Of equal values, the first rows."""
    k = min([k, *(len(rows) for rows, _ in found)])
    return np.stack([rows[np.argsort(-values, kind="stable")[:k]] for rows, values in found])
