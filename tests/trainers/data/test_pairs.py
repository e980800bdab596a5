"""Cleaning of pairs: identical ones, and queries that occur too often."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, IterableDataset

from trainers.core.streams import Stream
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
