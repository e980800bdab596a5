"""BM25 over the words of texts, by the full-text search of SQLite."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable


# Frequent words of English (those of Lucene): a query searches all others.
STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)


class Words:
    """
    Texts by the words in them, in a table of an SQLite database, which holds no texts. Words are compared in lower
    case and without accents and English endings (Porter's stemmer).

    Args:
        connection (`sqlite3.Connection`, *optional*): The database. Default: one in memory.

    Raises:
        ValueError: if this SQLite has no full-text search.
    """

    def __init__(self, connection: sqlite3.Connection | None = None) -> None:
        self.connection = connection or sqlite3.connect(":memory:")
        try:
            self.connection.execute(
                "CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5(text, content='', tokenize='porter unicode61')"
            )
        except sqlite3.OperationalError as error:
            raise ValueError(f"BM25 needs an SQLite with full-text search (FTS5): {error}.") from error

    @staticmethod
    def are_in(connection: sqlite3.Connection) -> bool:
        """Whether a database has the table."""
        return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'words'").fetchone())

    def add(self, texts: Iterable[tuple[int, str]]) -> None:
        """Add texts by their keys, which must be new."""
        self.connection.executemany("INSERT INTO words(rowid, text) VALUES (?, ?)", texts)

    def remove(self, texts: Iterable[tuple[int, str]]) -> None:
        """Remove texts, which must be those that were added by these keys."""
        self.connection.executemany("INSERT INTO words(words, rowid, text) VALUES ('delete', ?, ?)", texts)

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """
        The best texts that share a word with the query: key and BM25 score (k1 1.2, b 0.75), best first. A word that
        the query repeats counts as often. Of equal scores, smaller keys come first.
        """
        words = [word for word in re.findall(r"\w+", query.lower()) if word not in STOP_WORDS]
        if not words:
            return []
        any_of = " OR ".join(f'"{word}"' for word in words)
        return self.connection.execute(
            "SELECT rowid, -rank FROM words WHERE words MATCH ? ORDER BY rank, rowid LIMIT ?", (any_of, k)
        ).fetchall()
