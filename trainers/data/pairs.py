"""Clean text pairs: drop duplicates, and limit the number of documents per query."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset, IterableDataset, concatenate_datasets

from ..core.dataset_checks import require_columns
from ..core.streams import Row, Stream, streamed
from .hash_counts import HashCounts


ROWS_AT_ONCE = 10_000  # of a dataset whose pairs are cleaned
SELECTED_AT_ONCE = 1_000_000


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
    stage 3). The first documents of a query are kept. Memory does not grow with the number of pairs ([`kept_pairs`]),
    except for 8 bytes per pair that is kept of a [`~datasets.Dataset`].

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
    report = CleaningReport()
    columns = [*query, *document]
    if isinstance(dataset, Dataset):
        batches = dataset.select_columns(columns).iter(ROWS_AT_ONCE)
        rows = ([dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)] for batch in batches)
        kept = kept_pairs(rows, query, document, max_per_query=max_per_query, report=report)
        return selected(dataset, (index for index, _ in kept)), report

    return Stream([_CleanedShard(streamed(dataset), tuple(query), tuple(document), max_per_query, report)]), report


@dataclass(frozen=True)
class _CleanedShard:
    """The pairs of a stream that are kept, as one shard: whether a pair is kept depends on all pairs before it."""

    stream: Stream
    query: tuple[str, ...]
    document: tuple[str, ...]
    max_per_query: int | None
    report: CleaningReport

    @property
    def name(self) -> str:
        return "+".join(shard.name for shard in self.stream.shards)

    @property
    def size(self) -> int | None:
        sizes = [shard.size for shard in self.stream.shards if shard.size is not None]
        return sum(sizes) if len(sizes) == len(self.stream.shards) else None

    def rows(self, start: int = 0) -> Iterator[Row]:
        current: list[Row] = []

        def one_by_one() -> Iterator[list[Mapping[str, Any]]]:
            for row in self.stream.rows():  # no row is read before it is needed
                current[:] = [row]
                yield [row.values]

        kept = kept_pairs(
            one_by_one(), self.query, self.document, max_per_query=self.max_per_query, report=self.report
        )
        return islice((current[0] for _ in kept), start, None)


def kept_pairs(
    batches: Iterable[Sequence[Mapping[str, Any]]],
    query: Sequence[str],
    document: Sequence[str],
    *,
    max_per_query: int | None = None,
    report: CleaningReport,
    limit: int = 2**18,
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """
    The pairs that [`clean_pairs`] keeps, in their order. Hashes of what was kept are on disk, in the folder for
    temporary files (the environment variable `TMPDIR`): 8 bytes per pair, and 8 more with `max_per_query`.

    Args:
        batches (`Iterable[Sequence[Mapping]]`): Rows, a batch at a time.
        query (`Sequence[str]`): Columns of the query.
        document (`Sequence[str]`): Columns of the document.
        max_per_query (`int`, *optional*): Maximum number of documents per query; `None` is no maximum.
        report ([`CleaningReport`]): Counts what is read and dropped, from 0.
        limit (`int`, *optional*, defaults to 262144): Hashes to keep in memory, about 100 bytes each.

    Yields:
        `tuple`: the number of the row, and the row.
    """
    report.rows = report.identical = report.over_cap = 0
    with TemporaryDirectory(prefix="m3bert-pairs-", ignore_cleanup_errors=True) as folder:
        pairs, asked = (HashCounts(Path(folder, name), limit) for name in ("pairs", "queries"))
        for counts in (pairs, asked):
            counts.folder.mkdir()
        for batch in batches:
            of_pairs = [_digest(row, [*query, *document]) for row in batch]
            of_queries = [_digest(row, query) for row in batch] if max_per_query is not None else [0] * len(batch)
            older_pairs, older_queries = pairs.on_disk(of_pairs), asked.on_disk(of_queries)
            for row, pair, asks, old, before in zip(
                batch, of_pairs, of_queries, older_pairs, older_queries, strict=True
            ):
                report.rows += 1
                if old or pairs.recent[pair]:
                    report.identical += 1
                elif max_per_query is not None and before + asked.recent[asks] >= max_per_query:
                    report.over_cap += 1
                else:
                    pairs.add(pair)
                    if max_per_query is not None:
                        asked.add(asks)
                    yield report.rows - 1, row
            pairs.spill()
            asked.spill()


def selected(dataset: Dataset, indices: Iterable[int]) -> Dataset:
    """Some rows of a dataset. [`~datasets.Dataset.select`] makes a list of all indices, which takes more memory."""
    parts = []
    indices = iter(indices)
    while part := list(islice(indices, SELECTED_AT_ONCE)):
        parts.append(dataset.select(part))
    return concatenate_datasets(parts) if parts else dataset.select([])


def _digest(row: Mapping[str, Any], columns: Sequence[str]) -> int:
    """A hash of some columns of a row, which also depends on where the columns begin and end."""
    digest = blake2b(repr([row.get(column) for column in columns]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
