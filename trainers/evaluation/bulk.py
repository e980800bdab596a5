"""Embed collections of any size: a function for frameworks that map over batches; one output file per input file."""

from __future__ import annotations

import ctypes
import glob
import json
import platform
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ..core.columns import Role
from ..core.durable import replacing
from ..core.granularity import Granularity, Grid
from ..core.streams.stream import Row, Shard, Stream
from ..data.collators import fields_of, joined_text, separator_for
from .encoding import GridEncoder


METADATA = b"m3bert"  # key in the metadata of an output file
ROWS_AT_ONCE = 1024
M_MMAP_THRESHOLD, MAPPED = -3, 2**17  # glibc's number of the option, and the bytes from which a tensor is large
DRAW = 4  # random bytes in the name of an unfinished file: processes of several machines may share a folder


class GridEmbedder:
    """
    Adds embeddings to batches of rows: a function for frameworks that map over batches. It is sent to worker processes
    without its encoder, which each of them loads at its first batch.

    - datasets: `rows.map(GridEmbedder(load), batched=True)`
    - Ray Data: `rows.map_batches(GridEmbedder, fn_constructor_kwargs={"load": load}, ...)`
    - Spark: `rows.mapInPandas(GridEmbedder(load).map_frames, spark_schema(rows.dtypes, grid))`, see
      [`spark_schema`][trainers.evaluation.bulk.spark_schema]

    Args:
        load (`Callable[[], GridEncoder]`): Loads the encoder. It must be possible to pickle it.
        text_column (`str`, *optional*, defaults to `"text"`): Column with the text; `"title+text"` joins two with the
            separator token.
        role (`str`, *optional*, defaults to `"document"`): Role of the texts, which selects their prompt and their
            maximum length.
        normalize (`bool`, *optional*, defaults to `False`): Whether to L2-normalise the embeddings.
    """

    def __init__(
        self,
        load: Callable[[], GridEncoder],
        text_column: str = "text",
        role: Role = "document",
        normalize: bool = False,
    ):
        self.load, self.text_column, self.role, self.normalize = load, text_column, role, normalize
        self._encoder: GridEncoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_encoder": None}

    @property
    def encoder(self) -> GridEncoder:
        """The encoder of this process."""
        if self._encoder is None:
            self._encoder = self.load()
        return self._encoder

    def text_of(self, row: Mapping[str, Any]) -> str:
        """
        The text of a row, without its prompt.

        Raises:
            ValueError: if a text column is missing or not text.
        """
        return joined_text(row, self.text_column, separator_for([self.text_column], self.encoder.tokenizer))

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """
        Args:
            batch (`Mapping[str, Sequence]`): Column -> values. There may be no rows.

        Returns:
            `dict`: the same columns, and one column `layer_{l}` per layer: arrays of shape `(rows, widest dim)`.

        Raises:
            ValueError: if a text column of a row is missing or not text, or the rows have embeddings already.
        """
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        grid, dtype = self.encoder.grid, self.encoder.dtype
        widest = {column_of(layer): Granularity(layer, grid.dims_of(layer)[-1]) for layer in grid.layers}
        if taken := [name for name in widest if name in batch]:
            raise ValueError(f"The rows have a column {taken[0]} already: rename it, or leave it out.")
        if not rows:  # the part of an engine's data that is empty
            return {**batch, **{name: torch.empty((0, g.dim), dtype=dtype).numpy() for name, g in widest.items()}}
        embeddings = self.encoder.encode([self.text_of(row) for row in rows], role=self.role)
        vectors = {name: embeddings.at(g, normalize=self.normalize).to(dtype) for name, g in widest.items()}
        return {**batch, **{name: found.numpy() for name, found in vectors.items()}}

    def map_frames(self, frames: Iterable[Any]) -> Iterator[Any]:
        """
        The same for an iterator of data frames of pandas, as Spark's `mapInPandas` calls it.

        Args:
            frames (`Iterable[pandas.DataFrame]`): Rows.

        Yields:
            `pandas.DataFrame`: the same rows, with a column `layer_{l}` per layer: lists of floats.

        Raises:
            ValueError: as a call.
        """
        for frame in frames:
            batch = frame.to_dict("list")
            for name in fields_of(self.text_column):
                if name in frame.columns:  # a missing text is NaN, or None
                    batch[name] = frame[name].astype(object).where(frame[name].notna(), None).tolist()
            embedded = self(batch)
            added = [name for name in embedded if name not in frame.columns]
            yield frame.assign(**{name: embedded[name].tolist() for name in added})


def column_of(layer: int) -> str:
    """Name of the column with the embeddings of a layer."""
    return f"layer_{layer}"


def spark_schema(columns: Iterable[tuple[str, str]], grid: Grid) -> str:
    """
    The schema of the rows that [`GridEmbedder.map_frames`][trainers.evaluation.bulk.GridEmbedder.map_frames] yields,
    in Spark's notation (DDL).

    Args:
        columns (`Iterable[tuple[str, str]]`): Name and type of each column of the rows: `dtypes` of a data frame of
            Spark.
        grid ([`Grid`]): The grid of the encoder.
    """
    added = [(column_of(layer), "array<float>") for layer in grid.layers]
    return ", ".join(f"`{name.replace('`', '``')}` {kind}" for name, kind in [*columns, *added])


