"""Cleaning of pairs: identical ones, and queries that occur too often."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
from datasets import Dataset, IterableDataset

from trainers.core.streams import Stream
from trainers.data import pairs
from trainers.data.files import stream_files
from trainers.data.pairs import CleaningReport, clean_pairs, kept_pairs


PAIRS = [
    ("a", "one", "x"),
    ("a", "one", "x"),  # identical
    ("b", "one", "x"),
    ("a", "two", "x"),
    ("a", "three", "x"),  # a third of "a"
    ("a", "two", "x"),  # identical
    ("a", "two", "y"),  # another document, and a third of "a"
    ("b", "", "onex"),
    ("b", "one", "x"),  # identical
]


def rows() -> list[dict[str, str]]:
    return [{"query": query, "title": title, "text": text} for query, title, text in PAIRS]


def as_dataset(kind: str, folder) -> Dataset | IterableDataset | Stream:
    if kind == "map":
        return Dataset.from_list(rows())
    if kind == "stream":
        return Dataset.from_list(rows()).to_iterable_dataset()
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows())))
    return stream_files([str(folder / "pairs.jsonl")])


@pytest.mark.parametrize("kind", ["map", "stream", "file"])
def test_identical_pairs_and_frequent_queries_are_cut(tmp_path, kind):
    dataset = as_dataset(kind, tmp_path)
    cleaned, report = clean_pairs(dataset, ["query"], ["title", "text"], max_per_query=2)
    assert isinstance(cleaned, Dataset if kind == "map" else Stream)
    for _ in range(2):  # a second epoch starts anew
        kept = [(row["query"], row["title"], row["text"]) for row in cleaned]
        assert kept == [PAIRS[index] for index in (0, 2, 3, 7)]
        assert (report.rows, report.identical, report.over_cap) == (9, 3, 2)
    assert str(report) == (
        "Kept 4 of 9 pairs; dropped 3 duplicates and 2 over the maximum number of documents per query."
    )


def test_without_a_cap_only_identical_pairs_go():
    cleaned, report = clean_pairs(Dataset.from_list(rows()), ["query"], ["title", "text"])
    assert len(cleaned) == 6
    assert report.over_cap == 0


def test_a_stream_is_not_read_ahead():
    seen = []

    def endless():
        index = 0
        while True:
            seen.append(index)
            yield {"query": f"q{index}", "text": "d"}
            index += 1

    cleaned, report = clean_pairs(IterableDataset.from_generator(endless), ["query"], ["text"])
    assert [row["query"] for row, _ in zip(cleaned, range(3), strict=False)] == ["q0", "q1", "q2"]
    assert report.rows == len(seen) <= 5


def test_cleaning_refuses_bad_input():
    with pytest.raises(ValueError, match="max_per_query=0 must be 1 or more"):
        clean_pairs(Dataset.from_list(rows()), ["query"], ["text"], max_per_query=0)
    with pytest.raises(ValueError, match=r"lacks the column\(s\) body; it has query, title, text"):
        clean_pairs(Dataset.from_list(rows()), ["query"], ["body"])
    with pytest.raises(ValueError, match="The dataset is empty"):
        clean_pairs(Dataset.from_list(rows()).select([]), ["query"], ["text"])


def some_pairs(count: int) -> Iterator[dict[str, str]]:
    """Pairs of which many occur twice, with some queries that occur often."""
    draw = random.Random(5)
    for _ in range(count):
        yield {"query": f"q{int(draw.expovariate(3 / count))}", "text": f"d{draw.randrange(3)}"}


def batched(rows: Iterator[dict[str, str]], size: int) -> Iterator[list[dict[str, str]]]:
    while batch := list(islice(rows, size)):
        yield batch


def in_memory(rows: Iterator[dict[str, str]], max_per_query: int | None) -> tuple[list[int], CleaningReport]:
    """The same, with all that was seen in sets."""
    kept, seen, asked, report = [], set(), Counter(), CleaningReport()
    for index, row in enumerate(rows):
        report.rows += 1
        pair = (row["query"], row["text"])
        if pair in seen:
            report.identical += 1
        elif max_per_query is not None and asked[row["query"]] >= max_per_query:
            report.over_cap += 1
        else:
            seen.add(pair)
            asked[row["query"]] += 1
            kept.append(index)
    return kept, report


@pytest.mark.parametrize("max_per_query", [None, 1, 2])
@pytest.mark.parametrize(("limit", "batch"), [(1, 1), (7, 50), (100, 3), (10**6, 1000)])
def test_hashes_on_disk_give_the_same_pairs_in_the_same_order(max_per_query, limit, batch):
    report = CleaningReport()
    found = kept_pairs(
        batched(some_pairs(3000), batch), ["query"], ["text"], max_per_query=max_per_query, report=report, limit=limit
    )
    kept, expected = in_memory(some_pairs(3000), max_per_query)
    assert [index for index, _ in found] == kept
    assert report == expected and 0 < report.identical < 3000


def test_a_dataset_is_selected_part_by_part(monkeypatch):
    monkeypatch.setattr(pairs, "SELECTED_AT_ONCE", 100)
    dataset = Dataset.from_generator(some_pairs, gen_kwargs={"count": 1000})
    cleaned, _ = clean_pairs(dataset, ["query"], ["text"], max_per_query=2)
    kept, _ = in_memory(some_pairs(1000), 2)
    assert len(kept) > 300 and cleaned.to_list() == [dataset[index] for index in kept]
    again, _ = clean_pairs(cleaned, ["query"], ["text"], max_per_query=2)  # a dataset with rows left out
    assert again.to_list() == cleaned.to_list()


def added_memory(count: int, limit: int) -> int:
    """Bytes at the peak of cleaning so many different pairs."""
    rows = ({"query": f"q{number // 2}", "text": f"d{number}"} for number in range(count))
    found = kept_pairs(batched(rows, 500), ["query"], ["text"], max_per_query=3, report=CleaningReport(), limit=limit)
    tracemalloc.start()
    assert sum(1 for _ in found) == count
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_number_of_pairs():
    few, many = added_memory(8000, 1000), added_memory(40_000, 1000)
    assert many < few + 5e5
    assert added_memory(40_000, 10**9) > few + 2e6  # what it would be without files
