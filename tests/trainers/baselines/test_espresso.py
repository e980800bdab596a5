"""ESE as its formulas say."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from m3bert.trainers import Espresso, Grid
from tests.trainers.pooled_texts import TAU, WIDTH, assert_same, info_nce, kl


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
