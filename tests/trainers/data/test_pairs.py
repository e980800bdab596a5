"""Cleaning of pairs: identical ones, and queries that occur too often."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice

import pytest
from datasets import Dataset, IterableDataset

from trainers.core.streams.stream import DatasetShard, Position, Reading, Stream
from trainers.data.files import stream_files
from trainers.data.pairs import clean_pairs


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
    for _ in range(2):
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


def test_cleaning_refuses_bad_input():
    with pytest.raises(ValueError, match="max_per_query=0 must be 1 or more"):
        clean_pairs(Dataset.from_list(rows()), ["query"], ["text"], max_per_query=0)
    with pytest.raises(ValueError, match=r"lacks the column\(s\) body; it has query, title, text"):
        clean_pairs(Dataset.from_list(rows()), ["query"], ["body"])
    with pytest.raises(ValueError, match="The dataset is empty"):
        clean_pairs(Dataset.from_list(rows()).select([]), ["query"], ["text"])


def some_pairs(count: int) -> list[dict[str, str]]:
    """Pairs of which many occur twice, with some queries that occur often."""
    draw = random.Random(5)
    return [
        {"query": f"q{int(draw.expovariate(3 / count))}", "text": f"d{draw.randrange(3)}", "row": str(row)}
        for row in range(count)
    ]


def one_by_one(rows: list[dict[str, str]], max_per_query: int | None) -> list[dict[str, str]]:
    """What is kept, with sets and counters."""
    kept, seen, asked = [], set(), Counter()
    for row in rows:
        pair = (row["query"], row["text"])
        if pair not in seen and (max_per_query is None or asked[row["query"]] < max_per_query):
            kept.append(row)
            asked[row["query"]] += 1
        seen.add(pair)
    return kept


@pytest.mark.parametrize("max_per_query", [None, 1, 2])
@pytest.mark.parametrize("shards", [0, 1, 7])
def test_the_kept_pairs_are_those_of_reading_one_by_one(max_per_query, shards):
    dataset = Dataset.from_list(some_pairs(3000))
    expected = one_by_one(some_pairs(3000), max_per_query)
    pairs = dataset.to_iterable_dataset(num_shards=shards) if shards else dataset
    cleaned, report = clean_pairs(pairs, ["query"], ["text"], max_per_query=max_per_query)
    assert [*cleaned] == expected
    assert report.rows == 3000 and report.rows - report.identical - report.over_cap == len(expected)
    assert 0 < report.identical < 3000


def test_a_stream_is_hashed_once_and_keeps_its_shards(monkeypatch):
    read, rows = Counter(), DatasetShard.rows

    def counted(self, start=0):
        for row in rows(self, start):
            read[self.name] += 1
            yield row

    monkeypatch.setattr(DatasetShard, "rows", counted)
    dataset = Dataset.from_list(some_pairs(300)).to_iterable_dataset(num_shards=3)
    cleaned, _ = clean_pairs(dataset, ["query"], ["text"], max_per_query=1)
    assert len(cleaned.shards) == 3
    before = read.total()
    expected = one_by_one(some_pairs(300), 1)
    reading = Reading(cleaned, buffer_size=20, seed=1)
    whole = list(islice(reading.rows(Position()), 3 * len(expected)))
    assert read.total() <= before + 3 * 300  # each epoch reads once
    for epoch in range(3):
        found = [row.values["row"] for row, _ in whole[epoch * len(expected) : (epoch + 1) * len(expected)]]
        assert sorted(found, key=int) == [row["row"] for row in expected]
    for taken in (1, 7, len(expected) - 1, len(expected), 2 * len(expected) + 3):
        rest = list(islice(reading.rows(whole[taken - 1][1]), 5))
        assert [row for row, _ in rest] == [row for row, _ in whole[taken : taken + 5]], taken
