"""The documents of an index: keys, ids, texts and metadata in one SQLite file, embedded vectors in two more files."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..core.codes import bytes_per_vector
from ..core.durable import sync_folder, writing
from ..evaluation.words import Words
from .durable import append
from .layout import Layout


TABLES = """
CREATE TABLE IF NOT EXISTS documents (key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, text TEXT, metadata TEXT);
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
AT_ONCE = 500  # values in one statement; SQLite allows at least 999
BATCH = 2048  # documents that an engine gets at once
# Values of metadata that documents must have: column -> values of its type, of which it must have one.
Where = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Batch:
    """
    Some documents: numbers that identify them in the vector store, ids that the user gave, texts, metadata, and
    vectors in the layout's first and second code, `(documents, bytes)`, uint8.
    """

    keys: np.ndarray
    ids: Sequence[str]
    texts: Sequence[str]
    metadata: Sequence[dict[str, Any]]
    first: np.ndarray
    second: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Store:
    """
    The documents of an index, and how far it has been built: `documents.sqlite`, and the files `vectors/first` and
    `vectors/second` of bytes, whose row number `key` is the vector of a document. Vector stores build their indexes
    from these, so that no text is ever embedded twice.

    Vectors are written first and count once their documents are in SQLite, together with the progress. Vectors of
    deleted documents keep their room.

    Args:
        folder (`Path`): Folder of the index.
        layout ([`Layout`]): Codes of the vectors.

    Raises:
        OSError: if the database cannot be read or written.

    Attributes:
        words ([`Words`], *optional*): The words of the documents, if they are indexed.
    """

    def __init__(self, folder: Path, layout: Layout):
        self.folder = folder
        coders = {"first": layout.first} | ({} if layout.second is None else {"second": layout.second})
        self.sizes = {name: bytes_per_vector(coder.code, coder.dim) for name, coder in coders.items()}
        # LanceDB reads batches in a thread of its own, for which the caller waits.
        with self._reported():
            self._connection = sqlite3.connect(folder / "documents.sqlite", check_same_thread=False)
            self._connection.executescript(TABLES)
            self.words = Words(self._connection) if Words.are_in(self._connection) else None

    def index_words(self) -> None:
        """Also index the words of all documents, for a search by them. It is made before the first document."""
        with self._reported():
            self.words = Words(self._connection)

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
        """Store documents and values, all or nothing. The keys of the batch continue those before."""
        end, vectors = self.next_key, self.folder / "vectors"
        with writing(f"The index {self.folder}"):
            vectors.mkdir(exist_ok=True)
            for name, size in self.sizes.items():
                append(vectors / name, end * size, getattr(batch, name))
            sync_folder(vectors)
        metadata = [json.dumps(row, ensure_ascii=False, default=str) for row in batch.metadata]
        with self._transaction() as transaction:
            transaction.executemany(
                "INSERT INTO documents VALUES (?, ?, ?, ?)",
                zip(batch.keys.tolist(), batch.ids, batch.texts, metadata, strict=True),
            )
            if self.words is not None:
                self.words.add(zip(batch.keys.tolist(), batch.texts, strict=True))
            values = {"next_key": str(end + len(batch)), **state}
            transaction.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", values.items())

    def set_state(self, **values: str) -> None:
        """Store values, all or nothing."""
        with self._transaction() as transaction:
            transaction.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", values.items())

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._reported(), self._connection as transaction:
            yield transaction

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:  # as on a full disk
            raise OSError(f"{self.folder / 'documents.sqlite'}: {error}") from error

    def delete(self, keys: np.ndarray) -> None:
        """Remove documents."""
        with self._transaction() as transaction:
            if self.words is not None:
                self.words.remove((key, text) for key, (_, text, _) in self.documents(keys).items())
            transaction.executemany("DELETE FROM documents WHERE key = ?", [(key,) for key in keys.tolist()])

    def keys(self, first: int = 0) -> np.ndarray:
        """Keys of the documents from `first` on, in ascending order."""
        rows = self._connection.execute("SELECT key FROM documents WHERE key >= ? ORDER BY key", (first,))
        return np.fromiter((key for (key,) in rows), dtype=np.int64)

    def keys_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Id -> key, of the ids that are stored."""
        return dict(self._select("id, key", "id", ids))

    def keys_where(self, where: Where) -> np.ndarray:
        """Keys of the documents with certain metadata, in ascending order."""
        conditions, values = [], []
        for column, wanted in where.items():
            conditions.append(f"metadata ->> ? IN ({', '.join('?' * len(wanted))})")
            values += [f'$."{column}"', *wanted]
        rows = self._connection.execute(
            f"SELECT key FROM documents WHERE {' AND '.join(conditions)} ORDER BY key", values
        )
        return np.fromiter((key for (key,) in rows), dtype=np.int64)

    def documents(self, keys: np.ndarray) -> dict[int, tuple[str, str, dict[str, Any]]]:
        """Key -> id, text and metadata."""
        rows = self._select("key, id, text, metadata", "key", keys.tolist())
        return {key: (id_, text, json.loads(metadata)) for key, id_, text, metadata in rows}

    def vectors(self, name: str) -> np.ndarray:
        """Bytes `(next_key, bytes)` of the vectors `"first"` or `"second"`, memory-mapped. A key is a row."""
        shape = (self.next_key, self.sizes[name])
        if not shape[0]:  # an empty file cannot be mapped
            return np.empty(shape, dtype=np.uint8)
        return np.memmap(self.folder / "vectors" / name, np.uint8, "r", shape=shape)

    def batches(self, keys: np.ndarray) -> Iterator[Batch]:
        """Stored documents, in the order of the keys."""
        vectors = {name: self.vectors(name) for name in self.sizes}
        for start in range(0, len(keys), BATCH):
            some = keys[start : start + BATCH]
            found = self.documents(some)
            ids, texts, metadata = zip(*(found[key] for key in some.tolist()), strict=True)
            yield Batch(some, ids, texts, metadata, **{name: rows[some] for name, rows in vectors.items()})

    def _select(self, columns: str, by: str, values: Sequence[Any]) -> list[Any]:
        rows: list[Any] = []
        for start in range(0, len(values), AT_ONCE):
            some = values[start : start + AT_ONCE]
            marks = ", ".join("?" * len(some))
            rows += self._connection.execute(f"SELECT {columns} FROM documents WHERE {by} IN ({marks})", some)
        return rows
