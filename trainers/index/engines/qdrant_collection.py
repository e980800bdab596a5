"""The collection of an index in Qdrant: its vectors, settings of a search, and filters."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ...core.codes import FLOAT, bytes_per_vector
from ...evaluation.coding import Coder
from ..engine import Where
from ..layout import Layout


CANDIDATES = 256  # of a graph, that a search follows at least
# Code -> type of the numbers on a server.
DATATYPES = {FLOAT: "float32", "float16": "float16", "int8": "float32", "sign": "float16"}


def collection_vectors(models: Any, layout: Layout) -> dict[str, Any]:
    """
    The named vectors of the collection. Only the first ones have a graph.

    Args:
        models (`module`): `qdrant_client.models`.
        layout ([`Layout`]): What is stored.
    """
    plain = models.HnswConfigDiff(m=0)
    vectors = {}
    for name, coder in (("first", layout.first), ("second", layout.second)):
        if coder is not None:
            searched = name == "first" and layout.kind == "hnsw"
            vectors[name] = models.VectorParams(
                size=coder.dim,
                distance=models.Distance.DOT,
                datatype=DATATYPES[coder.code],
                on_disk=True,
                hnsw_config=None if searched else plain,
                quantization_config=_quantization(models, coder) if searched else None,
            )
    return vectors


def _quantization(models: Any, coder: Coder) -> Any:
    """Codes that a server makes of vectors, and keeps in memory."""
    if coder.code == "sign":
        return models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True))
    if coder.code == "int8":
        scalar = models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
        return models.ScalarQuantization(scalar=scalar)
    return None


def bytes_on_server(layout: Layout) -> int:
    """Bytes of the vectors of a document on a server, and of their codes."""
    total = 0
    for coder in (layout.first, layout.second):
        if coder is not None:
            total += coder.dim * np.dtype(DATATYPES[coder.code]).itemsize
    if layout.kind == "hnsw" and layout.first.code in ("int8", "sign"):
        total += bytes_per_vector(layout.first.code, layout.first.dim)
    return total


def stage_settings(layout: Layout, k: int) -> dict[str, Any]:
    """
    Settings of the first stage, as arguments of `SearchParams`. Codes that a server made score a shortlist; without
    one, the vectors score what they find again. Bits are as good as the vectors, which are 1 and -1.

    Args:
        layout ([`Layout`]): Layout of the index.
        k (`int`): Number of documents to find.
    """
    if layout.kind == "flat":
        return {"exact": True}
    settings: dict[str, Any] = {"hnsw_ef": max(CANDIDATES, 2 * max(k, layout.shortlist or 0))}
    if layout.first.code == "int8" and layout.shortlist is None:
        settings["quantization"] = {"rescore": True, "oversampling": 2.0}
    elif layout.first.code in ("int8", "sign"):
        settings["quantization"] = {"rescore": False}
    return settings


def packed_numbers(coder: Coder, numbers: np.ndarray) -> np.ndarray:
    """The bytes of a code whose decoded numbers these are, `(vectors, bytes)`."""
    if coder.code == "sign":
        return np.packbits(numbers > 0, axis=1)
    if coder.code == "int8":
        assert coder.ranges is not None
        low, high = coder.ranges
        steps = np.where(high > low, high - low, 1) / 255
        return np.clip(np.rint((numbers - low) / steps - 0.5), 0, 255).astype(np.uint8)
    return numbers.astype(coder.code).view(np.uint8)


def column_path(column: str) -> str:
    """Where a metadata column is in the payload."""
    return f"metadata.{column}" if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", column) else f'metadata."{column}"'


def matching(models: Any, where: Where, layout: Layout) -> Any:
    """
    The filter for documents with certain metadata.

    Args:
        models (`module`): `qdrant_client.models`.
        where (`dict[str, Any]`): Metadata column -> a value, or several of which a document must have one.
        layout ([`Layout`]): Layout, with the columns.
    """
    must = []
    for column, wanted in where.items():
        values = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
        options = [_condition(models, column, value, layout.columns[column]) for value in values]
        must.append(models.Filter(should=options or [models.HasIdCondition(has_id=[])]))
    return models.Filter(must=must)


def _condition(models: Any, column: str, value: Any, kind: str) -> Any:
    path = column_path(column)
    if isinstance(value, float) or (kind == "number" and isinstance(value, int)):  # Qdrant does not match floats
        return models.FieldCondition(key=path, range=models.Range(gte=value, lte=value))
    return models.FieldCondition(key=path, match=models.MatchValue(value=value))
