"""Clean text pairs: drop duplicates, and limit the number of documents per query."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from datasets import Dataset, IterableDataset

from ..core.dataset_checks import require_columns


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
    dataset: Dataset | IterableDataset,
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
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): The pairs.
        query (`Sequence[str]`): Columns of the query.
        document (`Sequence[str]`): Columns of the document.
        max_per_query (`int`, *optional*): Maximum number of documents per query; `None` is no maximum.

    Returns:
        `tuple`: the cleaned dataset, of the same type, and its [`CleaningReport`]. A stream is cleaned while it is
        read, again in every pass, and its report is updated meanwhile, except when worker processes read it.

    Raises:
        ValueError: if the dataset is empty or lacks a column, or `max_per_query` is below 1.
    """
    if max_per_query is not None and max_per_query < 1:
        raise ValueError(f"max_per_query={max_per_query} must be 1 or more.")
    require_columns(dataset, [*query, *document])
    report = CleaningReport()

    def kept(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        report.rows = report.identical = report.over_cap = 0
        pairs: set[bytes] = set()
        documents: Counter[bytes] = Counter()
        for index, row in enumerate(rows):
            report.rows += 1
            pair, asked = _digest(row, [*query, *document]), _digest(row, query)
            if pair in pairs:
                report.identical += 1
            elif max_per_query is not None and documents[asked] >= max_per_query:
                report.over_cap += 1
            else:
                pairs.add(pair)
                documents[asked] += 1
                yield index, row

    if isinstance(dataset, Dataset):
        texts = dataset.select_columns([*query, *document])
        return dataset.select([index for index, _ in kept(texts)]), report

    def stream() -> Iterator[Mapping[str, Any]]:
        for _, row in kept(dataset):
            yield row

    return IterableDataset.from_generator(stream, features=dataset.features), report


def _digest(row: Mapping[str, Any], columns: Sequence[str]) -> bytes:
    """A hash of some columns of a row, which also depends on where the columns begin and end."""
    return blake2b(repr([row[column] for column in columns]).encode(), digest_size=8).digest()
