"""sqlite-vec: vectors in a table of an SQLite file, searched with SQL."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.codes import CODES, FLOAT, bytes_per_vector, stored_bits
from ...evaluation.coding import Coder
from ..engine import Batch, Engine, Where, filled
from ..layout import Layout, as_numbers, is_binary
from .lines import bits_lines, import_lines, score_lines, step, unit_line, without_repeats


MOST = 4096  # documents that sqlite-vec finds for a query
CANNOT_LOAD = (
    "The engine sqlite-vec loads an extension into SQLite, which the module sqlite3 of this Python cannot: "
    "pip install pysqlite3-binary (Linux), or use a Python that can, such as that of uv, conda or Homebrew."
)


class SqliteVecEngine(Engine):
    """
    An index in the table `vectors` of the file `vectors.sqlite`: columns `key`, `first` and, if there are second
    vectors, `second`. Everything that is written is a transaction.

    A search compares the query with every document, block by block, so that memory stays the same for any number of
    documents; so it does while building. The query of `int8` is rounded as the documents are, and compared with them
    by Euclidean distance. The score is the cosine that vectors of length 1 at this distance have: about that of the
    float vectors.

    Space of deleted documents is used again once all of the 1,024 documents that were written together are deleted.
    """

    name = "sqlite-vec"
    module = "sqlite_vec"
    codes = tuple(code for code in CODES if code not in ("float16", "int4"))
    second_codes = (FLOAT, "int8")
    kinds = ("flat",)
    filters = True
    holds_documents = False
    one_range = True

    def __init__(self, folder: Path, layout: Layout):
        super().__init__(folder, layout)
        self._file = folder / "vectors.sqlite"
        self._sqlite = loading_sqlite()
        self._connection = self._sqlite.connect(str(self._file))
        self._connection.enable_load_extension(True)
        self.library().load(self._connection)
        self._connection.enable_load_extension(False)
        self._columns = {"first": layout.first} | ({} if layout.second is None else {"second": layout.second})
        types = ", ".join(f"{name} {_type(coder)}" for name, coder in self._columns.items())
        with self._transaction() as transaction:
            transaction.execute(
                f"CREATE VIRTUAL TABLE IF NOT EXISTS vectors USING vec0(key INTEGER PRIMARY KEY, {types})"
            )

    @classmethod
    def require(cls, layout: Layout) -> None:
        super().require(layout)
        loading_sqlite()
        if (layout.shortlist or 0) > MOST:
            raise ValueError(
                f"The engine {cls.name} finds at most {MOST:,} documents; a shortlist of {layout.shortlist:,} is too "
                "long."
            )

    def write(self, batch: Batch) -> None:
        keys = batch.keys.tolist()
        stored = [_numbers(coder, getattr(batch, name)) for name, coder in self._columns.items()]
        values = ", ".join(_value(coder) for coder in self._columns.values())
        with self._transaction() as transaction:
            transaction.executemany("DELETE FROM vectors WHERE key = ?", ((key,) for key in keys))
            transaction.executemany(
                f"INSERT INTO vectors (key, {', '.join(self._columns)}) VALUES (?, {values})",
                ((key, *(rows[row].tobytes() for rows in stored)) for row, key in enumerate(keys)),
            )

    def finish(self) -> None:
        """Nothing: what was written is searchable."""

    def delete(self, keys: np.ndarray) -> None:
        with self._transaction() as transaction:
            transaction.executemany("DELETE FROM vectors WHERE key = ?", ((key,) for key in keys.tolist()))

    def search(
        self, queries: torch.Tensor, k: int, where: Where | None = None, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        count = max(k, self.layout.shortlist or 0)
        if count > MOST:
            raise ValueError(f"The engine {self.name} finds at most {MOST:,} documents, not {count:,}.")
        coder = self.layout.first
        sql = f"SELECT key, {_score(coder)} FROM vectors WHERE first MATCH {_value(coder)} AND k = ?"
        values: list[Any] = [count]
        if allowed is not None:
            sql += " AND key IN (SELECT value FROM json_each(?))"
            values.append(json.dumps(allowed.tolist()))
        scores = np.full((len(queries), count), -np.inf, dtype=np.float32)
        keys = np.full((len(queries), count), -1, dtype=np.int64)
        for row, query in enumerate(self._coded(queries)):
            found = self._connection.execute(f"{sql} ORDER BY distance", [query.tobytes(), *values]).fetchall()
            if found:
                keys[row, : len(found)], scores[row, : len(found)] = zip(*found, strict=True)
        if self.layout.shortlist is not None:
            scores, keys = self.scored_again(queries, keys, k)
        return filled(scores, keys, k)

    def packed(self, keys: np.ndarray) -> np.ndarray:
        name, coder = list(self._columns.items())[-1]
        one = f"SELECT {name} FROM vectors WHERE key = ?"  # with IN, sqlite-vec would read all vectors
        stored = b"".join(self._connection.execute(one, [key]).fetchone()[0] for key in keys.tolist())
        rows = np.frombuffer(bytearray(stored), dtype=np.uint8).reshape(
            len(keys), bytes_per_vector(coder.code, coder.dim)
        )
        return rows + np.uint8(128) if coder.code == "int8" else rows  # 0 to 255, which wraps around

    def disk_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.folder.glob("vectors.sqlite*"))

    def example(self) -> str:
        coder, (name, last) = self.layout.first, list(self._columns.items())[-1]
        others = ["import numpy as np", "import sqlite_vec"]
        if self._sqlite is sqlite3:
            imports = import_lines(["import sqlite3"], others, coder)
        else:
            imports = import_lines([], [*others, "import pysqlite3 as sqlite3"], coder)
        store = str(self.folder.resolve() / "documents.sqlite")
        lines = [
            f"db = sqlite3.connect({str(self._file.resolve())!r})",
            "db.enable_load_extension(True)",
            "sqlite_vec.load(db)",
            f"db.execute('ATTACH ? AS store', [{store!r}])",
        ]
        asked = "bits" if self.layout.binary else "unit"
        lines += bits_lines(coder) if self.layout.binary else [unit_line(coder)]
        if coder.code == "int8":
            asked = "rounded"
            lines.append(f"rounded = np.clip(np.floor(unit / {step(coder):.9g} - 0.5), -128, 127).astype(np.int8)")
        if self.layout.shortlist is None:
            sql = _statement(coder, 10, "distance", f"{_score(coder)} AS score", "ORDER BY distance")
            return "\n".join([*imports, *lines, f'found = db.execute("""{sql}""", [{asked}]).fetchall()'])
        count = max(10, self.layout.shortlist)
        if last.code == FLOAT:
            score = f"1 - vec_distance_cosine({name}, ?) AS score"
            sql = _statement(coder, count, name, score, "ORDER BY score DESC LIMIT 10")
            lines.append(unit_line(last, "floats"))
            return "\n".join([*imports, *lines, f'found = db.execute("""{sql}""", [{asked}, floats]).fetchall()'])
        sql, kind = _statement(coder, count, name, name), "int8" if last.code == "int8" else "uint8"
        lines += [
            f'rows = db.execute("""{sql}""", [{asked}]).fetchall()',
            f"stored = np.array([np.frombuffer(row[1], np.{kind}) for row in rows])",
            *score_lines(last),
            "found = [(rows[place][0], float(scores[place])) for place in np.argsort(-scores)[:10]]",
        ]
        return "\n".join(imports + without_repeats(lines))

    def close(self) -> None:
        self._connection.close()

    def _coded(self, queries: torch.Tensor) -> np.ndarray:
        """Queries as sqlite-vec compares them with the first vectors."""
        coder = self.layout.first
        return coder.float_queries(queries).numpy() if coder.code == FLOAT else _numbers(coder, coder.pack(queries))

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        try:
            with self._connection as transaction:
                yield transaction
        except self._sqlite.OperationalError as error:  # as on a full disk
            raise OSError(f"{self._file} cannot be written: {error}") from error


def loading_sqlite() -> Any:
    """
    A module like `sqlite3` that can load extensions: many builds of Python cannot.

    Raises:
        ValueError: if there is none. The message says what to install.
    """
    if hasattr(sqlite3.Connection, "enable_load_extension"):
        return sqlite3
    try:
        return import_module("pysqlite3")
    except ImportError as error:
        raise ValueError(CANNOT_LOAD) from error


def _statement(coder: Coder, count: int, column: str, result: str, rest: str = "") -> str:
    """SQL that joins the nearest documents with their ids."""
    near = f"SELECT key, {column} FROM vectors WHERE first MATCH {_value(coder)} AND k = {count}"
    lines = [f"WITH near AS MATERIALIZED ({near})", f"SELECT id, {result} FROM near JOIN documents USING (key)", rest]
    return "".join(f"\n    {line}" for line in lines if line) + "\n"


def _type(coder: Coder) -> str:
    """Type of a column. The distance gives the score by [`_score`]."""
    if is_binary(coder.code):
        return f"bit[{8 * bytes_per_vector(coder.code, coder.dim)}]"
    return (
        f"int8[{coder.dim}] distance_metric=L2"
        if coder.code == "int8"
        else f"float[{coder.dim}] distance_metric=cosine"
    )


def _value(coder: Coder) -> str:
    """A parameter of SQL that is a vector of the column's type."""
    return "vec_bit(?)" if is_binary(coder.code) else "vec_int8(?)" if coder.code == "int8" else "?"


def _score(coder: Coder) -> str:
    """SQL of the score. Of a zero vector, the distance is NULL."""
    if is_binary(coder.code):
        return f"1 - 2.0 * distance / {stored_bits(coder.code, coder.dim)}"
    return (
        f"1 - {step(coder) ** 2 / 2:.9g} * distance * distance" if coder.code == "int8" else "1 - ifnull(distance, 1)"
    )


def _numbers(coder: Coder, packed: np.ndarray) -> np.ndarray:
    return packed if is_binary(coder.code) else as_numbers(coder, packed)
