"""Which texts share a forward pass: the cheapest division, within the limit of tokens."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from tests.conftest import padded_batch
from trainers.core.chunks import Flattened, PassCost, TextRows, chunked, padded_in_row_order, text_lengths


def cost_of(chunks: list[list[int]], lengths: list[int], cost: PassCost) -> int:
    return sum(len(chunk) * max(lengths[row] for row in chunk) + cost.overhead for chunk in chunks)


def cheapest(lengths: list[int], cost: PassCost) -> int:
    """The lowest cost of all divisions of the sorted texts at any positions."""
    found = []
    ordered = sorted(lengths, reverse=True)
    for count in range(len(lengths)):
        for cuts in itertools.combinations(range(1, len(lengths)), count):
            parts = [ordered[a:b] for a, b in itertools.pairwise((0, *cuts, len(lengths)))]
            if cost.most_tokens and any(len(part) > 1 and len(part) * part[0] > cost.most_tokens for part in parts):
                continue
            found.append(sum(len(part) * part[0] + cost.overhead for part in parts))
    return min(found)


@pytest.mark.parametrize("overhead", [0, 1, 7, 30, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_no_division_costs_less(overhead, seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 20) for _ in range(9)]
    cost = PassCost(overhead)
    chunks = chunked(lengths, cost)
    assert sorted(itertools.chain(*chunks)) == list(range(9))
    assert cost_of(chunks, lengths, cost) == cheapest(lengths, cost)


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


def test_lengths_end_at_the_last_real_token():
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert text_lengths(mask).tolist() == [2, 3, 1, 4]


def test_columns_join_and_part_again():
    first, second = padded_batch(lengths=(2, 5)), padded_batch(lengths=(7, 1, 3))
    texts = TextRows.of([first, second])
    assert texts is not None
    assert (texts.shapes, texts.lengths, texts.padded_left) == (((2, 5), (3, 7)), (2, 5, 7, 1, 3), False)
    rows = texts.take([1, 4])
    assert torch.equal(rows["input_ids"][0], first["input_ids"][1])
    assert torch.equal(rows["input_ids"][1], second["input_ids"][2, :5])
    assert [len(part) for part in texts.split(torch.zeros(5, 2))] == [2, 3]
    left = {name: value.flip(1) for name, value in first.items()}
    assert TextRows.of([left]).padded_left


def test_columns_that_cannot_be_joined():
    batch = padded_batch()
    assert TextRows.of([batch, {**batch, "position_ids": batch["input_ids"]}]) is None
    assert TextRows.of([{"input_ids": batch["input_ids"]}]) is None
    assert TextRows.of([{**batch, "cu_seq_lens_q": torch.tensor([0, 3])}]) is None


def test_token_states_return_to_their_places():
    generator = torch.Generator().manual_seed(0)
    chunks = [[2, 0], [1], [3]]
    parts = [
        torch.randn(len(chunk), tokens, 3, dtype=torch.float64, generator=generator).requires_grad_()
        for chunk, tokens in zip(chunks, (4, 2, 1), strict=True)
    ]
    padded = padded_in_row_order(parts, chunks, 5)
    expected = torch.zeros(4, 5, 3, dtype=torch.float64)
    for chunk, part in zip(chunks, parts, strict=True):
        for row, values in zip(chunk, part, strict=True):
            expected[row, : len(values)] = values
    assert torch.equal(padded, expected)
    assert torch.autograd.gradcheck(lambda *values: padded_in_row_order(values, chunks, 5), parts)


def test_flattened_states_are_padded_again():
    batch = padded_batch(lengths=(3, 0, 2))
    flat = Flattened.of(batch, first_position=2)
    assert flat.inputs["position_ids"].tolist() == [[2, 3, 4, 2, 3]]
    assert flat.inputs["cu_seq_lens_q"].tolist() == [0, 3, 3, 5]
    assert flat.inputs["max_length_k"] == 3
    states = torch.randn(1, 5, 4, requires_grad=True)
    padded = flat.padded(states)
    assert torch.equal(padded[batch["attention_mask"].bool()], states[0])
    assert not padded[~batch["attention_mask"].bool()].any()
    (grad,) = torch.autograd.grad((padded * 2).sum(), states)
    assert math.isclose(grad.sum().item(), 40)
