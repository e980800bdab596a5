"""An index in LanceDB: a table in a folder, with vectors, texts and metadata."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pyarrow as pa
import torch

from ...core.codes import CODES, FLOAT, stored_bits
from ..engine import Batch, Engine, Where, filled
from ..layout import Layout
from .lancedb_example import FOUND, example
from .lancedb_pending import Pending
from .lancedb_table import TABLE, among, condition, packed_vectors, read_metadata, rows_at, table_rows, table_schema


FILE_BYTES = 16_000_000  # of rows that become one file of the table
AT_ONCE = 1000  # keys in one condition
# A search reads so many clusters, or follows so many candidates of a graph.
PROBES = 32
CANDIDATES = 400


class LanceDBEngine(Engine):
    """
    A table of LanceDB in the folder `lancedb`, with the columns `key`, `id`, `text`, `metadata`, `first` and `second`.

    The kinds are: `flat`, without an index; `ivf`, the index `IVF_FLAT` with clusters of about 8,000 documents; and
    `hnsw`, the index `IVF_HNSW_SQ`: a graph of vectors in 8 bits; twice as many as asked for are scored again in full.
    There is no `hnsw` of bits: LanceDB makes it, but fails when documents are then deleted.

    Building a flat table takes no more memory for more documents: they wait in files until there are 64 MB of them,
    and then become one file of the table. Joining files, which also frees the room of deleted documents, takes LanceDB
    as much memory as the table is large. It happens in tables below 64 MB, and in those with an index to which
    documents are added. An index takes memory, too: `ivf` a sample of 3% of the vectors, `hnsw` the graph. `ivf`
    stores the vectors twice.

    LanceDB rounds a query to the type of the column. Therefore more documents than asked for are found in `float16`,
    and scored again with the query in float32. In front of a shortlist the rounding stays: documents whose scores
    differ by less than 0.0001 may change places at its end.

    One process at a time may write. Others that have the table open see the changes, if they connected with a
    `read_consistency_interval` or call `checkout_latest`: the files of older versions are deleted.
    """

    name = "lancedb"
    module = "lancedb"
    codes = (FLOAT, "float16", "sign", *(name for name in CODES if name.startswith("qama-")))
    second_codes = (FLOAT, "float16", "int8")
    kinds = ("flat", "ivf", "hnsw")
    filters = True
    holds_documents = True

    def __init__(self, folder: Path, layout: Layout):
        super().__init__(folder, layout)
        self._place = folder.resolve() / "lancedb"
        self._metric = "hamming" if layout.binary else "dot"
        self._rescores = layout.shortlist is not None or layout.first.code == "float16"
        self._column = "first" if layout.second is None else "second"  # which scores a shortlist
        self._pending = Pending(self._place / "pending")
        self._last: int | None = None
        with self._writing():
            database = self.library().connect(self._place, read_consistency_interval=timedelta(0))
            self._table: Any = database.create_table(TABLE, schema=table_schema(layout), exist_ok=True)

    @classmethod
    def require(cls, layout: Layout) -> None:
        super().require(layout)
        if layout.binary and layout.kind == "hnsw":
            raise ValueError(f"--kind hnsw: the engine lancedb has flat, ivf for {layout.first.code}.")

    def close(self) -> None:
        self._table = None

    def write(self, batch: Batch) -> None:
        rows = table_rows(batch, self.layout, self._table.schema)
        with self._writing():
            if batch.keys.min() > self._last_key():
                self._pending.append(rows)
            else:
                self._flush()
                self._merge(rows)
            self._last = max(self._last_key(), int(batch.keys.max()))
            if self._pending.nbytes >= FILE_BYTES:
                self._flush()

    def _last_key(self) -> int:
        """The highest key that is stored; -1 if there is none."""
        if self._last is None:
            pending = self._pending.rows()
            self._last = max(_highest(self._table), -1 if pending is None else int(pending["key"].to_numpy().max()))
        return self._last

    def _flush(self) -> None:
        """Put the rows that wait into the table."""
        rows = self._pending.rows()
        if rows is None:
            return
        if int(rows["key"].to_numpy().min()) > _highest(self._table):
            self._table.add(rows)
        else:  # a killed process had put them there
            self._merge(rows)
        self._pending.clear()

    def _merge(self, rows: pa.Table) -> None:
        self._table.merge_insert("key").when_matched_update_all().when_not_matched_insert_all().execute(rows)

    def finish(self) -> None:
        with self._writing():
            self._flush()
            if self._table.list_indices() or self.disk_bytes() <= FILE_BYTES:
                self._optimize()  # an index takes up what is new, and keeps its clusters
            if self.layout.kind != "flat" and not self._table.list_indices() and self._table.count_rows():
                self._table.create_index("first", config=self._index())

    def _optimize(self) -> None:
        """Join small files, and delete what older versions of the table and killed processes left."""
        with catch_warnings():
            simplefilter("ignore", UserWarning)  # that nobody can search an older version any more
            self._table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)

    def _index(self) -> Any:
        indexes = self.library().index
        if self.layout.kind == "ivf":
            return indexes.IvfFlat(distance_type=self._metric)
        return indexes.HnswSq(distance_type=self._metric)

    def delete(self, keys: np.ndarray) -> None:
        with self._writing():
            self._flush()
            for start in range(0, len(keys), AT_ONCE):
                self._table.delete(among(keys[start : start + AT_ONCE]))

    def search(
        self, queries: torch.Tensor, k: int, where: Where | None = None, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        first = self.layout.first
        vectors = first.pack(queries) if self.layout.binary else first.float_queries(queries).numpy()
        floats = (self.layout.second or first).float_queries(queries)
        passing = condition(where, self.layout) if where else None
        found = []
        for vector, query in zip(vectors, floats, strict=True):
            rows = self._nearest(vector, k, passing)
            scores, keys = self._scores(rows, query), rows["key"].to_numpy()
            best = np.argsort(-scores, kind="stable")[:k]
            found.append(filled(scores[best][None], keys[best][None], k))
        return np.concatenate([scores for scores, _ in found]), np.concatenate([keys for _, keys in found])

    def _nearest(self, vector: np.ndarray, k: int, passing: str | None) -> pa.Table:
        """The first stage of one query."""
        search = self._table.search(vector, vector_column_name="first").distance_type(self._metric)
        for method, argument in self._settings(k).items():
            search = getattr(search, method)(argument)
        if passing is not None:
            search = search.where(passing)
        return search.select(["key", "_distance", *([self._column] if self._rescores else [])]).to_arrow()

    def _settings(self, k: int) -> dict[str, int]:
        """Methods of a search, and what they are called with."""
        length = max(k, self.layout.shortlist or 0)
        if self._rescores and self.layout.shortlist is None:
            length = 2 * k + 50
        settings = {"limit": length}
        if self.layout.kind == "ivf":
            settings["nprobes"] = PROBES
        if self.layout.kind == "hnsw":
            settings |= {"ef": max(CANDIDATES, 4 * length), "refine_factor": 2}
        return settings

    def _scores(self, rows: pa.Table, query: torch.Tensor) -> np.ndarray:
        """Scores of what the first stage found."""
        first = self.layout.first
        if self._rescores:
            return ((self.layout.second or first).decode(packed_vectors(rows[self._column])) @ query).numpy()
        distances = rows["_distance"].to_numpy()
        return 1 - (2 * distances / stored_bits(first.code, first.dim) if self.layout.binary else distances)

    def packed(self, keys: np.ndarray) -> np.ndarray:
        rows = self._rows_of(keys, ["key", self._column])
        return packed_vectors(rows[self._column])[rows_at(rows["key"].to_numpy(), keys)]

    def documents(self, keys: np.ndarray) -> dict[int, tuple[str, str | None, dict[str, Any]]]:
        names = ["key", "id", "text", *(["metadata"] if self.layout.columns else [])]
        return {
            row["key"]: (row["id"], row["text"], read_metadata(row.get("metadata", {}), self.layout))
            for row in self._rows_of(keys, names).to_pylist()
        }

    def _rows_of(self, keys: np.ndarray, columns: Sequence[str]) -> pa.Table:
        starts = range(0, max(1, len(keys)), AT_ONCE)
        parts = [self._table.search().where(among(keys[start : start + AT_ONCE])) for start in starts]
        return pa.concat_tables([part.select(list(columns)).to_arrow() for part in parts])

    def disk_bytes(self) -> int:
        """Bytes of the table, with texts and metadata: the same files hold them."""
        return sum(path.stat().st_size for path in self._place.rglob("*") if path.is_file())

    def example(self) -> str:
        rescored = self._column if self._rescores else None
        return example(self._place, self.layout, self._metric, self._settings(FOUND), rescored)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # LanceDB's are of RuntimeError, also for a full disk
            reason = str(error).splitlines()[0].partition(", /")[0]  # without a place in the source
            raise OSError(f"{self._place} cannot be written: {reason}") from error


def _highest(table: Any) -> int:
    """The highest key in a table; -1 if it is empty."""
    batches = table.search().select(["key"]).to_batches()
    return max((int(batch["key"].to_numpy().max()) for batch in batches if len(batch)), default=-1)
