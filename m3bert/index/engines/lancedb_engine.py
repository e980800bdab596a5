"""An index in LanceDB: a table in a folder, with vectors, texts and metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pyarrow as pa
import torch

from ...encode.coding import Coder
from ...encode.precisions import FLOAT, PRECISIONS, bytes_per_vector, stored_bits
from ...utils.durable import writing
from ..corpus import Metadata
from ..engine import Batch, Committed, Engine, Hit, Layout, Where, rescored


TABLE = "documents"
# Type of a metadata column -> type in the table. All others are text with JSON.
TYPES = {"integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_(), "text": pa.string()}
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
    codes = (FLOAT, "float16", "binary", *(name for name in PRECISIONS if name.startswith("qama-")))
    second_codes = (FLOAT, "int8")
    kinds = ("flat", "ivf", "hnsw")
    files = ("lancedb",)

    def __init__(self, folder: Path, layout: Layout):
        super().__init__(folder, layout)
        self._place = folder.resolve() / "lancedb"
        self._metric = "hamming" if layout.first.symmetric else "dot"
        self._rounds = layout.first.code == "float16" and layout.shortlist is None
        self._rescorer = "first" if self._rounds else layout.rescorer
        self._schema = table_schema(layout)
        with writing(str(self._place)):
            self._database = self.library().connect(self._place, read_consistency_interval=timedelta(0))
            self._table: Any = self._database.create_table(TABLE, schema=self._schema, exist_ok=True)

    @classmethod
    def require(cls, layout: Layout) -> None:
        super().require(layout)
        if layout.first.symmetric and layout.kind == "hnsw":
            raise ValueError(
                f"The vector store lancedb has no index type hnsw for {layout.first.code}; it has flat, ivf."
            )

    def close(self) -> None:
        self._table = None

    def count(self, committed: Committed | None = None) -> int:
        return self._table.count_rows(passing(None, committed))

    def truncate(self, first: int) -> None:
        with writing(str(self._place)):
            if first == 0:
                self._table = self._database.create_table(TABLE, schema=self._schema, mode="overwrite")
            else:
                self._table.delete(f"key >= {first}")

    def add(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            rows = pa.Table.from_batches([self._rows(batch)])
            with writing(str(self._place)):
                self._table.add(rows)
        with writing(str(self._place)):
            if self.layout.kind != "flat" and not self._table.list_indices():
                kinds = self.library().index
                kind = kinds.IvfFlat if self.layout.kind == "ivf" else kinds.HnswSq
                self._table.create_index("first", config=kind(distance_type=self._metric))
            self._tidy()

    def delete(self, keys: Sequence[int]) -> None:
        with writing(str(self._place)):
            self._table.delete(condition({"key": keys}))
            self._tidy()

    def keys_of(self, ids: Sequence[str]) -> dict[str, int]:
        rows = self._table.search().where(condition({"id": ids})).select(["id", "key"]).to_arrow()
        return dict(zip(rows["id"].to_pylist(), rows["key"].to_pylist(), strict=True))

    def search(
        self, queries: torch.Tensor, k: int, where: Where | None = None, committed: Committed | None = None
    ) -> list[list[Hit]]:
        first, allowed = self.layout.first, passing(where, committed)
        vectors = first.pack(queries) if first.symmetric else first.float_queries(queries).numpy()
        return [self._nearest(query, vector, k, allowed) for query, vector in zip(queries, vectors, strict=True)]

    def _nearest(self, query: torch.Tensor, vector: np.ndarray, k: int, allowed: str | None) -> list[Hit]:
        layout, first = self.layout, self.layout.first
        length = 2 * k + 50 if self._rounds else max(k, layout.shortlist or 0)
        search = self._table.search(vector, vector_column_name="first").distance_type(self._metric).limit(length)
        if layout.kind == "ivf":
            search = search.nprobes(PROBES)
        if layout.kind == "hnsw":
            search = search.ef(max(CANDIDATES, 4 * length)).refine_factor(2)
        if allowed:
            search = search.where(allowed)
        names = [name for name in self._schema.names if name not in layout.coders or name == self._rescorer]
        rows = search.select([*names, "_distance"]).to_arrow()
        distances = rows["_distance"].to_numpy()
        scores = 1 - (2 * distances / stored_bits(first.code, first.dim) if first.symmetric else distances)
        if self._rescorer is not None and len(rows):
            stored = np.stack(rows[self._rescorer].to_numpy()).view(np.uint8)
            scores = rescored(layout.coders[self._rescorer], query, stored)
        best = np.argsort(-scores, kind="stable")[:k]
        documents = rows.select(["id", "text", *(["metadata"] if layout.columns else [])]).take(best).to_pylist()
        return [
            Hit(row["id"], score, row["text"], self._metadata(row.get("metadata", {})))
            for score, row in zip(scores[best].tolist(), documents, strict=True)
        ]

    def _metadata(self, row: Metadata) -> Metadata:
        kinds = self.layout.columns
        return {
            name: value if value is None or kinds[name] in TYPES else json.loads(value) for name, value in row.items()
        }

    def _tidy(self) -> None:
        """Let the index take up new rows, join small files, and delete older versions."""
        with catch_warnings():
            simplefilter("ignore", UserWarning)  # that nobody can search an older version any more
            self._table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)

    def _rows(self, batch: Batch) -> pa.RecordBatch:
        """Documents as rows."""
        columns: dict[str, object] = {
            "key": batch.keys,
            "id": [document.id for document in batch.documents],
            "text": [document.text for document in batch.documents],
            "metadata": [
                {name: _stored(document.metadata[name], kind) for name, kind in self.layout.columns.items()}
                for document in batch.documents
            ],
        }
        for name, coder in self.layout.coders.items():
            columns[name] = _vectors(coder, batch.vectors[name])
        arrays = [pa.array(columns[field.name], type=field.type) for field in self._schema]
        return pa.record_batch(arrays, schema=self._schema)


def table_schema(layout: Layout) -> pa.Schema:
    """Columns of the table."""
    fields = [("key", pa.int64()), ("id", pa.string()), ("text", pa.string())]
    if layout.columns:
        columns = [(name, TYPES.get(kind, pa.string())) for name, kind in layout.columns.items()]
        fields.append(("metadata", pa.struct(columns)))
    for name, coder in layout.coders.items():
        none = np.empty((0, bytes_per_vector(coder.code, coder.dim)), dtype=np.uint8)
        fields.append((name, _vectors(coder, none).type))
    return pa.schema(fields)


def passing(where: Where | None, committed: Committed | None) -> str | None:
    """The condition for documents with certain metadata that belong to the index; `None` if all do."""
    quoted = {name.replace("`", "``"): values for name, values in (where or {}).items()}
    parts = [condition({f"metadata.`{name}`": values}) for name, values in quoted.items()]
    if committed is not None:
        parts.append(f"key < {committed.end}")
        parts += [f"NOT {condition({'key': committed.removed})}"] if committed.removed else []
    return " AND ".join(parts) or None


def condition(where: Where) -> str:
    """The condition that each column has one of its values."""
    return " AND ".join(f"{name} IN ({', '.join(map(_literal, values))})" for name, values in where.items())


def _vectors(coder: Coder, packed: np.ndarray) -> pa.FixedSizeListArray:
    numbers = packed.view(coder.code) if coder.code in (FLOAT, "float16") else packed
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(numbers).reshape(-1)), numbers.shape[1])


def _stored(value: object, kind: str) -> object:
    return value if value is None or kind in TYPES else json.dumps(value, ensure_ascii=False)


def _literal(value: object) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return repr(value).lower()  # of True, too
