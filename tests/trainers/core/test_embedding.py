"""What all objectives on pooled embeddings share."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.nn import functional

from tests.trainers.pooled_texts import EQUAL_TEXTS, NO_NEGATIVES, TAU, batch_of, info_nce
from tests.trainers.tiny_run import named
from trainers import (
    Contrastive,
    Espresso,
    Grid,
    Matryoshka2d,
    NestedBatch,
    SimCSE,
    Starbucks,
)


# As EQUAL_TEXTS, but the negative of the last row is its own positive.
OWN_TEXTS = EQUAL_TEXTS | {"negative": [30, 31, 32, 33, 24]}


def test_the_order_of_dims_and_layers_does_not_matter(leaves):
    for make in (Contrastive, Espresso, Matryoshka2d):
        terms = []
        for text in itertools.product(("1,3", "3,1"), ("2,4,8", "8,2,4", "4,8,2")):
            torch.manual_seed(0)
            terms.append(make(Grid.parse("x".join(text)))(batch_of(leaves)))
        assert all(other == terms[0] for other in terms[1:])
    grids = ("1x2,2x4,3x8", "3x8,1x2,2x4")
    terms = [Starbucks(Grid.parse(grid))(batch_of(leaves)) for grid in grids]
    assert terms[0] == terms[1]


def test_a_mean_over_the_grid_is_the_sum_divided(leaves):
    grid, totals = Grid.parse("1,3x2,8"), {}
    for reduction in ("sum", "mean"):
        objective = Contrastive(grid, reduction=reduction)
        totals[reduction] = objective.total(objective(batch_of(leaves)))
    torch.testing.assert_close(totals["sum"], 4 * totals["mean"])


def test_equal_texts_are_no_negatives(leaves):
    batch, (anchors, positives, _) = batch_of(leaves, EQUAL_TEXTS), leaves[3]
    forwards = info_nce(leaves[3], 8, NO_NEGATIVES)
    backwards = info_nce([positives, anchors], 8, NO_NEGATIVES[:4])
    for changes, expected in (
        ({}, forwards),
        ({"mask_duplicates": False}, info_nce(leaves[3], 8)),
        ({"symmetric": True}, (forwards + backwards) / 2),
    ):
        found = named(Contrastive(Grid.parse("3x8"), temperature=TAU, **changes)(batch))["contrastive_3x8"]
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("ids", "equal"), [(None, []), (OWN_TEXTS, [(0, 3), (3, 0), (1, 2), (2, 1), (4, 9)])])
@pytest.mark.parametrize("symmetric", [False, True])
def test_own_negatives_are_those_of_their_row_alone(leaves, ids, equal, symmetric):
    """Also in a ring, and not those that equal the positive; they play no part in the other direction."""
    others = [(row, 5 + other) for row, other in itertools.permutations(range(5), 2)]
    expected = info_nce(leaves[3], 8, others + equal)
    if symmetric:
        expected = (expected + info_nce(leaves[3][1::-1], 8, equal[:4])) / 2
    inputs = leaves[3]
    wanted = torch.autograd.grad(expected, inputs)
    for ring in (False, True):
        options = {"own_negatives": True, "symmetric": symmetric, "ring": ring}
        objective = Contrastive(Grid.parse("3x8"), temperature=TAU, **options)
        loss = objective.total(objective(batch_of(leaves, ids)))
        torch.testing.assert_close(loss, expected)
        for one, other in zip(torch.autograd.grad(loss, inputs), wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_own_negatives_need_hard_negatives(leaves):
    batch = batch_of(leaves)
    batch.texts.pop("negative")
    with pytest.raises(ValueError, match="own_negatives needs a column of hard negatives; got anchor, positive"):
        Contrastive(Grid.parse("3x8"), own_negatives=True)(batch)


@pytest.mark.parametrize("relative", [False, True])
def test_what_a_guide_finds_is_no_negative(leaves, relative):
    """In both directions, with a hard negative, and each side's own positive kept."""
    anchors, positives, negatives = leaves[3]
    generator = torch.Generator().manual_seed(0)
    guide = {name: torch.randn(5, 4, generator=generator) for name in ("anchor", "positive", "negative")}
    batch = NestedBatch(texts=batch_of(leaves).texts, teacher=guide)
    options = {"temperature": TAU, "guide_margin": 0.2, "relative_guide_margin": relative}
    losses = []
    sides = (anchors, [positives, negatives], ("anchor", ["positive", "negative"]))
    for one, others, (name, names) in (sides, (positives, [anchors], ("positive", ["anchor"]))):
        rows, columns = (functional.normalize(x, dim=1) for x in (one, torch.cat(others)))
        scores = rows @ columns.T / TAU
        similar = functional.cosine_similarity(
            guide[name][:, None], torch.cat([guide[each] for each in names])[None], dim=2
        )
        own = similar.diagonal()[:, None]
        mask = similar > (own * 0.8 if relative else own - 0.2)
        assert mask.fill_diagonal_(False).any()
        losses.append(functional.cross_entropy(scores.masked_fill(mask, -torch.inf), torch.arange(5)))
    single = named(Contrastive(Grid.parse("3x8"), **options)(batch))["contrastive_3x8"]
    torch.testing.assert_close(single, losses[0])
    both = named(Contrastive(Grid.parse("3x8"), symmetric=True, **options)(batch))["contrastive_3x8"]
    torch.testing.assert_close(both, (losses[0] + losses[1]) / 2)
    with pytest.raises(ValueError, match="guide_margin needs the embeddings of a guide for all texts"):
        Contrastive(Grid.parse("3x8"), **options)(batch_of(leaves))


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
        (lambda: Contrastive(Grid.parse("3x8"), ring=True, guide_margin=0.0), "ring does not pass a guide's embedd"),
        (lambda: Contrastive(Grid.parse("3x8"), ring=True, gather_negatives=False), "excludes gather_negatives=False"),
        (lambda: Contrastive(Grid.parse("3x8"), own_negatives=True, guide_margin=0.0), "own_negatives does not use a"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
