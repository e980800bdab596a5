"""The batches of training sets, with the names of sentence-transformers, and of evaluation sets."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils.data import BatchSampler, DataLoader

from ..encode.ranks import rank, world_size
from ..utils.hashing import hash_of
from .collators import ColumnsCollator, TextColumnsCollator, joined_texts
from .training_sets import NamedDatasets


@dataclass(frozen=True)
class Batches:
    """
    The batches of one data set in an epoch, of `size` rows of all ranks: its rows in a random order, each in one batch
    at most. With `texts`, hashes `(rows, columns)` of each text, no text occurs in two rows of a batch: a row with a
    text of its batch waits for the next one. Rows that still wait at the end are left out, and a reshuffled pass fills
    the epoch.
    """

    rows: int
    size: int
    ranks: int
    drop_last: bool
    texts: np.ndarray | None = None

    def __len__(self) -> int:
        whole, rest = divmod(self.rows, self.size)
        return whole + (not self.drop_last and rest >= self.ranks)

    def of_epoch(self, generator: np.random.Generator) -> Iterator[list[int]]:
        """The batches, each with rows in a random order. ValueError if there are too few different texts for one."""
        count = 0
        while count < len(self):
            before = count
            for batch in islice(self._pass(generator), len(self) - before):
                count += 1
                yield batch
            if count == before:
                raise ValueError(
                    f"batch_sampler='no_duplicates' finds no {self.size} rows without equal texts: lower "
                    "per_device_train_batch_size."
                )

    def _pass(self, generator: np.random.Generator) -> Iterator[list[int]]:
        fresh, waiting = iter(generator.permutation(self.rows).tolist()), deque[int]()
        while True:
            batch: list[int] = []
            equal: list[int] = []
            seen: set[int] = set()
            while len(batch) < self.size and (row := waiting.popleft() if waiting else next(fresh, None)) is not None:
                texts = () if self.texts is None else self.texts[row].tolist()
                if seen.isdisjoint(texts):
                    batch.append(row)
                    seen.update(texts)
                else:
                    equal.append(row)
            waiting.extendleft(reversed(equal))
            batch = batch[: len(batch) - len(batch) % self.ranks]
            if len(batch) < (self.size if self.drop_last else 1):
                return
            yield batch


class MultiDatasetBatchSampler(BatchSampler):
    """
    The batches of a rank. In a step, all ranks have rows of the same data set, and no row is on two of them. `starts`
    are the numbers of the first row of each data set; `order` is the `multi_dataset_batch_sampler` of
    [`TextTrainingArguments`]. The batches of an epoch depend on the seed and the epoch alone.
    """

    def __init__(self, parts: Sequence[Batches], starts: Sequence[int], *, order: str, seed: int, rank: int):
        self.parts, self.starts, self.order, self.seed, self.rank = parts, starts, order, seed, rank
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches come next; accelerate calls this when a run continues."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.turns())

    def turns(self) -> list[int]:
        """The data set of each batch of the epoch, by its index."""
        counts = list(map(len, self.parts))
        if self.order == "round_robin":
            return list(range(len(counts))) * min(counts)
        turns = np.repeat(np.arange(len(counts)), counts)
        return np.random.default_rng([self.seed, self.epoch]).permutation(turns).tolist()

    def __iter__(self) -> Iterator[list[int]]:
        batches = [
            part.of_epoch(np.random.default_rng([self.seed, self.epoch, at])) for at, part in enumerate(self.parts)
        ]
        for turn in self.turns():
            batch = next(batches[turn])
            share = len(batch) // self.parts[turn].ranks
            yield [self.starts[turn] + row for row in batch[self.rank * share : (self.rank + 1) * share]]


class BatchLoader(DataLoader):
    """A data loader whose batch sampler is told the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches come next; the trainer calls this."""
        sampler: Any = self.batch_sampler
        sampler.set_epoch(epoch)


def batches_of(
    datasets: NamedDatasets, collator: ColumnsCollator, args: Any, batch_size: int
) -> tuple[NamedDatasets, MultiDatasetBatchSampler]:
    """The columns that are read, and the batches that a rank trains on, of `batch_size` rows each."""
    options = {"size": batch_size * world_size(), "ranks": world_size(), "drop_last": args.dataloader_drop_last}
    read, parts = {}, []
    for name, dataset in datasets.named.items():
        reader = collator.of(dataset.column_names)
        read[name] = dataset.select_columns(list(reader.fields))
        texts = text_numbers(read[name], reader) if args.batch_sampler == "no_duplicates" else None
        parts.append(Batches(len(dataset), **options, texts=texts))
    sampler = MultiDatasetBatchSampler(
        parts,
        datasets.starts,
        order=args.multi_dataset_batch_sampler,
        seed=args.seed if args.data_seed is None else args.data_seed,
        rank=rank(),
    )
    return NamedDatasets(read), sampler


def text_numbers(dataset: Dataset, collator: TextColumnsCollator) -> np.ndarray:
    """A number for the text of each row in each column, equal for equal texts: hashes `(rows, columns)`."""
    columns = [[hash_of(text) for text in joined_texts(dataset, column, "\0")] for column in collator.columns]
    return np.array(columns).T


def evaluation_batches(rows: int, size: int) -> list[list[int]]:
    """The rows of this rank in each batch of an evaluation. Every row is read once. The batches of all ranks differ by
    one row at most: a last batch with a single row would leave a contrastive loss nothing to compare it with. A rank
    has at most `size` rows, or two if some rank would have none otherwise."""
    batches = min(math.ceil(rows / (size * world_size())), rows // world_size())
    if not batches:
        raise ValueError(f"The evaluation data has {rows} rows, too few for {world_size()} process(es).")
    parts = np.array_split(np.arange(rows), batches)
    return [np.array_split(part, world_size())[rank()].tolist() for part in parts]
