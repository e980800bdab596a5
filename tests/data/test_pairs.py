"""Cleaning of pairs: identical ones, and queries that occur too often; and the pairs that come with Python."""

import random
from collections import Counter

import pytest
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

from m3bert.data.pairs import clean_pairs
from m3bert.data.stdlib_docs import docstring_pairs, split_by_module, stdlib_pairs


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


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_identical_pairs_and_frequent_queries_are_cut(shards):
    dataset = Dataset.from_list(rows())
    pairs = dataset.to_iterable_dataset(num_shards=shards) if shards else dataset
    cleaned, report = clean_pairs(pairs, ["query"], ["title", "text"], max_per_query=2)
    assert type(cleaned) is type(pairs)
    for _ in range(2):
        remaining = [(row["query"], row["title"], row["text"]) for row in cleaned]
        assert remaining == [PAIRS[index] for index in (0, 2, 3, 7)]
    assert report == {"rows": 9, "duplicates": 3, "over": 2}


def some_pairs(count: int) -> list[dict[str, str]]:
    """Pairs of which many occur twice, with some queries that occur often."""
    draw = random.Random(5)
    return [
        {"query": f"q{int(draw.expovariate(3 / count))}", "text": f"d{draw.randrange(3)}", "row": str(row)}
        for row in range(count)
    ]


def one_by_one(rows: list[dict[str, str]], max_per_query: int | None) -> list[dict[str, str]]:
    """What is kept, with sets and counters."""
    remaining, seen, asked = [], set(), Counter()
    for row in rows:
        pair = (row["query"], row["text"])
        if pair not in seen and (max_per_query is None or asked[row["query"]] < max_per_query):
            remaining.append(row)
            asked[row["query"]] += 1
        seen.add(pair)
    return remaining


@pytest.mark.parametrize("max_per_query", [None, 1, 2])
@pytest.mark.parametrize("shards", [0, 1, 7])
def test_the_kept_pairs_are_those_of_reading_one_by_one(max_per_query, shards):
    dataset = Dataset.from_list(some_pairs(3000))
    expected = one_by_one(some_pairs(3000), max_per_query)
    pairs = dataset.to_iterable_dataset(num_shards=shards) if shards else dataset
    cleaned, report = clean_pairs(pairs, ["query"], ["text"], max_per_query=max_per_query)
    assert [*cleaned] == expected
    assert report["rows"] == 3000 and 3000 - report["duplicates"] - report["over"] == len(expected)
    assert 0 < report["duplicates"] < 3000


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (2, 1), (3, 2)])
def test_every_reader_of_a_stream_keeps_the_same_pairs(ranks, workers):
    dataset = Dataset.from_list(some_pairs(300)).to_iterable_dataset(num_shards=3)
    cleaned, _ = clean_pairs(dataset, ["query"], ["text"], max_per_query=1)
    actual = [
        row["row"]
        for rank in range(ranks)
        for row in DataLoader(split_dataset_by_node(cleaned, rank, ranks), batch_size=None, num_workers=workers)
    ]
    assert sorted(actual, key=int) == [row["row"] for row in one_by_one(some_pairs(300), 1)]
    shuffled = cleaned.shuffle(seed=3, buffer_size=20)
    assert sorted((row["row"] for row in shuffled), key=int) == sorted(actual, key=int)


def test_the_pairs_are_many_and_each_is_there_once():
    pairs = stdlib_pairs()
    assert len(pairs) > 2500
    assert len({pair.summary for pair in pairs}) == len({pair.body for pair in pairs}) == len(pairs)
    modules = {pair.module for pair in pairs}
    assert {"textwrap", "builtins.str"} <= modules
    assert any(module.startswith("topics.") for module in modules)


def test_no_module_is_in_both_parts():
    train, test = split_by_module(stdlib_pairs())
    assert not {pair.module for pair in train} & {pair.module for pair in test}
    assert 800 <= len(test) < 1000
    assert all(pair.is_clean for pair in test)


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Join two paths.\n\n" + "word " * 40, ("Join two paths.", True)),
        ("Join two paths.\n" + "word " * 40, ("Join two paths.", True)),
        ("Join two or more\n" + "word " * 40, ("Join two or more", False)),
        ("Join two paths.\n\n" + "word " * 10, ("Join two paths.", False)),
        ("Join two paths.\n\n" + "word " * 7, None),
        ("join(a, b) -> str\n\nJoin two paths.\n" + "word " * 40, ("Join two paths.", True)),
        ("Join.\n\n" + "word " * 40, None),
        ("Join two paths.", None),
        ("", None),
        (None, None),
    ],
)
def test_docstrings_are_split_at_their_summary(docstring, expected):
    pair = next(docstring_pairs("module", "name", docstring), None)
    assert (pair and (pair.summary, pair.is_clean)) == expected


def test_private_names_are_not_measured_by():
    for name, public in {"a.b": True, "a._b": False, "_a.b": False, "a.__b__": True}.items():
        (pair,) = docstring_pairs("module", name, "Join two paths.\n\n" + "word " * 40)
        assert pair.is_clean == public
