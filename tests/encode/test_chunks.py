"""Which texts share a forward pass: the cheapest division, within the limit of tokens."""

import itertools
import random

import pytest

from m3bert.encode.batch import PassCost, chunked


def cheapest(lengths: list[int], cost: PassCost) -> int:
    """The lowest cost of all divisions of the sorted texts at any positions."""
    actual = []
    ordered = sorted(lengths, reverse=True)
    for count in range(len(lengths)):
        for cuts in itertools.combinations(range(1, len(lengths)), count):
            parts = [ordered[a:b] for a, b in itertools.pairwise((0, *cuts, len(lengths)))]
            if cost.most_tokens and any(len(part) > 1 and len(part) * part[0] > cost.most_tokens for part in parts):
                continue
            actual.append(sum(len(part) * part[0] + cost.overhead for part in parts))
    return min(actual)


@pytest.mark.parametrize("overhead", [0, 1, 7, 30, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_no_division_costs_less(overhead, seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 20) for _ in range(9)]
    cost = PassCost(overhead)
    chunks = chunked(lengths, cost)
    assert sorted(itertools.chain(*chunks)) == list(range(9))
    spent = sum(len(chunk) * max(lengths[row] for row in chunk) + overhead for chunk in chunks)
    assert spent == cheapest(lengths, cost)


@pytest.mark.parametrize("seed", range(4))
def test_no_pass_exceeds_the_limit_except_of_one_text(seed):
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 3, 3, 8, 8, 8, 40]) for _ in range(60)]
    chunks = chunked(lengths, PassCost(2, most_tokens=24))
    assert sorted(itertools.chain(*chunks)) == list(range(60))
    for chunk in chunks:
        assert len(chunk) == 1 or len(chunk) * max(lengths[row] for row in chunk) <= 24
    assert [max(lengths[row] for row in chunk) for chunk in chunks] == sorted(
        (max(lengths[row] for row in chunk) for chunk in chunks), reverse=True
    )
    # Passes of equal length share their texts evenly: no pass is nearly empty.
    threes = [len(chunk) for chunk in chunked([3] * 33, PassCost(2, most_tokens=24))]
    assert len(threes) == 5
    assert max(threes) - min(threes) <= 1


def test_one_chunk_keeps_the_order():
    assert chunked([1, 3, 2], PassCost(100)) == [[0, 1, 2]]
    assert chunked([0, 0], PassCost(1)) == [[0, 1]]
    assert len(chunked([5, 1, 5, 1], PassCost(1))) == 2
    assert PassCost(1, 10).limited(20).most_tokens == 10
    assert PassCost(1, 30).limited(20).most_tokens == PassCost(1).limited(20).most_tokens == 20
