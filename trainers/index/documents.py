"""The documents of an index: their keys, ids, texts and metadata, in one SQLite file."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .engine import Batch, Where


TABLES = """
CREATE TABLE IF NOT EXISTS documents (key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, text TEXT, metadata TEXT);
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
AT_ONCE = 500  # values in one statement; SQLite allows at least 999


class DocumentStore:
    """
    The documents of an index, and how far it has been built. Both change together, in one transaction.

    Args:
        file (`Path`): The SQLite file; it is made if it does not exist.
        holds_documents (`bool`, *optional*, defaults to `True`): Whether texts and metadata are stored here. `False`:
            the engine stores them, and this file only knows ids and keys.
    """

    def __init__(self, file: Path, holds_documents: bool = True):
        self.file, self.holds_documents = file, holds_documents
        self._connection = sqlite3.connect(file)
        self._connection.executescript(TABLES)

    def close(self) -> None:
        self._connection.close()

    def __len__(self) -> int:
        return self._connection.execute("SELECT count(*) FROM documents").fetchone()[0]

    @property
    def next_key(self) -> int:
        """Key of the next document. Keys of deleted documents are not used again."""
        return int(self.state("next_key") or 0)

    def state(self, name: str) -> str | None:
        """A value that was stored with the documents; `None` if there is none."""
        row = self._connection.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def add(self, batch: Batch, state: Mapping[str, str]) -> None:
        """Store documents and values, all or nothing."""
        texts: Iterable[str | None] = batch.texts if self.holds_documents else [None] * len(batch)
        metadata = (
            json.dumps(row, ensure_ascii=False, default=str) if self.holds_documents else None
            for row in batch.metadata
        )
        with self._transaction() as transaction:
            transaction.executemany(
                "INSERT INTO documents VALUES (?, ?, ?, ?)",
                zip(batch.keys.tolist(), batch.ids, texts, metadata, strict=True),
            )
            self._set({"next_key": str(int(batch.keys[-1]) + 1), **state})

    def set_state(self, **values: str) -> None:
        """Store values, all or nothing."""
        with self._transaction():
            self._set(values)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._connection as transaction:
                yield transaction
        except sqlite3.OperationalError as error:  # as on a full disk
            raise OSError(f"{self.file}: {error}") from error

    def _set(self, values: Mapping[str, str]) -> None:
        self._connection.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", values.items())

    def delete(self, keys: np.ndarray) -> None:
        """Remove documents."""
        with self._transaction() as transaction:
            transaction.executemany("DELETE FROM documents WHERE key = ?", [(key,) for key in keys.tolist()])

    def keys_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Id -> key, of the ids that are stored."""
        return dict(self._select("id, key", "id", ids))

    def documents(self, keys: np.ndarray) -> dict[int, tuple[str, str | None, dict[str, Any]]]:
        """Key -> id, text and metadata; text and metadata are empty if the engine holds them."""
        rows = self._select("key, id, text, metadata", "key", keys.tolist())
        return {key: (id_, text, json.loads(metadata) if metadata else {}) for key, id_, text, metadata in rows}

    def keys_where(self, where: Where) -> np.ndarray:
        """Keys of the documents with certain metadata, sorted."""
        conditions, values = [], []
        for column, wanted in where.items():
            options = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
            conditions.append(f"metadata ->> ? IN ({', '.join('?' * len(options))})")
            values += [f'$."{column}"', *options]
        rows = self._connection.execute(
            f"SELECT key FROM documents WHERE {' AND '.join(conditions)} ORDER BY key", values
        )
        return np.array([key for (key,) in rows], dtype=np.int64)

    def _select(self, columns: str, by: str, values: Sequence[Any]) -> list[Any]:
        rows: list[Any] = []
        for start in range(0, len(values), AT_ONCE):
            some = values[start : start + AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows += self._connection.execute(f"SELECT {columns} FROM documents WHERE {by} IN ({marks})", some)
        return rows
