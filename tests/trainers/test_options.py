"""The options of contrastive training in every combination, against a naive reference."""

from itertools import product

import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import BertModel

from m3bert.encode.padded_batches import PassCost
from m3bert.trainers import Contrastive, Grid, NestedModel
from tests.conftest import assert_close, padded_batch
from tests.trainers.tiny_run import bert_config, named


GRIDS = {"1,3x8,32": "sum", "1x8,3x32": "mean"}  # with how each is reduced
TEMPERATURE = 0.2
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
COLUMNS = {"anchor": (7, 3, 1, 5), "positive": (2, 6, 4, 4), "negative": (5, 1, 8, 3)}


def naive(backbone, columns, grid, *, symmetric, own_negatives, temperature) -> dict[str, torch.Tensor]:
    """InfoNCE of every granularity, text by text, with one pass over each padded column."""
    states = {name: backbone(**column, output_hidden_states=True).hidden_states for name, column in columns.items()}
    losses = {}
    for g in grid:
        anchors, positives, negatives = (
            (states[name][g.layer] * mask).sum(dim=1)[:, : g.dim] / mask.sum(dim=1)
            for name in columns
            for mask in [columns[name]["attention_mask"].unsqueeze(-1)]
        )
        directions = [(anchors, positives, negatives), *([(positives, anchors, None)] if symmetric else [])]
        loss = torch.zeros((), dtype=torch.float64)
        for queries, own, hard in directions:
            for row, query in enumerate(queries):
                others = [*own] + ([] if hard is None else [hard[row]] if own_negatives else [*hard])
                scores = cosine_similarity(query.unsqueeze(0), torch.stack(others)) / temperature
                loss = loss + (scores.logsumexp(dim=0) - scores[row]) / len(queries) / len(directions)
        losses[f"contrastive_{g}"] = loss
    return losses


@pytest.mark.parametrize(
    ("grid", "symmetric", "own_negatives", "mini_batch_size", "many_passes", "learned"),
    list(product(GRIDS, [False, True], [False, True], [None, 2], [False, True], [False, True])),
)
def test_all_options_together_have_the_loss_and_gradients_of_the_reference(
    grid, symmetric, own_negatives, mini_batch_size, many_passes, learned, monkeypatch
):
    backbone = BertModel(bert_config(num_hidden_layers=3, **NO_DROPOUT)).double()
    columns = {name: padded_batch(lengths=lengths) for name, lengths in COLUMNS.items()}
    monkeypatch.setattr(PassCost, "on", lambda device: PassCost(0 if many_passes else 2**40))
    grid, reduction, options = Grid.parse(grid), GRIDS[grid], {"symmetric": symmetric, "own_negatives": own_negatives}
    objective = Contrastive(
        grid, temperature=TEMPERATURE, learn_temperature=learned, reduction=reduction, **options
    ).double()
    outputs = NestedModel(backbone, objective, mini_batch_size)(**columns)
    outputs["loss"].backward()
    found = {name: weight.grad.clone() for name, weight in backbone.named_parameters() if weight.grad is not None}
    backbone.zero_grad()
    log_scale = torch.tensor(TEMPERATURE, dtype=torch.float64).log().neg().requires_grad_()
    terms = naive(backbone, columns, grid, temperature=1 / log_scale.exp(), **options)
    torch.testing.assert_close(named(outputs["terms"]), terms, atol=1e-9, rtol=1e-6)
    expected = sum(terms.values()) / (len(terms) if reduction == "mean" else 1)
    expected.backward()
    torch.testing.assert_close(outputs["loss"].double(), expected, atol=1e-9, rtol=1e-6)
    scale = max(float(weight.grad.abs().max()) for weight in backbone.parameters() if weight.grad is not None)
    for name, weight in backbone.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(found[name], weight.grad, atol=1e-6 * scale, rtol=1e-6, msg=name)
    if learned:
        assert_close(objective.log_scale.grad[0], log_scale.grad)
