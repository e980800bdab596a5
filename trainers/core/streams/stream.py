"""
Streams: training data that is read during training, in an order that a position of a few numbers describes.

A stream consists of shards, such as files. In each epoch, a [`Reading`] goes through the shards in a random order,
takes rows in blocks, and shuffles each block. Order and shuffling depend only on the seed, the epoch and the place of
the block. A [`Position`] therefore says which rows come next, without the rows of a shuffle buffer.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Protocol

import datasets
import numpy as np
import torch
from datasets.exceptions import DatasetsError


Values = Mapping[str, Any]
Transform = Callable[[Sequence[Values]], Sequence[Values]]
ROWS_AT_ONCE = 1000  # of a shard
# What reading a broken data file raises: datasets, pyarrow (its errors are of ValueError), gzip and zlib.
UNREADABLE = (DatasetsError, ValueError, EOFError, gzip.BadGzipFile, zlib.error)


@dataclass(frozen=True)
class Row:
    """
    A row of a stream.

    Args:
        values (`Mapping[str, Any]`): Column -> value.
        place (`str`): Where the row stands, for error messages: `pairs.jsonl, line 12`.
    """

    values: Values
    place: str


class Shard(Protocol):
    """A part of a stream that can be read from any of its rows on. Its rows always come in the same order."""

    @property
    def name(self) -> str:
        """Name of the file, or another name for error messages."""
        ...

    @property
    def size(self) -> int | None:
        """Bytes of the file, if known."""
        ...

    def rows(self, start: int = 0) -> Iterator[Row]:
        """The rows from index `start` on."""
        ...


@dataclass(frozen=True)
class DatasetShard:
    """
    A [`Shard`] that the library datasets reads.

    Args:
        name (`str`): Name of the file, or another name for error messages.
        dataset ([`~datasets.IterableDataset`] or [`~datasets.Dataset`]): Its rows. They are always read in the same
            order.
        unit (`str`, *optional*, defaults to `"row"`): What error messages count: `"line"` for files with a row per
            line.
        size (`int`, *optional*): Bytes of the file, if known.
    """

    name: str
    dataset: Any
    unit: str = "row"
    size: int | None = None

    def rows(self, start: int = 0) -> Iterator[Row]:
        """
        The rows from index `start` on. Rows before it are read, but not yielded.

        Raises:
            ValueError: if the shard is malformed. The message names the shard and the last row that could be read.
        """
        number = start
        for size in (ROWS_AT_ONCE, 1):  # one by one in a block that cannot be read, to name the row
            try:
                # `iter` gives all rows: in a worker process, the dataset itself would only give those of that worker.
                for batch in (self.dataset.skip(number) if number else self.dataset).iter(batch_size=size):
                    for values in zip(*batch.values(), strict=True):
                        number += 1
                        yield Row(dict(zip(batch, values, strict=True)), f"{self.name}, {self.unit} {number}")
                return
            except UNREADABLE as error:
                if size == 1:
                    reason = " ".join(str(error.__cause__ or error).split())
                    raise ValueError(f"{self.name} cannot be read after {self.unit} {number}: {reason}") from error


class Stream(torch.utils.data.IterableDataset):
    """
    Training data that is read during training. Iterating over it reads every row once, in the order of the shards.

    Args:
        shards (`Sequence[Shard]`): Parts of the data.
        transform (`Callable`, *optional*): Function of some rows that returns as many rows. It runs where the rows are
            used: in the worker processes of the rank that trains on them.
        columns (`Sequence[str]`, *optional*): Columns after the transform. Default: those of the first row.

    Raises:
        ValueError: if there are no shards.
    """

    def __init__(
        self, shards: Sequence[Shard], transform: Transform | None = None, columns: Sequence[str] | None = None
    ):
        if not shards:
            raise ValueError("A stream needs at least one shard.")
        self.shards, self.transform, self._columns = tuple(shards), transform, columns

    @classmethod
    def of(cls, dataset: datasets.IterableDataset) -> Stream:
        """The stream of a dataset of the library datasets, with the shards of that dataset."""
        count = dataset.num_shards
        return cls([DatasetShard(f"shard {index} of {count}", dataset.shard(count, index)) for index in range(count)])

    def with_transform(self, transform: Transform, columns: Sequence[str]) -> Stream:
        """The same rows, transformed where they are used."""
        return Stream(self.shards, transform, columns)

    def transformed(self, rows: Sequence[Values]) -> Sequence[Values]:
        """The rows after the transform."""
        return rows if self.transform is None else self.transform(rows)

    def rows(self) -> Iterator[Row]:
        """Every row once, without the transform, in the order of the shards."""
        for shard in self.shards:
            yield from shard.rows()

    def __iter__(self) -> Iterator[Values]:
        for row in self.rows():
            yield self.transformed([row.values])[0]

    @cached_property
    def first_row(self) -> Row:
        """
        The first row, without the transform.

        Raises:
            ValueError: if no shard has a row.
        """
        for row in self.rows():
            return row
        raise ValueError(f"The dataset is empty: {', '.join(shard.name for shard in self.shards[:3])} has no rows.")

    @property
    def column_names(self) -> list[str]:
        """Columns after the transform."""
        return list(self._columns if self._columns is not None else self.first_row.values)

    @property
    def info(self) -> Any:
        """Where the data came from, as far as the library datasets knows."""
        return getattr(getattr(self.shards[0], "dataset", None), "info", None)

    @property
    def identity(self) -> str:
        """A short text that is the same for the same data, also under another path: names and sizes of the shards, and
        a hash of the first row."""
        names = [(shard.name.rsplit("/", 1)[-1], shard.size) for shard in self.shards]
        first = repr(sorted(self.first_row.values.items()))
        return blake2b(json.dumps([names, first]).encode(), digest_size=16).hexdigest()


def streamed(dataset: Any) -> Any:
    """The [`Stream`] of an [`~datasets.IterableDataset`]; any other dataset as it is."""
    return Stream.of(dataset) if isinstance(dataset, datasets.IterableDataset) else dataset


@dataclass(frozen=True)
class Position:
    """
    A place in the order of a [`Reading`].

    Args:
        epoch (`int`, *optional*, defaults to 0): Complete passes over the data.
        shard (`int`, *optional*, defaults to 0): Shard of the current block's first row: an index into the order of
            the epoch.
        row (`int`, *optional*, defaults to 0): Index of that row in its shard.
        taken (`int`, *optional*, defaults to 0): Rows of the block that were taken.
    """

    epoch: int = 0
    shard: int = 0
    row: int = 0
    taken: int = 0


@dataclass(frozen=True)
class Reading:
    """
    An endless reading of a stream: epoch after epoch, each row once per epoch.

    Args:
        stream ([`Stream`]): The data.
        buffer_size (`int`, *optional*, defaults to 0): Number of rows in a shuffled block. 0 reads shards and rows in
            their order.
        seed (`int`, *optional*, defaults to 0): Seed of the shuffling.
        part (`int`, *optional*, defaults to 0): Which part of the shards to read.
        parts (`int`, *optional*, defaults to 1): Number of parts into which the shards of an epoch are divided.
    """

    stream: Stream
    buffer_size: int = 0
    seed: int = 0
    part: int = 0
    parts: int = 1

    def order(self, epoch: int) -> list[Shard]:
        """The shards of this part in an epoch, in the order in which they are read."""
        shards = self.stream.shards
        if self.buffer_size == 0:
            return list(shards[self.part :: self.parts])
        order = np.random.default_rng([self.seed, epoch]).permutation(len(shards))
        return [shards[index] for index in order[self.part :: self.parts]]

    def rows(self, start: Position) -> Iterator[tuple[Row, Position]]:
        """
        The rows from a position on, without end, each with the position after it.

        Raises:
            ValueError: if an epoch has no rows, or a shard is malformed.
        """
        position = start
        while True:
            empty = True
            for place, block in self._blocks(position):
                empty = False
                for taken in range(place.taken, len(block)):
                    yield block[taken], replace(place, taken=taken + 1)
            if empty and (position.shard, position.row) == (0, 0):
                names = ", ".join(shard.name for shard in self.order(position.epoch)[:3])
                raise ValueError(f"The stream has no rows: {names or 'no shard'} is empty.")
            position = Position(epoch=position.epoch + 1)

    def _blocks(self, start: Position) -> Iterator[tuple[Position, list[Row]]]:
        """The rest of an epoch in blocks: the position of each, and its rows in their random order."""
        place, block = start, []
        order = self.order(start.epoch)
        for index in range(start.shard, len(order)):
            first = start.row if index == start.shard else 0
            for number, row in enumerate(order[index].rows(first), first + 1):
                block.append(row)
                if len(block) >= max(1, self.buffer_size):
                    yield place, self._shuffled(place, block)
                    place, block = Position(start.epoch, index, number), []
        if block:
            yield place, self._shuffled(place, block)

    def _shuffled(self, place: Position, block: list[Row]) -> list[Row]:
        if self.buffer_size == 0:
            return block
        key = [self.seed, place.epoch, self.part, place.shard, place.row]
        return [block[index] for index in np.random.default_rng(key).permutation(len(block))]
