"""Pooled embeddings of three text columns, and naive losses of them."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from m3bert.encode.states import PooledStates
from m3bert.trainers import NestedBatch
from tests.conftest import assert_close


TAU = 0.1


WIDTH, LAYERS = 8, (1, 2, 3)
# Anchors 0 and 3 have the same positive, anchors 1 and 2 are the same text, and the positive of 1 is anchor 3. One
# negative is 4's positive, and one its own anchor.
EQUAL_TEXTS = {"anchor": [10, 11, 11, 13, 14], "positive": [20, 13, 22, 20, 24], "negative": [30, 24, 32, 13, 34]}


def own_texts(anchors: list[int], positives: list[int], negatives: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The pairs of a row and a candidate that is no negative of it: its text is the row's anchor or positive, or its
    anchor is the row's anchor."""
    texts, owners = [*positives, *negatives], [*anchors, *(None for _ in negatives)]
    return [
        (i, j)
        for i, (anchor, positive) in enumerate(zip(anchors, positives, strict=True))
        for j, (text, owner) in enumerate(zip(texts, owners, strict=True))
        if j != i and (text in (anchor, positive) or owner == anchor)
    ]


NO_NEGATIVES = own_texts(*EQUAL_TEXTS.values())


def batch_of(leaves: dict[int, list[torch.Tensor]], ids: dict[str, list[int]] | None = None) -> NestedBatch:
    names = ("anchor", "positive", "negative")
    states = [PooledStates({layer: leaves[layer][column] for layer in leaves}, "mean") for column in range(3)]
    text_ids = None if ids is None else {name: torch.tensor(value) for name, value in ids.items()}
    return NestedBatch(texts=dict(zip(names, states, strict=True)), text_ids=text_ids)


def info_nce(
    columns: list[torch.Tensor], dim: int, excluded: Sequence[tuple[int, int]] = (), tau: float | torch.Tensor = TAU
) -> torch.Tensor:
    """Of each anchor among all positives and negatives, without those pairs of an anchor and a candidate."""
    anchors, *others = (functional.normalize(column[:, :dim], dim=1) for column in columns)
    scores = anchors @ torch.cat(others).T / tau
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for pair in excluded:
        mask[pair] = True
    return functional.cross_entropy(scores.masked_fill(mask, -torch.inf), torch.arange(len(anchors)))


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
        assert_close(one, other)
