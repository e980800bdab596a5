"""Streams: training data that is read during training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node

from ..encode.ranks import rank, world_size


class Epochs(torch.utils.data.IterableDataset):
    """
    The rows of this rank, epoch after epoch without end, so that all ranks make the same steps. The order depends only
    on the seed and the epoch. As many rows as `buffer_size` are read ahead and shuffled; 0 reads shards and rows in
    their order.
    """

    def __init__(self, stream: IterableDataset, buffer_size: int, seed: int):
        self.stream = split_dataset_by_node(stream, rank(), world_size())
        self.buffer_size, self.seed = buffer_size, seed

    def rows(self, epoch: int) -> IterableDataset:
        """The rows of an epoch, in its order."""
        if not self.buffer_size:
            return self.stream
        return self.stream.shuffle([self.seed, epoch], buffer_size=self.buffer_size)

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        for epoch in count():
            empty = True
            for row in self.rows(epoch):
                empty = False
                yield row
            if empty:  # this worker has no shard
                return


def column_names_of(dataset: Dataset) -> list[str]:
    """The columns of a dataset. Those of a stream are read from its first row, if it does not know them."""
    return list(dataset.column_names or next(iter(dataset), ()))
