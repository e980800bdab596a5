"""SimCSE, ESE, 2DMSE and Starbucks as their formulas say."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from m3bert.trainers import Espresso, Grid, Matryoshka2d, SimCSE, Starbucks
from tests.trainers.pooled_texts import TAU, WIDTH, assert_same, batch_of, info_nce, kl


@pytest.mark.parametrize("weighting", ["log", "uniform"])
def test_espresso(leaves, weighting):
    def align(columns, dim):
        everything = torch.cat(columns)
        teacher = everything.detach()
        u, s, _ = torch.linalg.svd(torch.softmax(teacher.T @ teacher / math.sqrt(WIDTH), dim=1))
        basis = u @ torch.diag(s)
        basis = basis * torch.sign(basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)))
        target, student = (teacher @ basis)[:, :dim], everything[:, :dim]
        return functional.mse_loss(student, target) + kl(target, student)

    expected = info_nce(leaves[3], 8) + info_nce(leaves[3], 2) + align(leaves[3], 2)
    for layer in (1, 2):
        weight = 1 / (1 + math.log(layer)) if weighting == "log" else 1.0
        one = info_nce(leaves[layer], 2) + align(leaves[layer], 2)
        expected = expected + weight * one / 2
    grid = Grid.parse("1x2,2x2,3x2,3x8")
    assert_same(Espresso(grid, temperature=TAU, layer_weighting=weighting), leaves, expected)


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


def test_simcse_is_the_loss_of_the_full_size(leaves):
    assert_same(SimCSE(Grid.parse("3x8"), temperature=TAU), leaves, info_nce(leaves[3], 8))


def test_starbucks(leaves):
    expected = torch.zeros((), dtype=torch.float64)

    def scores(columns, dim):
        anchors, *others = (functional.normalize(column[:, :dim], dim=1) for column in columns)
        return anchors @ torch.cat(others).T / TAU

    for layer, dim in ((1, 2), (2, 4), (3, 8)):
        expected = expected + info_nce(leaves[layer], dim)
        if layer < 3:
            expected = expected + 0.5 * kl(scores(leaves[3], 8), scores(leaves[layer], dim))
    assert_same(Starbucks(Grid.parse("1x2,2x4,3x8"), temperature=TAU, kl_weight=0.5), leaves, expected)
