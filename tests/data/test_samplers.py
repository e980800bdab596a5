"""Batch samplers: pure batches, in proportion or in turn, without duplicates, on several ranks, in every epoch."""

from collections import Counter
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset

from m3bert.data.samplers import Batches, MultiDatasetBatchSampler, text_numbers
from m3bert.data.training_sets import NamedDatasets


SIZES = (23, 9, 14)
STARTS = [0, 23, 32]


def sampler(order="proportional", *, size=4, ranks=1, rank=0, drop_last=True, seed=0):
    parts = [Batches(rows, size * ranks, ranks, drop_last) for rows in SIZES]
    return MultiDatasetBatchSampler(parts, STARTS, order=order, seed=seed, rank=rank)


def sets_of(batches) -> list[int]:
    """The data set of each batch, whose rows are all of it."""
    actual = [{int(row) for row in np.searchsorted(STARTS, batch, side="right") - 1} for batch in batches]
    assert all(len(each) == 1 for each in actual)
    return [each.pop() for each in actual]


def test_proportional_batches_use_every_row_once():
    batches = list(sampler(drop_last=False))
    assert Counter(chain(*batches)) == Counter(range(sum(SIZES)))
    assert Counter(sets_of(batches)) == {0: 6, 1: 3, 2: 4} and len(batches) == len(sampler(drop_last=False))
    whole = list(sampler())
    assert Counter(sets_of(whole)) == {0: 5, 1: 2, 2: 3} and {len(batch) for batch in whole} == {4}
    assert sets_of(whole) != sorted(sets_of(whole)), "the data sets are mixed"


def test_round_robin_takes_turns_until_the_smallest_is_used_up():
    batches = list(sampler("round_robin"))
    assert sets_of(batches) == [0, 1, 2] * 2 and len(sampler("round_robin")) == 6
    assert max(Counter(chain(*batches)).values()) == 1


@pytest.mark.parametrize("order", ["proportional", "round_robin"])
def test_an_epoch_depends_on_its_number_and_the_seed_alone(order):
    first, again, other = sampler(order), sampler(order), sampler(order, seed=1)
    epochs = []
    for epoch in (0, 1):
        first.epoch = epoch
        epochs.append(list(first))
    again.epoch = 1
    assert list(again) == epochs[1] != epochs[0] != list(other)


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("order", ["proportional", "round_robin"])
def test_ranks_divide_the_batch_of_one_process(order, drop_last):
    whole = list(sampler(order, size=6, drop_last=drop_last))
    first, second = (list(sampler(order, size=3, ranks=2, rank=rank, drop_last=drop_last)) for rank in (0, 1))
    assert sets_of(first) == sets_of(second) == sets_of(whole)
    for one, other, both in zip(first, second, whole, strict=True):
        assert len(one) == len(other) == len(both) // 2
        assert one + other == both[: 2 * len(one)]


def test_a_rest_that_is_smaller_than_the_number_of_ranks_is_no_batch():
    parts = [Batches(9, 4, 4, drop_last=False)]
    ranks = [MultiDatasetBatchSampler(parts, [0], order="proportional", seed=0, rank=rank) for rank in range(4)]
    assert [[len(batch) for batch in each] for each in ranks] == [[1, 1]] * 4
    assert len(ranks[0]) == 2


def numbers(dataset: Dataset, *columns: str) -> np.ndarray:
    return text_numbers(dataset, SimpleNamespace(columns=columns))


@pytest.fixture
def repeating() -> Dataset:
    """Forty rows with twelve queries; a title and a text are joined, and a text is the query of another row."""
    draw = np.random.default_rng(3).integers
    rows = [{"query": f"q{draw(12)}", "title": f"t{draw(30)}", "text": f"d{draw(2)}"} for _ in range(38)]
    return Dataset.from_list(
        [*rows, {"query": "x", "title": None, "text": "q1"}, {"query": "q1", "title": "", "text": "y"}]
    )


@pytest.mark.parametrize("drop_last", [True, False])
def test_no_text_is_in_two_rows_of_a_batch(repeating, drop_last):
    texts = numbers(repeating, "query", "title+text")
    part = Batches(40, 8, 2, drop_last, texts)
    used = Counter()
    for seed in range(20):
        batches = list(part.of_epoch(np.random.default_rng(seed)))
        assert len(batches) == len(part) == 5
        for batch in batches:
            joined = [
                {repeating[row]["query"], " ".join(filter(None, (repeating[row]["title"], repeating[row]["text"])))}
                for row in batch
            ]
            assert len(set.union(*joined)) == sum(map(len, joined))
            assert len(batch) == 8 if drop_last else len(batch) % 2 == 0 and batch
        used.update(chain(*batches))
    assert used.keys() == set(range(40))
    plain = [row for seed in range(20) for row in Batches(40, 8, 2, drop_last).of_epoch(np.random.default_rng(seed))]
    assert any(len(set(texts[batch, 0].tolist())) < len(batch) for batch in plain), "the test is of repeated texts"


def test_without_repeated_texts_each_row_is_used_once_and_too_few_different_texts_are_refused():
    texts = numbers(Dataset.from_dict({"text": [f"text {row}" for row in range(30)]}), "text")
    batches = list(Batches(30, 4, 1, drop_last=False, texts=texts).of_epoch(np.random.default_rng(0)))
    assert sorted(chain(*batches)) == list(range(30))
    texts = numbers(Dataset.from_dict({"text": ["a", "b"] * 8}), "text")
    with pytest.raises(ValueError, match="no_duplicates' finds no 4 rows without equal texts: lower per_device"):
        next(Batches(16, 4, 1, drop_last=True, texts=texts).of_epoch(np.random.default_rng(0)))


def test_rows_of_several_data_sets_are_read_together():
    named = {"a": Dataset.from_dict({"x": [0, 1, 2]}), "b": Dataset.from_dict({"y": [3, 4]})}
    datasets = NamedDatasets(named)
    assert len(datasets) == 5 and datasets.starts == [0, 3]
    assert datasets.__getitems__([2, 0]) == [{"x": 2}, {"x": 0}]
    assert datasets.__getitems__([4, 3]) == [{"y": 4}, {"y": 3}] == [datasets[4], datasets[3]]
