"""Clean text pairs: drop duplicates, and limit the number of documents per query."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from ..core.dataset_checks import require_columns
from ..core.streams.stream import DatasetShard, Row, Shard, Stream, streamed


@dataclass(frozen=True)
class CleaningReport:
    """
    Counts of the pairs that [`clean_pairs`] read and dropped.

    Args:
        rows (`int`): Pairs read.
        identical (`int`): Pairs dropped because the same pair came before.
        over_cap (`int`): Pairs dropped because the query already had `max_per_query` documents.
    """

    rows: int
    identical: int
    over_cap: int

    def __str__(self) -> str:
        kept = self.rows - self.identical - self.over_cap
        return (
            f"Kept {kept} of {self.rows} pairs; dropped {self.identical} duplicates "
            f"and {self.over_cap} over the maximum number of documents per query."
        )


def clean_pairs(
    dataset: Dataset | IterableDataset | Stream,
    query: Sequence[str],
    document: Sequence[str],
    *,
    max_per_query: int | None = None,
) -> tuple[Any, CleaningReport]:
    """
    Drop duplicate pairs, and keep at most `max_per_query` documents per query, so that frequent queries do not
    dominate the batches (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), section 2.3 and appendix B,
    stage 3). The first documents of a query are kept. All pairs are read and hashed once, also those of a stream,
    which therefore must have an end. This takes about 60 bytes of memory per pair, and 1 byte afterwards.

    Args:
        dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or [`Stream`]): The pairs.
        query (`Sequence[str]`): Columns of the query.
        document (`Sequence[str]`): Columns of the document.
        max_per_query (`int`, *optional*): Maximum number of documents per query; `None` is no maximum.

    Returns:
        `tuple`: the cleaned [`~datasets.Dataset`] or [`Stream`], and its [`CleaningReport`].

    Raises:
        ValueError: if the dataset is empty or lacks a column, or `max_per_query` is below 1.
    """
    if max_per_query is not None and max_per_query < 1:
        raise ValueError(f"max_per_query={max_per_query} must be 1 or more.")
    require_columns(dataset, [*query, *document])
    if isinstance(dataset, Dataset):
        hashes = hashes_of(DatasetShard("The dataset", dataset.select_columns([*query, *document])), query, document)
        kept, report = kept_pairs(hashes, max_per_query)
        return dataset.select(np.flatnonzero(kept)), report
    shards = streamed(dataset).shards
    parts = [hashes_of(shard, query, document) for shard in shards]
    kept, report = kept_pairs(np.concatenate(parts), max_per_query)
    ends = np.cumsum([len(part) for part in parts])[:-1]
    return Stream([KeptRows(*each) for each in zip(shards, np.split(kept, ends), strict=True)]), report


def hashes_of(shard: Shard, query: Sequence[str], document: Sequence[str]) -> np.ndarray:
    """Hashes of the query and of the pair of each row, `(rows, 2)`, which depend on where columns begin and end."""

    def of_rows() -> Iterator[tuple[int, int]]:
        for row in shard.rows():
            asked, pair = ([row.values.get(name) for name in names] for names in (query, [*query, *document]))
            yield _hash(asked), _hash(pair)

    return np.fromiter(of_rows(), np.dtype((np.uint64, 2)))


def kept_pairs(hashes: np.ndarray, max_per_query: int | None) -> tuple[np.ndarray, CleaningReport]:
    """
    Which pairs [`clean_pairs`] keeps.

    Args:
        hashes (`np.ndarray` of shape `(rows, 2)`): Those of the query and of the pair in each row.
        max_per_query (`int`, *optional*): Maximum number of documents per query; `None` is no maximum.

    Returns:
        `tuple`: a mask `(rows,)`, and the report.
    """
    different = np.sort(np.unique(hashes[:, 1], return_index=True)[1])  # the first row of each pair
    kept = different
    if max_per_query is not None:
        order = np.argsort(hashes[different, 0], kind="stable")
        queries = hashes[different, 0][order]
        before = np.arange(len(queries)) - np.searchsorted(queries, queries)  # documents of the query before it
        kept = different[order[before < max_per_query]]
    mask = np.zeros(len(hashes), dtype=bool)
    mask[kept] = True
    return mask, CleaningReport(len(hashes), len(hashes) - len(different), len(different) - len(kept))


@dataclass(frozen=True)
class KeptRows:
    """
    Some rows of a [`Shard`], as a shard.

    Args:
        shard ([`Shard`]): The shard.
        kept (`np.ndarray` of shape `(rows,)`): Mask of its rows.
    """

    shard: Shard
    kept: np.ndarray

    @property
    def name(self) -> str:
        return self.shard.name

    @property
    def size(self) -> int | None:
        return self.shard.size

    def rows(self, start: int = 0) -> Iterator[Row]:
        numbers = np.flatnonzero(self.kept)[start:]
        if len(numbers):
            first = int(numbers[0])
            pairs = zip(self.kept[first : numbers[-1] + 1], self.shard.rows(first), strict=False)
            yield from (row for keep, row in pairs if keep)


def _hash(values: Sequence[Any]) -> int:
    return int.from_bytes(blake2b(repr(values).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
