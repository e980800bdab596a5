"""Embed collections of any size: a function for engines that map over batches, and one output file per input file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..core.embedding import Role
from ..core.granularity import Granularity
from ..core.streams import Shard, Stream
from ..data.collators import joined_text, separator_for
from .encoding import GridEncoder


METADATA = b"m3bert"  # key in the metadata of an output file
ROWS_AT_ONCE = 1024


class GridEmbedder:
    """
    Adds embeddings to batches of rows: a function for engines that map over batches, such as `map(batched=True)` of
    the library datasets. It is sent to worker processes without its encoder, which each of them loads at its first
    batch.

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
            batch (`Mapping[str, Sequence]`): Column -> values.

        Returns:
            `dict`: the same columns, and one column `layer_{l}` per layer: arrays of shape `(rows, widest dim)`.

        Raises:
            ValueError: if a text column of a row is missing or not text.
        """
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        embeddings = self.encoder.encode([self.text_of(row) for row in rows], role=self.role)
        grid = embeddings.grid
        widest = [Granularity(layer, grid.dims_of(layer)[-1]) for layer in grid.layers]
        vectors = {f"layer_{g.layer}": embeddings.at(g, normalize=self.normalize) for g in widest}
        return {**batch, **{name: found.numpy() for name, found in vectors.items()}}


def share_of(items: Sequence[Any], shard: str) -> list[Any]:
    """
    One share of some items: with `"1/4"`, the items 1, 5, 9, ...

    Raises:
        ValueError: if the text is not `i/n` with `i` below `n`.
    """
    index, slash, count = shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"shard={shard!r} must be i/n, with i from 0 to n - 1: 0/4, 1/4, 2/4 and 3/4.")
    return list(items[int(index) :: int(count)])


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
    saved = json.loads(pq.read_schema(file).metadata.get(METADATA, b"{}"))
    ours = described(part, settings)
    changed = [name for name in ours if saved.get(name) != ours[name]]
    if changed:
        raise ValueError(f"{file} was made with another {', '.join(changed)}: remove it, or choose another folder.")
    return True


def described(part: Shard, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What an output file depends on, as JSON can hold it."""
    return json.loads(json.dumps({"input": Stream([part]).identity, **settings}))


def embed_part(part: Shard, file: Path, embedder: GridEmbedder, settings: Mapping[str, Any]) -> int:
    """
    Embed a part of the data into a Parquet file, which appears when it is complete. Memory does not grow with the
    number of rows.

    Args:
        part ([`Shard`]): The part.
        file (`Path`): The file to write.
        embedder ([`GridEmbedder`]): Adds the embeddings.
        settings (`Mapping[str, Any]`): What the embeddings depend on, to recognise them later ([`is_embedded`]).

    Returns:
        `int`: number of rows.

    Raises:
        ValueError: if the part has no rows, is malformed, or a text is missing.
    """
    described_part = described(part, settings)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    file.parent.mkdir(parents=True, exist_ok=True)
    writer, rows, finished = None, 0, False
    try:
        for batch in _batches(part, embedder):
            table = pa.table({name: _column(values) for name, values in embedder(batch).items()})
            if writer is None:
                schema = table.schema.with_metadata({METADATA: json.dumps(described_part).encode()})
                writer = pq.ParquetWriter(unfinished, schema)
            writer.write_table(table.cast(writer.schema))
            rows += len(table)
        finished = writer is not None
    finally:
        if writer is not None:
            writer.close()
            if not finished:
                unfinished.unlink()
    if not finished:
        raise ValueError(f"The part is empty: {part.name} has no rows.")
    unfinished.replace(file)
    return rows


def _batches(part: Shard, embedder: GridEmbedder) -> Iterator[dict[str, list[Any]]]:
    """The rows of a part as columns, some at a time, with a text in each row."""
    rows = part.rows()
    while taken := list(islice(rows, ROWS_AT_ONCE)):
        for row in taken:
            try:
                embedder.text_of(row.values)
            except ValueError as error:
                raise ValueError(f"{row.place}: {error}") from error
        yield {name: [row.values[name] for row in taken] for name in taken[0].values}


def _column(values: Any) -> pa.Array:
    """Values of a column; those of a matrix as lists of fixed length."""
    if isinstance(values, np.ndarray) and values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return pa.array(values)
