"""Anchors at any depth against positives at the last layer."""

import pytest
import torch

from m3bert.trainers import Composition, Contrastive, Grid, NestedModel
from m3bert.trainers.exit_distillation.cross_depth import CrossDepth
from tests.conftest import padded_batch, refused, tiny_config
from tests.trainers.pooled_texts import TAU, assert_same as assert_same_as, batch_of, info_nce
from tests.trainers.tiny_run import named


GRID = Grid.parse("1,3x2,8")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(("grid", "document_layer"), [("1,3x2,8", None), ("1x4,2x2", 3), ("1x2,3x8", None)])
def test_terms_and_gradients_equal_a_loop(leaves, grid, document_layer, reduction):
    grid = Grid.parse(grid)
    objective = CrossDepth(grid, document_layer=document_layer, reduction=reduction, temperature=TAU)
    terms = {g: info_nce([leaves[g.layer][0], *leaves[3][1:]], g.dim) for g in grid}
    actual = named(objective(batch_of(leaves)))
    assert list(actual) == [f"cross_depth_{g}" for g in grid]
    for g, value in terms.items():
        torch.testing.assert_close(actual[f"cross_depth_{g}"], value)
    total = sum(terms.values())
    assert_same_as(objective, leaves, total / len(grid) if reduction == "mean" else total)


def test_both_directions(leaves):
    """Also each positive at the last layer among the anchors of the shallow one."""
    objective = CrossDepth(Grid.parse("1x8"), document_layer=3, temperature=TAU, symmetric=True)
    anchors, positives, negatives = leaves[1][0], *leaves[3][1:]
    expected = info_nce([anchors, positives, negatives], 8) + info_nce([positives, anchors], 8)
    assert_same_as(objective, leaves, expected / 2)


def test_gradients_can_be_cached(tiny_model):
    """In a composition, too: values and gradients are those of encoding the whole batch at once."""
    model, grid = tiny_model.double(), Grid.parse("2,6x8,32")
    objective = Composition({"own": (1.0, Contrastive(grid)), "cross": (0.5, CrossDepth(grid))})
    texts = {name: padded_batch(lengths=(7, 3, 1, 5)) for name in ("anchor", "positive")}
    results = []
    for size in (None, 3):
        model.zero_grad(set_to_none=True)
        outputs = NestedModel(model, objective, size)(**texts)
        outputs["loss"].backward()
        results.append((named(outputs["terms"]), [parameter.grad for parameter in model.parameters()]))
    (expected, wanted), (actual, ours) = results
    assert actual.keys() == expected.keys() and {"own_2x8", "cross_2x8"} <= actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_identity_and_bad_arguments():
    identity = CrossDepth(GRID).identity
    assert identity.name == "CrossDepth" and identity.papers == () and "sentence-similarity" in identity.tags
    assert identity.equation.endswith("against positives at layer 3, sum over the grid")
    assert CrossDepth(Grid.parse("1,2x8"), document_layer=3).layers == [1, 2, 3]
    refused("reduction='max' is unknown; legal values: sum, mean", CrossDepth, GRID, reduction="max")
    refused("document_layer=2 must be 3 or more, the deepest of the grid", CrossDepth, GRID, document_layer=2)
    refused(r"layers 1\.\.6 .*outside of it: 9x", CrossDepth(GRID, document_layer=9).validate, tiny_config())
