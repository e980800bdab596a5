"""2DMSE as its formulas say."""

from __future__ import annotations

import torch

from m3bert.trainers import Grid, Matryoshka2d
from tests.trainers.pooled_texts import TAU, assert_same, batch_of, info_nce, kl


def expected_2dmse(leaves, layer, dim, temperature=0.3):
    student, teacher = torch.cat(leaves[layer]), torch.cat(leaves[3])
    alignment = sum(
        temperature * kl(teacher[:, :width] / temperature, student[:, :width] / temperature) for width in (dim, 8)
    )
    parts = (
        info_nce(leaves[3], 8),
        info_nce(leaves[3], dim),
        info_nce(leaves[layer], 8),
        info_nce(leaves[layer], dim),
    )
    return sum(parts) + 2.0 * alignment


def test_2dmse_draws_a_layer_and_a_dim(leaves):
    objective = Matryoshka2d(Grid.parse("1,2,3x2,4,8"), temperature=TAU, kl_weight=2.0).train()
    every = {(layer, dim): expected_2dmse(leaves, layer, dim).item() for layer in (1, 2) for dim in (2, 4)}
    drawn = set()
    for _ in range(40):
        loss = objective.total(objective(batch_of(leaves))).item()
        drawn.add(min(every, key=lambda choice: abs(every[choice] - loss)))
        assert min(abs(value - loss) for value in every.values()) < 1e-9
    assert drawn == set(every)


def test_2dmse_averages_over_all_draws_in_evaluation(leaves):
    objective = Matryoshka2d(Grid.parse("1,2,3x2,4,8"), temperature=TAU, kl_weight=2.0).eval()
    expected = sum(expected_2dmse(leaves, layer, dim) for layer in (1, 2) for dim in (2, 4)) / 4
    assert_same(objective, leaves, expected)
