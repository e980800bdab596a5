"""Starbucks as its formulas say."""

from __future__ import annotations

import torch
from torch.nn import functional

from m3bert.trainers import Grid, Starbucks
from tests.trainers.pooled_texts import TAU, assert_same, info_nce, kl


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
