"""SimCSE."""

from __future__ import annotations

from m3bert.trainers import Grid, SimCSE
from tests.trainers.pooled_texts import TAU, assert_same, info_nce


def test_simcse_is_the_loss_of_the_full_size(leaves):
    assert_same(SimCSE(Grid.parse("3x8"), temperature=TAU), leaves, info_nce(leaves[3], 8))
