"""
Hybrid search: BM25 over words beside a search by embeddings, fused by scores or by ranks.

Each search gives its best documents. A document that only one search found gets, in the other, that search's lowest
score and last rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from unicodedata import normalize

import numpy as np

from ..utils.extras import require_extra
from ..utils.words import words


CANDIDATES = 1000  # documents per query that each search gives
BM25_WEIGHT = 0.5  # a round value; benchmarks/static_peers.py compares others
RANK_CONSTANT = 60
# Frequent words of English (from Lucene): a query searches all others, if it has any.
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)


@dataclass(frozen=True)
class Ranking:
    """
    The best documents of each query: scores and rows `(queries, k)`, best first. Where fewer than k were found, the
    row is -1, with the score of documents that were not found.
    """

    scores: np.ndarray
    rows: np.ndarray

    def without(self, documents: np.ndarray, k: int) -> Ranking:
        """The first `k` documents of each query, without one document per query (`-1`: none)."""
        left_out = (self.rows == documents[:, None]) & (self.rows >= 0)
        scores, rows = np.where(left_out, self.scores[:, -1:], self.scores), np.where(left_out, -1, self.rows)
        order = np.argsort(left_out, axis=1, kind="stable")[:, :k]  # they come last
        return Ranking(*(np.take_along_axis(array, order, axis=1) for array in (scores, rows)))


def bm25_search(queries: Sequence[str], documents: Sequence[str], k: int = CANDIDATES) -> Ranking:
    """
    Search documents by BM25 (k1 1.2, b 0.75, idf as in Lucene) over their [`words`], with bm25s. Words are compared in
    lower case and without accents and English endings (Snowball's stemmer). Repeated query words count repeatedly.
    Needs the extra `evaluation`.

    Args:
        queries (`Sequence[str]`): Queries.
        documents (`Sequence[str]`): Documents.
        k (`int`, *optional*, defaults to 1000): Number of documents to find per query; all if there are fewer.

    Returns:
        [`Ranking`]: documents with a word of the query; of equal scores, the first ones. Others have the score 0.
    """
    bm25s = require_extra("bm25s", "evaluation", "BM25")
    stemmer = require_extra("Stemmer", "evaluation", "BM25").Stemmer("english")
    terms = [stemmer.stemWords([*map(folded, words(text))]) for text in documents]
    k = min(k, len(documents))
    rows, scores = np.full((len(queries), k), -1), np.zeros((len(queries), k))
    if not any(terms):
        return Ranking(scores, rows)
    index = bm25s.BM25(k1=1.2, b=0.75, method="lucene", dtype="float64")
    index.index(terms, show_progress=False)
    for number, query in enumerate(queries):
        every = [*map(folded, words(query))]
        asked = [word for word in every if word not in STOP_WORDS] or every  # "to be or not to be"
        if asked:
            by_row = index.get_scores(stemmer.stemWords(asked))
            best = _best(np.flatnonzero(by_row), by_row[by_row > 0], k)
            rows[number, : len(best)], scores[number, : len(best)] = best, by_row[best]
    return Ranking(scores, rows)


@lru_cache(maxsize=1 << 16)
def folded(word: str) -> str:
    """A word in lower case, without accents, and in one of the forms that Unicode has for it."""
    letters = normalize("NFKD", word.casefold())
    return normalize("NFKC", "".join(letter for letter in letters if not "\u0300" <= letter <= "\u036f"))


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
        `np.ndarray` of shape `(queries, k)`: rows of documents, best first; -1 where fewer than `k` were found.
    """
    return _fused(first, second, (first.scores, second.scores), lambda one, other: _z(one) + weight * _z(other), k)


def fuse_ranks(first: Ranking, second: Ranking, k: int, constant: float = RANK_CONSTANT) -> np.ndarray:
    """
    Fuse two searches by `1 / (constant + rank)` summed over both (reciprocal rank fusion). Documents with equal scores
    share the last of their ranks. Arguments and result as in [`fuse_scores`].
    """
    shares = [
        1 / (constant + np.stack([np.searchsorted(-scores, -scores, side="right") for scores in side.scores]))
        for side in (first, second)
    ]
    return _fused(first, second, shares, np.add, k)


def _z(scores: np.ndarray) -> np.ndarray:
    return (scores - scores.mean()) / (scores.std() or 1.0)


FUSIONS = {"scores": fuse_scores, "ranks": fuse_ranks}


def _fused(
    first: Ranking,
    second: Ranking,
    values: Sequence[np.ndarray],
    fuse: Callable[[np.ndarray, np.ndarray], np.ndarray],
    k: int,
) -> np.ndarray:
    """The documents with the highest fused values. Where a search missed one, its last value stands in."""
    fused = np.full((len(first.rows), k), -1)
    for query, sides in enumerate(zip(first.rows, second.rows, strict=True)):
        union = np.setdiff1d(np.union1d(*sides), -1)
        both = []
        for rows, of_side in zip(sides, values, strict=True):
            both.append(np.full(len(union), of_side[query, -1]))
            both[-1][np.searchsorted(union, rows[rows >= 0])] = of_side[query, rows >= 0]
        best = _best(union, fuse(*both), k)
        fused[query, : len(best)] = best
    return fused


def _best(rows: np.ndarray, values: np.ndarray, k: int) -> np.ndarray:
    """The rows with the highest values. Of equal values, the first rows."""
    return rows[np.argsort(-values, kind="stable")[:k]]
