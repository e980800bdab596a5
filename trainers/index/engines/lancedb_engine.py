"""An index in LanceDB: a table in a folder, with vectors, texts and metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pyarrow as pa
import torch

from ...core.codes import CODES, FLOAT, bytes_per_vector, stored_bits
from ...evaluation.coding import Coder
from ..engine import Engine, filled
from ..layout import Layout
from ..store import Batch, Store, Where
from .lines import FOUND, bits_lines, cosine_of_bits, score_lines, unit_line


TABLE = "documents"
# Type of a metadata column -> type in the table. LanceDB has no type for JSON.
TYPES = {
    "text": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "json": pa.string(),
}
AT_ONCE = 1000  # keys in one condition
# A search reads so many clusters, or follows so many candidates of a graph.
PROBES = 32
CANDIDATES = 400


class LanceDBEngine(Engine):
    """
    A table of LanceDB in the folder `lancedb`, with the columns `key`, `id`, `text`, `metadata`, `first` and `second`.

    The kinds are: `flat`, without an index; `ivf`, the index `IVF_FLAT` with clusters of about 8,000 documents; and
    `hnsw`, the index `IVF_HNSW_SQ`: a graph of vectors in 8 bits; twice as many as asked for are rescored in full.
    There is no `hnsw` of bits: LanceDB makes it, but fails when documents are then deleted.

    LanceDB rounds a query to the type of the column. Therefore more documents than asked for are found in `float16`,
    and rescored with the query in float32. In front of a shortlist the rounding stays: documents whose scores
    differ by less than 0.0001 may change places at its end.

    One process at a time may write. Others that have the table open see the changes, if they connected with a
    `read_consistency_interval` or call `checkout_latest`: the files of older versions are deleted.
    """

    name = "lancedb"
    module = "lancedb"
    codes = (FLOAT, "float16", "binary", *(name for name in CODES if name.startswith("qama-")))
    second_codes = (FLOAT, "int8")
    kinds = ("flat", "ivf", "hnsw")

    def __init__(self, folder: Path, layout: Layout, store: Store):
        super().__init__(folder, layout, store)
        self._place = folder.resolve() / "lancedb"
        self._metric = "hamming" if layout.first.symmetric else "dot"
        with self._writing():
            database = self.library().connect(self._place, read_consistency_interval=timedelta(0))
            self._table: Any = database.create_table(TABLE, schema=table_schema(layout), exist_ok=True)

    @classmethod
    def require(cls, layout: Layout) -> None:
        super().require(layout)
        if layout.first.symmetric and layout.kind == "hnsw":
            raise ValueError(f"--index_type hnsw: the vector store lancedb has flat, ivf for {layout.first.code}.")

    def close(self) -> None:
        self._table = None

    @property
    def rescorer(self) -> tuple[str, Coder] | None:
        first = self.layout.first
        return ("first", first) if first.code == "float16" and self.layout.shortlist is None else super().rescorer

    def add(self, keys: np.ndarray) -> None:
        schema = self._table.schema
        rows = (table_rows(batch, self.layout, schema) for batch in self.store.batches(keys))
        with self._writing():
            self._table.delete(f"key >= {keys[0]}")  # what a killed process had put there
            self._table.add(pa.RecordBatchReader.from_batches(schema, rows))
            if self.layout.kind != "flat" and not self._table.list_indices():
                kinds = self.library().index
                kind = kinds.IvfFlat if self.layout.kind == "ivf" else kinds.HnswSq
                self._table.create_index("first", config=kind(distance_type=self._metric))
            self._tidy()

    def delete(self, keys: np.ndarray) -> None:
        with self._writing():
            for start in range(0, len(keys), AT_ONCE):
                self._table.delete(f"key IN ({', '.join(map(str, keys[start : start + AT_ONCE]))})")
            self._tidy()

    def _tidy(self) -> None:
        """Let the index take up new rows, join small files, and delete those of older versions."""
        with catch_warnings():
            simplefilter("ignore", UserWarning)  # that nobody can search an older version any more
            self._table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)

    def search(self, queries: torch.Tensor, k: int, where: Where | None = None) -> tuple[np.ndarray, np.ndarray]:
        first, settings = self.layout.first, self._settings(k)
        vectors = first.pack(queries) if first.symmetric else first.float_queries(queries).numpy()
        passing = condition(where) if where else None
        found = [self._nearest(vector, settings, passing) for vector in vectors]
        scores, keys = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if self.rescorer is not None:
            return self.scored_again(queries, keys, k, self.rescorer)
        return filled(scores, keys, k)

    def _nearest(
        self, vector: np.ndarray, settings: dict[str, int], passing: str | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The first stage of one query."""
        search = self._table.search(vector, vector_column_name="first").distance_type(self._metric)
        for method, argument in settings.items():
            search = getattr(search, method)(argument)
        if passing is not None:
            search = search.where(passing)
        rows, first = search.select(["key", "_distance"]).to_arrow(), self.layout.first
        distances = rows["_distance"].to_numpy()[None]
        scores = 1 - (2 * distances / stored_bits(first.code, first.dim) if first.symmetric else distances)
        return filled(scores, rows["key"].to_numpy()[None], settings["limit"])

    def _settings(self, k: int) -> dict[str, int]:
        """Methods of a search, and what they are called with."""
        length = max(k, self.layout.shortlist or 0)
        if self.rescorer is not None and self.layout.shortlist is None:
            length = 2 * k + 50
        settings = {"limit": length}
        if self.layout.kind == "ivf":
            settings["nprobes"] = PROBES
        if self.layout.kind == "hnsw":
            settings |= {"ef": max(CANDIDATES, 4 * length), "refine_factor": 2}
        return settings

    def example(self) -> list[str]:
        coder, symmetric = self.layout.first, self.layout.first.symmetric
        calls = "".join(f".{method}({argument})" for method, argument in self._settings(FOUND).items())
        lines = [
            f"table = lancedb.connect({str(self._place)!r}).open_table({TABLE!r})",
            *(bits_lines(coder) if symmetric else [unit_line(coder)]),
            f'search = table.search({"bits" if symmetric else "unit"}, vector_column_name="first")',
            f'search = search.distance_type("{self._metric}"){calls}',
        ]
        if self.rescorer is None:
            score = cosine_of_bits(coder, "distances") if symmetric else "1 - distances"
            return [
                *lines,
                'hits = search.select(["id", "_distance"]).to_arrow()',
                'distances = hits["_distance"].to_numpy()',
                f'found = list(zip(hits["id"].to_pylist(), ({score}).tolist()))',
            ]
        column, coder = self.rescorer
        return [
            *lines,
            f'hits = search.select(["id", "{column}", "_distance"]).to_arrow()',
            f'stored = np.stack(hits["{column}"].to_numpy())',
            *score_lines(coder, self.folder.resolve()),
            f"best = scores.argsort()[::-1][:{FOUND}]",
            'found = list(zip(hits["id"].take(best).to_pylist(), scores[best].tolist()))',
        ]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # LanceDB's are of RuntimeError, also for a full disk
            reason = str(error).splitlines()[0].partition(", /")[0]  # without a place in the source
            raise OSError(f"{self._place} cannot be written: {reason}") from error


