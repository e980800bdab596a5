"""
Hybrid search: BM25 over words beside a search by embeddings, fused by scores or by ranks.

Each of both searches gives its best documents. A document that only one of them found has, in the other, the lowest
score or the last rank that the other gave.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


CANDIDATES = 1000  # documents per query that each search gives
BM25_WEIGHT = 0.5  # a round value; benchmarks/static_peers.py compares others
RANK_CONSTANT = 60
# Frequent words of English (those of Lucene): a query searches all others.
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)


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
    Search documents by BM25 (k1 1.2, b 0.75) over their words, with the full-text search of SQLite. Words are compared
    in lower case and without accents and English endings (Porter's stemmer). A word that the query repeats counts as
    often.

    Args:
        queries (`Sequence[str]`): Queries.
        documents (`Sequence[str]`): Documents.
        k (`int`, *optional*, defaults to 1000): Number of documents to find per query; all if there are fewer. Those
            without a word of the query have the score 0.

    Returns:
        [`Ranking`]
    """
    database, k = sqlite3.connect(":memory:"), min(k, len(documents))
    database.execute("CREATE VIRTUAL TABLE words USING fts5(text, content='', tokenize='porter unicode61')")
    database.executemany("INSERT INTO words(rowid, text) VALUES (?, ?)", enumerate(documents))
    rows, scores = np.empty((len(queries), k), np.int64), np.zeros((len(queries), k))
    for number, query in enumerate(queries):
        words = [word for word in re.findall(r"\w+", query.lower()) if word not in STOP_WORDS]
        any_of = " OR ".join(f'"{word}"' for word in words) or '""'
        found = database.execute(
            "SELECT rowid, -rank FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?", (any_of, k)
        ).fetchall()
        keys = [key for key, _ in found]
        others = np.setdiff1d(np.arange(k), keys)  # the first ones that were not found are among the first k
        rows[number] = [*keys, *others[: k - len(keys)]]
        scores[number, : len(keys)] = [score for _, score in found]
    database.close()
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

    def standardised(scores: np.ndarray) -> np.ndarray:
        return (scores - scores.mean()) / (scores.std() or 1.0)

    found = []
    for query in range(len(first.rows)):
        rows = np.union1d(first.rows[query], second.rows[query])
        one, other = (_values(rows, side.rows[query], side.scores[query]) for side in (first, second))
        found.append(_best(rows, standardised(one) + weight * standardised(other), k))
    return _stacked(found)


def fuse_ranks(first: Ranking, second: Ranking, k: int, constant: float = RANK_CONSTANT) -> np.ndarray:
    """
    Fuse two searches by `1 / (constant + rank)` summed over both (reciprocal rank fusion). Arguments and result are
    those of [`fuse_scores`].
    """
    found = []
    for query in range(len(first.rows)):
        rows, sides = np.union1d(first.rows[query], second.rows[query]), (first.rows[query], second.rows[query])
        one, other = (_values(rows, side, 1 / (constant + 1 + np.arange(len(side)))) for side in sides)
        found.append(_best(rows, one + other, k))
    return _stacked(found)


FUSIONS = {"scores": fuse_scores, "ranks": fuse_ranks}


def _values(rows: np.ndarray, found: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values of sorted rows in a search of one query; rows that it did not find have the last value."""
    everywhere = np.full(len(rows), values[-1])
    everywhere[np.searchsorted(rows, found)] = values
    return everywhere


def _best(rows: np.ndarray, values: np.ndarray, k: int) -> np.ndarray:
    """The rows with the highest values. Of equal values, the first rows."""
    return rows[np.argsort(-values, kind="stable")[:k]]


def _stacked(found: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack([rows[: min(map(len, found))] for rows in found])
