"""Clean text pairs: drop duplicates, and limit the number of documents per query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

from datasets import Dataset, IterableDataset

from ..core.dataset_checks import require_columns
from ..core.streams import Row, Stream, streamed


@dataclass
class CleaningReport:
    """
    Counts of the pairs that [`clean_pairs`] read and dropped. For a stream: so far in the current pass.

    Args:
        rows (`int`, *optional*, defaults to 0): Pairs read.
        identical (`int`, *optional*, defaults to 0): Pairs dropped because the same pair came before.
        over_cap (`int`, *optional*, defaults to 0): Pairs dropped because the query already had `max_per_query`
            documents.
    """

    rows: int = 0
    identical: int = 0
    over_cap: int = 0

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
    stage 3). The first documents of a query are kept. Memory: hashes of about 100 bytes per pair.

    Args:
        dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or [`Stream`]): The pairs.
        query (`Sequence[str]`): Columns of the query.
        document (`Sequence[str]`): Columns of the document.
        max_per_query (`int`, *optional*): Maximum number of documents per query; `None` is no maximum.

    Returns:
        `tuple`: the cleaned [`~datasets.Dataset`] or [`Stream`], and its [`CleaningReport`]. A stream is cleaned while
        it is read, again in every pass, by each process that reads it. Its report is updated meanwhile, except when
        worker processes read it.

    Raises:
        ValueError: if the dataset is empty or lacks a column, or `max_per_query` is below 1.
    """
    if max_per_query is not None and max_per_query < 1:
        raise ValueError(f"max_per_query={max_per_query} must be 1 or more.")
    require_columns(dataset, [*query, *document])
    cleaning = _Cleaning(tuple(query), tuple(document), max_per_query, CleaningReport())
    if isinstance(dataset, Dataset):
        texts, keep = dataset.select_columns([*query, *document]), cleaning.start()
        return dataset.select([index for index, row in enumerate(texts) if keep(row)]), cleaning.report
    return Stream([_CleanedShard(streamed(dataset), cleaning)]), cleaning.report


@dataclass(frozen=True)
class _Cleaning:
    query: tuple[str, ...]
    document: tuple[str, ...]
    max_per_query: int | None
    report: CleaningReport

    def start(self) -> Callable[[Mapping[str, Any]], bool]:
        """A function that says of each row of a pass whether to keep it, and counts."""
        report = self.report
        report.rows = report.identical = report.over_cap = 0
        pairs: set[bytes] = set()
        documents: Counter[bytes] = Counter()

        def keep(row: Mapping[str, Any]) -> bool:
            report.rows += 1
            pair, asked = _digest(row, [*self.query, *self.document]), _digest(row, self.query)
            if pair in pairs:
                report.identical += 1
                return False
            if self.max_per_query is not None and documents[asked] >= self.max_per_query:
                report.over_cap += 1
                return False
            pairs.add(pair)
            documents[asked] += 1
            return True

        return keep


@dataclass(frozen=True)
class _CleanedShard:
    """The pairs of a stream that are kept, as one shard: whether a pair is kept depends on all pairs before it."""

    stream: Stream
    cleaning: _Cleaning

    @property
    def name(self) -> str:
        return "+".join(shard.name for shard in self.stream.shards)

    @property
    def size(self) -> int | None:
        sizes = [shard.size for shard in self.stream.shards]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    def rows(self, start: int = 0) -> Iterator[Row]:
        keep = self.cleaning.start()
        return islice((row for row in self.stream.rows() if keep(row.values)), start, None)


def _digest(row: Mapping[str, Any], columns: Sequence[str]) -> bytes:
    """A hash of some columns of a row, which also depends on where the columns begin and end."""
    return blake2b(repr([row.get(column) for column in columns]).encode(), digest_size=8).digest()
