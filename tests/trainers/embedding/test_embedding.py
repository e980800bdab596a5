"""What all objectives on pooled embeddings share."""

import itertools
import math

import pytest
import torch

from m3bert.trainers import Contrastive, Espresso, Grid, Matryoshka2d, SimCSE, Starbucks
from tests.conftest import refused
from tests.trainers.pooled_texts import EQUAL_TEXTS, NO_NEGATIVES, TAU, batch_of, info_nce, own_texts
from tests.trainers.tiny_run import named


REVERSED = own_texts(EQUAL_TEXTS["positive"], EQUAL_TEXTS["anchor"])
# The negatives of the last two rows are their own anchor and positive.
OWN_TEXTS = EQUAL_TEXTS | {"negative": [30, 31, 32, 13, 24]}
EQUAL_TO_POSITIVES = own_texts(EQUAL_TEXTS["anchor"], EQUAL_TEXTS["positive"])


def test_equal_texts_are_no_negatives(leaves):
    batch, (anchors, positives, _) = batch_of(leaves, EQUAL_TEXTS), leaves[3]
    forwards = info_nce(leaves[3], 8, NO_NEGATIVES)
    backwards = info_nce([positives, anchors], 8, REVERSED)
    for changes, expected in (
        ({}, forwards),
        ({"mask_duplicates": False}, info_nce(leaves[3], 8)),
        ({"symmetric": True}, (forwards + backwards) / 2),
    ):
        found = named(Contrastive(Grid.parse("3x8"), temperature=TAU, **changes)(batch))["contrastive_3x8"]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("ids", "equal", "backwards"), [(None, [], []), (OWN_TEXTS, [*EQUAL_TO_POSITIVES, (3, 8), (4, 9)], REVERSED)]
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_own_negatives_are_those_of_their_row_alone(leaves, ids, equal, backwards, symmetric):
    """Also in a ring, and not those that equal a text of their pair; they play no part in the other direction."""
    others = [(row, 5 + other) for row, other in itertools.permutations(range(5), 2)]
    expected = info_nce(leaves[3], 8, others + equal)
    if symmetric:
        expected = (expected + info_nce(leaves[3][1::-1], 8, backwards)) / 2
    inputs = leaves[3]
    wanted = torch.autograd.grad(expected, inputs)
    for ring in (False, True):
        options = {"own_negatives": True, "symmetric": symmetric, "ring": ring}
        objective = Contrastive(Grid.parse("3x8"), temperature=TAU, **options)
        loss = objective.total(objective(batch_of(leaves, ids)))
        torch.testing.assert_close(loss, expected)
        for one, other in zip(torch.autograd.grad(loss, inputs), wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_missing_negatives_are_named(leaves):
    batch, one = (batch_of({3: [column[:rows] for column in leaves[3]]}) for rows in (5, 1))
    objective, alone = (Contrastive(Grid.parse("3x8"), own_negatives=own) for own in (False, True))
    objective(one)
    for each in (batch, one):
        each.texts.pop("negative")
    refused("a batch of one pair without hard negatives", objective, one)
    refused("needs a column of hard negatives; got anchor, positive", alone, batch)


def test_a_learned_temperature(leaves):
    objective = Contrastive(Grid.parse("3x8"), temperature=TAU, learn_temperature=True)
    loss = objective.total(objective(batch_of(leaves)))
    scale = torch.tensor(-math.log(TAU), dtype=torch.float64, requires_grad=True)
    expected = info_nce(leaves[3], 8, tau=(-scale).exp())
    torch.testing.assert_close(loss, expected)
    (actual,), (wanted,) = torch.autograd.grad(loss, objective.log_scale), torch.autograd.grad(expected, scale)
    torch.testing.assert_close(actual[0].double(), wanted)
    with torch.no_grad():
        objective.log_scale.fill_(9.0)
    objective.constrain()
    assert objective.temperature.item() == pytest.approx(0.01)
    assert objective.temperature.ndim == 0
    (back,) = torch.autograd.grad(objective.total(objective(batch_of(leaves))), objective.log_scale)
    assert back != 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimCSE(Grid.parse("2x4,8")), r"SimCSE trains one granularity, but the grid 2x4,8 has 2"),
        (lambda: Matryoshka2d(Grid.parse("2,3x8")), "2DMSE needs a grid of two or more layers x two or more dims"),
        (lambda: Matryoshka2d(Grid.parse("1x2,2x8,3x8")), "2DMSE needs a grid of two or more layers x two"),
        (lambda: Matryoshka2d(Grid.parse("2,3x4,8"), kl_temperature=0), "kl_temperature=0 must be above 0"),
        (lambda: Starbucks(Grid.parse("2,3x4,8")), "sizes whose layer and dim increase together.*is 2,3x4,8"),
        (lambda: Starbucks(Grid.parse("2x8,3x4")), "sizes whose layer and dim increase together"),
        (lambda: Espresso(Grid.parse("3x8"), layer_weighting="linear"), "legal values: log, uniform"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
