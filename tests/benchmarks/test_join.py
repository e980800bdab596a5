"""The maps that `m3bert join` is compared with."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from benchmarks.reproduction.join import METHODS


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dims", [(24, 24), (24, 40), (40, 24)])
def test_every_map_learns_a_rotation(method, dims):
    inputs, targets = dims
    rows = normalize(torch.randn(700, 10) @ torch.randn(10, inputs))  # of few directions, which a rotation keeps
    turn = torch.linalg.qr(torch.randn(max(dims), max(dims)))[0][:inputs, :targets]
    goal = normalize(rows @ turn) if inputs <= targets else normalize(rows @ torch.linalg.svd(rows)[2][:targets].T)
    mapped = METHODS[method](rows[:600], goal[:600])(rows[600:])
    assert mapped.shape == (100, targets) and cosine_similarity(mapped, goal[600:]).mean() > 0.95
