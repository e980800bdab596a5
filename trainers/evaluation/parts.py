"""Read and search the Parquet files of a bulk embedding, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ..core.granularity import Granularity
from ..core.states import truncate
from .bulk import column_of
from .search import search_blocks


ROWS_AT_ONCE = 16_384


def read_vectors(file: Path, granularity: Granularity) -> Iterator[torch.Tensor]:
    """
    The embeddings in a file, some rows at a time.

    Args:
        file (`Path`): A file of `m3bert embed --shard`, or of a framework that maps a
            [`GridEmbedder`][trainers.evaluation.bulk.GridEmbedder] over batches.
        granularity ([`Granularity`]): Layer and dim to read.

    Yields:
        `torch.Tensor` of shape `(rows, dim)`, not normalised

    Raises:
        ValueError: if the file lacks the layer, or has fewer dims.
    """
    name = column_of(granularity.layer)
    for column in _column(file, name):
        lists = column.storage if isinstance(column, pa.ExtensionArray) else column  # Ray has a type for tensors
        vectors = torch.tensor(lists.flatten().to_numpy().reshape(len(lists), -1))
        if vectors.shape[1] < granularity.dim:
            raise ValueError(f"{file} has {vectors.shape[1]} dims in the column {name}, not {granularity.dim}.")
        yield truncate(vectors, granularity.dim)


def search_parts(
    files: Sequence[Path], queries: torch.Tensor, granularity: Granularity, k: int, id_column: str = "id"
) -> tuple[np.ndarray, list[list[Any]]]:
    """
    Exact search by cosine among the embeddings of all files, in memory that does not grow with their number.

    Args:
        files (`Sequence[Path]`): Files as for [`read_vectors`][trainers.evaluation.parts.read_vectors].
        queries (`torch.Tensor` of shape `(queries, width)`): Embeddings of the queries, not narrower than the dim.
        granularity ([`Granularity`]): Layer and dim of the documents, and dim of the queries.
        k (`int`): Number of documents to find per query; all documents if there are fewer.
        id_column (`str`, *optional*, defaults to `"id"`): Column with the ids of the documents.

    Returns:
        `tuple[np.ndarray, list[list[Any]]]`: cosines of shape `(queries, k)`, and the ids of these documents, best
        first. Of documents with equal cosines, the first ones count as better.

    Raises:
        ValueError: if a file lacks a column, or has fewer dims.
    """
    for file in files:
        _require_column(file, id_column)

    def blocks() -> Iterator[torch.Tensor]:
        return (block for file in files for block in read_vectors(file, granularity))

    cosines, rows = search_blocks(truncate(queries, granularity.dim), blocks, k)
    wanted, start = np.unique(rows), 0
    ids: dict[int, Any] = {}
    for column in (column for file in files for column in _column(file, id_column)):
        here = wanted[(wanted >= start) & (wanted < start + len(column))]
        ids.update(zip(here.tolist(), column.take(pa.array(here - start)).to_pylist(), strict=True))
        start += len(column)
    return cosines, [[ids[row] for row in found] for found in rows.tolist()]


def _column(file: Path, name: str) -> Iterator[pa.Array]:
    """A column of a file, some rows at a time."""
    _require_column(file, name)
    with pq.ParquetFile(file) as opened:
        for batch in opened.iter_batches(ROWS_AT_ONCE, columns=[name]):
            yield batch.column(0)


def _require_column(file: Path, name: str) -> None:
    """
    Raises:
        ValueError: if the file does not have the column.
    """
    names = pq.read_schema(file).names
    if name not in names:
        raise ValueError(f"{file} has no column {name}; it has {', '.join(names)}.")
