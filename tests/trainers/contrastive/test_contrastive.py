"""Contrastive training over a grid."""

from __future__ import annotations

import pytest
import torch

from m3bert.trainers import Contrastive, Grid, NestedModel
from tests.conftest import padded_batch
from tests.trainers.tiny_run import named


def columns() -> dict[str, dict[str, torch.Tensor]]:
    """Anchors, positives and hard negatives of different lengths."""
    return {
        "anchor": padded_batch(lengths=(3, 5, 1)),
        "positive": padded_batch(lengths=(7, 4, 6)),
        "negative": padded_batch(lengths=(2, 9, 3)),
    }


def naive_term(model, texts, layer, dim, temperature):
    """The formula, a granularity and a pair at a time: pool, slice, normalise, compare."""
    embeddings = []
    for text in texts.values():
        states = model(**text, output_layer=layer).last_hidden_state
        rows = [state[mask.bool()].mean(0)[:dim] for state, mask in zip(states, text["attention_mask"], strict=True)]
        embeddings.append([row / row.norm() for row in rows])
    anchors, candidates = embeddings[0], [row for column in embeddings[1:] for row in column]
    losses = []
    for i, anchor in enumerate(anchors):
        scores = torch.stack([anchor @ candidate for candidate in candidates]) / temperature
        losses.append(torch.logsumexp(scores, 0) - scores[i])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("grid", ["2,6x8,32", "4x16,6x8"])
def test_terms_and_gradients_equal_a_loop_over_the_grid(tiny_model, grid, reduction):
    grid, texts, tiny_model = Grid.parse(grid), columns(), tiny_model.double()
    objective = Contrastive(grid, temperature=0.1, reduction=reduction)
    outputs = NestedModel(tiny_model, objective)(**texts)
    expected = {f"contrastive_{g}": naive_term(tiny_model, texts, g.layer, g.dim, 0.1) for g in grid}
    terms = named(outputs["terms"])
    assert terms.keys() == expected.keys()
    for name, term in expected.items():
        torch.testing.assert_close(terms[name], term, atol=1e-9, rtol=1e-9)
    total = sum(expected.values()) / (len(expected) if reduction == "mean" else 1)
    torch.testing.assert_close(outputs["loss"], total)
    parameters = list(tiny_model.parameters())
    actual, wanted = (torch.autograd.grad(x, parameters, materialize_grads=True) for x in (outputs["loss"], total))
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_a_batch_of_one_pair_is_refused(tiny_model):
    model, one = NestedModel(tiny_model, Contrastive(Grid.parse("2x8"))), padded_batch(lengths=(3,))
    with pytest.raises(ValueError, match="a batch of one pair without hard negatives"):
        model(a=one, b=one)
    model(a=one, b=one, c=one)