def table_schema(layout: Layout) -> pa.Schema:
    """Columns of the table."""
    fields = [("key", pa.int64()), ("id", pa.string()), ("text", pa.string())]
    if layout.columns:
        fields.append(("metadata", pa.struct([(name, TYPES[kind]) for name, kind in layout.columns.items()])))
    for name, coder in (("first", layout.first), ("second", layout.second)):
        if coder is not None:
            none = np.empty((0, bytes_per_vector(coder.code, coder.dim)), dtype=np.uint8)
            fields.append((name, _vectors(coder, none).type))
    return pa.schema(fields)


def table_rows(batch: Batch, layout: Layout, schema: pa.Schema) -> pa.RecordBatch:
    """Documents as rows."""
    columns: dict[str, Any] = {"key": batch.keys, "id": batch.ids, "text": batch.texts}
    columns["first"] = _vectors(layout.first, batch.first)
    if layout.second is not None:
        assert batch.second is not None
        columns["second"] = _vectors(layout.second, batch.second)
    if layout.columns:
        rows = [{name: _stored(row[name], kind) for name, kind in layout.columns.items()} for row in batch.metadata]
        columns["metadata"] = pa.array(rows, type=schema.field("metadata").type)
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def condition(where: Where) -> str:
    """The condition that documents have certain metadata."""
    parts = []
    for column, values in where.items():
        name, literals = column.replace("`", "``"), ", ".join(map(_literal, values))
        parts.append(f"metadata.`{name}` IN ({literals})")
    return " AND ".join(parts)


def _vectors(coder: Coder, packed: np.ndarray) -> pa.FixedSizeListArray:
    numbers = packed.view(coder.code) if coder.code in (FLOAT, "float16") else packed
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(numbers).reshape(-1)), numbers.shape[1])


def _stored(value: Any, kind: str) -> Any:
    if value is None or kind != "json":
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return repr(value).lower()  # of True, too
