"""Starbucks as its formulas say."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.conftest import padded_batch
from tests.trainers.pooled_texts import TAU, assert_same, info_nce, kl
from trainers import (
    Grid,
    NestedModel,
    Starbucks,
)


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


def test_what_stands_in_an_error_is_what_was_given(tiny_model):
    model, texts = NestedModel(tiny_model, Starbucks(Grid.parse("2x8,6x32"))), padded_batch(lengths=(3,))
    with pytest.raises(ValueError, match="a batch of one pair without hard negatives"):
        model(a=texts, b=texts)
    with pytest.raises(ValueError, match="two text columns or more; got text"):
        model(**padded_batch())