def share_of(items: Sequence[Any], shard: str) -> list[Any]:
    """
    One share of some items: with `"1/4"`, the items 1, 5, 9, ...

    Raises:
        ValueError: if the text is not `i/n` with `i` below `n`, or the share is empty.
    """
    index, slash, count = shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"shard={shard!r} must be i/n, with i from 0 to n - 1: 0/4, 1/4, 2/4 and 3/4.")
    share = list(items[int(index) :: int(count)])
    if not share:
        raise ValueError(f"shard={shard!r} has no file: of {len(items)} files, there are at most {len(items)} shares.")
    return share


def is_embedded(part: Shard, file: Path, settings: Mapping[str, Any]) -> bool:
    """
    Whether an output file has the embeddings of a part of the data.

    Args:
        part ([`Shard`]): The part.
        file (`Path`): Output of [`embed_part`], which need not exist.
        settings (`Mapping[str, Any]`): What the embeddings depend on.

    Raises:
        ValueError: if the file was made from other data, or with other settings.
    """
    if not file.is_file():
        return False
    try:
        saved = json.loads((pq.read_schema(file).metadata or {}).get(METADATA, b"{}"))
    except pa.ArrowInvalid as error:
        raise ValueError(f"{file} is not a Parquet file: remove it, or choose another folder.") from error
    ours = described(part, settings)
    changed = [name for name in ours if saved.get(name) != ours[name]]
    if changed:
        raise ValueError(f"{file} was made with another {', '.join(changed)}: remove it, or choose another folder.")
    return True


def described(part: Shard, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What an output file depends on, as JSON can hold it."""
    return json.loads(json.dumps({"input": Stream([part]).identity, **settings}))


def embed_part(
    part: Shard, file: Path, embedder: GridEmbedder, settings: Mapping[str, Any], id_column: str | None = None
) -> int:
    """
    Embed a part of the data into a Parquet file, which appears when it is complete. Memory does not grow with the
    number of rows. What a killed process left of the same file is removed.

    Args:
        part ([`Shard`]): The part.
        file (`Path`): The file to write.
        embedder ([`GridEmbedder`]): Adds the embeddings.
        settings (`Mapping[str, Any]`): What the embeddings depend on, to recognise them later ([`is_embedded`]).
        id_column (`str`, *optional*): Column that must have a value in every row.

    Returns:
        `int`: number of rows.

    Raises:
        ValueError: if the part has no rows, is malformed, a text or an id is missing, a column changes its type, or
            another process embeds the same part.
    """
    described_part = described(part, settings)
    file.parent.mkdir(parents=True, exist_ok=True)
    for left in file.parent.glob(f"{glob.escape(file.name)}.{'?' * 2 * DRAW}.unfinished"):
        left.unlink(missing_ok=True)
    mark = f"{secrets.token_hex(DRAW)}.unfinished"
    try:
        with replacing(file, mark=mark) as unfinished:
            return _write(part, unfinished, embedder, described_part, id_column)
    except FileNotFoundError as error:
        if error.filename is None or not str(error.filename).endswith(mark):
            raise
        raise ValueError(f"Another process embeds {part.name} into {file}: start each share once.") from error


def _write(
    part: Shard, file: Path, embedder: GridEmbedder, description: Mapping[str, Any], id_column: str | None
) -> int:
    """Write the rows of a part with their embeddings, and return their number."""
    metadata = {METADATA: json.dumps(description).encode()}
    rows = 0
    with ExitStack() as stack:
        for batch in _batches(part, embedder, id_column):
            try:
                table = pa.table({name: _column(values) for name, values in embedder(batch).items()})
                if rows == 0:
                    writer = stack.enter_context(pq.ParquetWriter(file, table.schema.with_metadata(metadata)))
                writer.write_table(table.cast(writer.schema))
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
                place = f"{part.name}, after row {rows}"
                raise ValueError(f"{place}: a column changes its type: {str(error).splitlines()[0]}") from error
            rows += len(table)
    if rows == 0:
        raise ValueError(f"The part is empty: {part.name} has no rows.")
    return rows


def keep_memory_flat() -> None:
    """
    Make this process return the memory of large tensors and columns as soon as they are freed, if its C library is
    glibc. By default, glibc and the allocator of Arrow begin to keep them. Both then grow for hours, because batches
    of many shapes leave holes.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED)
        pa.set_memory_pool(pa.system_memory_pool())


def _batches(part: Shard, embedder: GridEmbedder, id_column: str | None) -> Iterator[dict[str, list[Any]]]:
    """The rows of a part as columns, those of its first row, some at a time."""
    rows, columns = part.rows(), None
    while taken := list(islice(rows, ROWS_AT_ONCE)):
        columns = columns or list(taken[0].values)
        for row in taken:
            _check(row, columns, embedder, id_column)
        yield {name: [row.values.get(name) for row in taken] for name in columns}


def _check(row: Row, columns: Sequence[str], embedder: GridEmbedder, id_column: str | None) -> None:
    """
    Raises:
        ValueError: names the place of a row without text or id, or with a column that the first row does not have.
    """
    try:
        embedder.text_of(row.values)
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error
    if id_column is not None and row.values.get(id_column) is None:
        raise ValueError(f"{row.place}: the row has no id in the column {id_column}; it has {', '.join(row.values)}.")
    if new := [name for name in row.values if name not in columns]:
        raise ValueError(f"{row.place}: the column {new[0]} is new; the first row has {', '.join(columns)}.")


def _column(values: Any) -> pa.Array:
    """Values of a column; those of a matrix as lists of fixed length."""
    if isinstance(values, np.ndarray) and values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return pa.array(values)
