"""The table of an index in LanceDB: its schema, rows, and conditions in SQL."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from ...core.codes import FLOAT, bytes_per_vector
from ...evaluation.coding import Coder
from ..engine import Batch, Where
from ..layout import Layout, as_numbers


TABLE = "documents"
# Type of a metadata column -> type in the table. LanceDB has no type for JSON.
TYPES = {
    "text": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
    "json": pa.string(),
}
NUMBERS = {FLOAT: pa.float32(), "float16": pa.float16()}  # the other codes are bytes


def table_schema(layout: Layout) -> pa.Schema:
    """Columns of the table. Its metadata has the ranges of `int8`, for those who read it without this package."""
    fields = [("key", pa.int64()), ("id", pa.string()), ("text", pa.string())]
    if layout.columns:
        fields.append(("metadata", pa.struct([(name, TYPES[kind]) for name, kind in layout.columns.items()])))
    fields.append(("first", _vector_type(layout.first)))
    metadata = None
    if layout.second is not None:
        fields.append(("second", _vector_type(layout.second)))
        if layout.second.ranges is not None:
            metadata = {"ranges": json.dumps(layout.second.ranges.tolist())}
    return pa.schema(fields, metadata=metadata)


def table_rows(batch: Batch, layout: Layout, schema: pa.Schema) -> pa.Table:
    """
    Documents as rows.

    Raises:
        ValueError: if a metadata value does not fit its column.
    """
    columns: dict[str, Any] = {"key": batch.keys, "id": batch.ids, "text": batch.texts}
    columns["first"] = _vectors(layout.first, batch.first)
    if layout.second is not None:
        assert batch.second is not None
        columns["second"] = _vectors(layout.second, batch.second)
    if layout.columns:
        rows = [{name: _stored(row[name], kind) for name, kind in layout.columns.items()} for row in batch.metadata]
        try:
            columns["metadata"] = pa.array(rows, type=schema.field("metadata").type)
        except OverflowError as error:
            raise ValueError(f"LanceDB holds integers of 64 bits: {error}.") from error
    return pa.table([columns[name] for name in schema.names], schema=schema)


def packed_vectors(column: pa.ChunkedArray) -> np.ndarray:
    """A column of vectors as the bytes of the codes, `(rows, bytes)`."""
    numbers = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return numbers.reshape(len(column), column.type.list_size).copy().view(np.uint8)


def read_metadata(stored: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """The metadata of a document."""
    return {
        name: json.loads(value) if layout.columns[name] == "json" and value is not None else value
        for name, value in stored.items()
    }


def among(keys: np.ndarray) -> str:
    """The condition that a document has one of some keys."""
    return f"key IN ({', '.join(map(str, keys.tolist()))})"


def condition(where: Where, layout: Layout) -> str:
    """
    The condition that documents have certain metadata.

    Args:
        where (`dict[str, Any]`): Metadata column -> a value, or several of which a document must have one. A value
            that is not of the type of the column is not found.
        layout ([`Layout`]): Layout, with the columns.
    """
    parts = []
    for column, wanted in where.items():
        values = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
        literals = [text for value in values if (text := _literal(value, layout.columns[column])) is not None]
        name = column.replace("`", "``")
        parts.append(f"metadata.`{name}` IN ({', '.join(literals)})" if literals else "false")
    return " AND ".join(parts)


def _vector_type(coder: Coder) -> pa.DataType:
    if coder.code in NUMBERS:
        return pa.list_(NUMBERS[coder.code], coder.dim)
    return pa.list_(pa.uint8(), bytes_per_vector(coder.code, coder.dim))


def _vectors(coder: Coder, packed: np.ndarray) -> pa.FixedSizeListArray:
    numbers = as_numbers(coder, packed) if coder.code in NUMBERS else packed
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(numbers).reshape(-1)), numbers.shape[1])


def _stored(value: Any, kind: str) -> Any:
    if value is None or kind != "json":
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _literal(value: Any, kind: str) -> str | None:
    """A value in SQL; `None` if a column of this type cannot have it."""
    if kind in ("text", "json"):
        return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else None
    if kind == "boolean" or isinstance(value, bool):
        return str(value).lower() if kind == "boolean" and isinstance(value, bool) else None
    if not isinstance(value, int | float) or (kind == "integer" and value != int(value)):
        return None
    return str(int(value)) if kind == "integer" else repr(float(value))


def rows_at(keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Places of some keys among `keys`, which have them all in any order."""
    order = np.argsort(keys)
    return order[np.searchsorted(keys[order], wanted)]
