"""Clean text pairs: drop duplicates, and limit the number of documents per query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets

from ..utils.hashing import hash_of
from .dataset_checks import require_columns


def clean_pairs(
    dataset: Dataset | IterableDataset,
    query: Sequence[str],
    document: Sequence[str],
    *,
    max_per_query: int | None = None,
) -> tuple[Dataset | IterableDataset, Counter[str]]:
    """
    Drop duplicate pairs, and keep at most `max_per_query` documents per query, the first ones, so that frequent
    queries do not dominate the batches (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), section 2.3
    and appendix B, stage 3). All pairs are read and hashed once, also of a stream, which therefore must have an end.
    `query` and `document` are their columns. Returns the cleaned dataset, of the same kind, and the numbers of `rows`
    read, of `duplicates`, and of pairs `over` the maximum. ValueError if the dataset is empty or lacks a column.
    """
    require_columns(dataset, [*query, *document])
    report, seen, documents = Counter[str](), set[int](), Counter[int]()

    def keeps(row: Mapping[str, object]) -> bool:
        asked, pair = (hash_of(repr([row[name] for name in names])) for names in (query, [*query, *document]))
        report["rows"] += 1
        report["duplicates"] += (twice := pair in seen)
        seen.add(pair)
        documents[asked] += not twice
        over = not twice and max_per_query is not None and documents[asked] > max_per_query
        report["over"] += over
        return not twice and not over

    if isinstance(dataset, Dataset):
        mask = np.fromiter(map(keeps, dataset.select_columns([*query, *document])), bool, len(dataset))
        return dataset.select(np.flatnonzero(mask)), report
    shards = [dataset.shard(dataset.num_shards, number) for number in range(dataset.num_shards)]
    masks = [np.fromiter(map(keeps, shard), bool) for shard in shards]
    # Rows are known by their index in a shard, whichever process reads it.
    parts = [
        shard.filter(partial(_kept, mask=mask), with_indices=True) for shard, mask in zip(shards, masks, strict=True)
    ]
    return concatenate_datasets(parts), report


def _kept(row: Mapping[str, object], index: int, mask: np.ndarray) -> bool:
    return bool(mask[index])
