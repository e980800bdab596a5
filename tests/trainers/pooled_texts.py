"""Pooled embeddings of three text columns, and naive losses of them."""

from __future__ import annotations

import torch
from torch.nn import functional

from trainers import (
    NestedBatch,
)
from trainers.core.states import PooledStates


TAU = 0.1


WIDTH, LAYERS = 8, (1, 2, 3)


def batch_of(leaves: dict[int, list[torch.Tensor]]) -> NestedBatch:
    names = ("anchor", "positive", "negative")
    states = [PooledStates({layer: leaves[layer][column] for layer in leaves}, "mean") for column in range(3)]
    return NestedBatch(texts=dict(zip(names, states, strict=True)))


def info_nce(columns: list[torch.Tensor], dim: int) -> torch.Tensor:
    anchors, *others = (functional.normalize(column[:, :dim], dim=1) for column in columns)
    return functional.cross_entropy(anchors @ torch.cat(others).T / TAU, torch.arange(len(anchors)))


def kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Mean over rows of KL(softmax(teacher) || softmax(student))."""
    p, q = teacher.detach().softmax(dim=1), student.softmax(dim=1)
    return (p * (p.log() - q.log())).sum(dim=1).mean()


def assert_same(objective, leaves, expected):
    """The loss of an objective, and its gradient in every embedding."""
    loss = objective.total(objective(batch_of(leaves)))
    torch.testing.assert_close(loss, expected)
    inputs = [leaf for columns in leaves.values() for leaf in columns]
    actual, wanted = (torch.autograd.grad(x, inputs, materialize_grads=True) for x in (loss, expected))
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)
