"""The documents of an index in faiss: keys, ids, texts and metadata in one SQLite file, vectors in two more files."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...encode.precisions import bytes_per_vector
from ...utils.durable import writing
from ..corpus import Metadata
from ..engine import Batch, Committed, Layout, Where


TABLE = "CREATE TABLE IF NOT EXISTS documents (key INTEGER PRIMARY KEY, id TEXT NOT NULL, text, metadata)"
# A change stores a document beside the one of the same id that it replaces, which older tables do not allow.
REPLACE_TABLE = (
    "ALTER TABLE documents RENAME TO older",
    TABLE,
    "INSERT INTO documents SELECT * FROM older",
    "DROP TABLE older",
)
INDEX = "CREATE INDEX IF NOT EXISTS ids ON documents (id)"
AT_ONCE = 500  # values in one statement; SQLite allows at least 999


class Store:
    """
    The documents of an index: `documents.sqlite`, and the files `vectors/first` and `vectors/second` of bytes, whose
    row number `key` is the vector of a document. Vectors of deleted documents keep their room. OSError if the database
    cannot be read or written.
    """

    def __init__(self, folder: Path, layout: Layout):
        self.folder = folder
        self.sizes = {name: bytes_per_vector(coder.code, coder.dim) for name, coder in layout.coders.items()}
        self._connection = sqlite3.connect(folder / "documents.sqlite", check_same_thread=False)
        with self._transaction() as transaction:
            transaction.execute(TABLE)

    def close(self) -> None:
        self._connection.close()

    def add(self, batch: Batch) -> None:
        """Store documents. Vectors at and after the first key, which a killed process left, are overwritten."""
        vectors = self.folder / "vectors"
        with writing(f"The index {self.folder}"):
            vectors.mkdir(exist_ok=True)
            for name, size in self.sizes.items():
                with (vectors / name).open("ab") as opened:
                    opened.truncate(int(batch.keys[0]) * size)
                    opened.write(np.ascontiguousarray(batch.vectors[name]).data)
                    opened.flush()
                    os.fsync(opened.fileno())
        rows = ((row.id, row.text, json.dumps(row.metadata, ensure_ascii=False)) for row in batch.documents)
        with self._transaction() as transaction:
            transaction.execute("BEGIN")
            (table,) = transaction.execute("SELECT sql FROM sqlite_master WHERE name = 'documents'").fetchone()
            for statement in (*(REPLACE_TABLE if "UNIQUE" in table else ()), INDEX):
                transaction.execute(statement)
            transaction.executemany(
                "INSERT INTO documents VALUES (?, ?, ?, ?)",
                ((key, *row) for key, row in zip(batch.keys.tolist(), rows, strict=True)),
            )

    def truncate(self, first: int) -> None:
        """Remove the documents with this key and higher ones."""
        with self._transaction() as transaction:
            transaction.execute("DELETE FROM documents WHERE key >= ?", (first,))

    def delete(self, keys: Sequence[int]) -> None:
        """Remove documents."""
        with self._transaction() as transaction:
            transaction.executemany("DELETE FROM documents WHERE key = ?", [(key,) for key in keys])

    def keys(self, first: int = 0) -> np.ndarray:
        """Keys of the documents from `first` on, in ascending order."""
        rows = self._connection.execute("SELECT key FROM documents WHERE key >= ? ORDER BY key", (first,))
        return np.fromiter((key for (key,) in rows), dtype=np.int64)

    def keys_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Id -> key, of the ids that are stored."""
        return dict(self._select("id, key", "id", ids))

    def keys_where(self, where: Where, committed: Committed | None = None) -> np.ndarray:
        """Keys of the documents with certain metadata that belong to the index, in ascending order."""
        conditions: list[str] = ["key < ?"]
        values: list[object] = [committed.end if committed else 2**63 - 1]
        for column, accepted in where.items():
            marks = ", ".join("?" * len(accepted))  # not metadata ->> '$."name"': such a path has no quotes in names
            conditions.append(f"EXISTS (SELECT 1 FROM json_each(metadata) WHERE key = ? AND value IN ({marks}))")
            values += [column, *accepted]
        rows = self._connection.execute(
            f"SELECT key FROM documents WHERE {' AND '.join(conditions)} ORDER BY key", values
        )
        keys = np.fromiter((key for (key,) in rows), dtype=np.int64)
        return keys if committed is None else np.setdiff1d(keys, committed.removed)

    def documents(self, keys: np.ndarray) -> dict[int, tuple[str, str, Metadata]]:
        """Key -> id, text and metadata."""
        rows = self._select("key, id, text, metadata", "key", keys.tolist())
        return {key: (id_, text, json.loads(metadata)) for key, id_, text, metadata in rows}

    def vectors(self, name: str) -> np.ndarray:
        """Bytes `(keys, bytes)` of the vectors `"first"` or `"second"`, memory-mapped. A key is a row."""
        file, size = self.folder / "vectors" / name, self.sizes[name]
        return np.memmap(file, np.uint8, "r", shape=(file.stat().st_size // size, size))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing."""
        try:
            with self._connection as transaction:
                yield transaction
        except sqlite3.DatabaseError as error:  # as on a full disk
            raise OSError(f"{self.folder / 'documents.sqlite'}: {error}") from error

    def _select(self, columns: str, by: str, values: Sequence[int | str]) -> list[Any]:
        rows: list[Any] = []
        for start in range(0, len(values), AT_ONCE):
            some = values[start : start + AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows += self._connection.execute(f"SELECT {columns} FROM documents WHERE {by} IN ({marks})", some)
        return rows
