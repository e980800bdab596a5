"""Layers that read the static table, in everything that encodes texts for training."""

import copy

import pytest
import torch
from transformers import AttentionInterface

from m3bert.encode.padded_batches import PassCost
from m3bert.encode.states import StateOnly
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.trainers import Contrastive, Grid, NestedModel, nested_states
from m3bert.trainers.core import column_states
from tests.conftest import padded_batch, tiny_config
from tests.encode.test_packed_rows import documents, packed_batch
from tests.modeling_m3bert.static_models import give_table, with_table
from tests.trainers.core.test_column_states import (
    assert_same_step,
    attention_of_flattened_texts,
    columns,
    encoder_calls,
    plain,
)


GRID = Grid.parse("0,2,4x8,32")
PATHS = pytest.mark.parametrize("paths", [{}, {2: [1, 6], 4: [1, 2, 5, 6]}], ids=["prefixes", "paths"])


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch):
    """Costs under which the few short texts of a test make several chunks."""
    monkeypatch.setattr(PassCost, "on", classmethod(lambda cls, device: cls(2, 30)))


@PATHS
@pytest.mark.parametrize("left", [False, True])
def test_states_of_several_layers_are_those_of_each_alone(left, paths):
    model, batch = with_table(paths=paths), padded_batch(lengths=(7, 3, 0, 5))
    if left:
        batch = {name: value.flip(1) for name, value in batch.items()}
    with torch.no_grad():
        for layer, state in nested_states(model, batch, [0, 2, 4, 6]).layers.items():
            alone = model(**batch, output_layer=layer, output_dim=32).last_hidden_state
            assert torch.isfinite(alone).all()
            torch.testing.assert_close(state, alone)


@PATHS
@pytest.mark.parametrize("mini_batch_size", [None, 2])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_a_step_in_chunks_is_that_of_each_column_on_its_own(pooling, mini_batch_size, paths, monkeypatch):
    model, batch = with_table(paths=paths).double(), columns()
    objective = Contrastive(GRID, pooling=pooling).double()
    expected = plain(model, objective, batch)
    calls, look_ups = encoder_calls(model), []
    actual = M3BertModel.static_states
    monkeypatch.setattr(M3BertModel, "static_states", lambda *args: look_ups.append(1) or actual(*args))
    ours = NestedModel(model, objective, mini_batch_size)(**batch)["loss"]
    assert len(calls) > 2
    if mini_batch_size is None:
        assert len(look_ups) == 1, "once for all chunks of the batch"
    assert_same_step(model, ours, expected, 1e-12)


@pytest.mark.parametrize("mini_batch_size", [None, 2])
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("layers", [[0, 2, 4, 6], [0, 2]])
def test_state_only_maps_are_the_exits_of_a_model_without_the_table(layers, pooling, mini_batch_size):
    model, batch = with_table().double(), columns()
    texts = {
        name: {entry: column[entry] for entry in ("input_ids", "attention_mask")} for name, column in batch.items()
    }
    alone = [StateOnly(layer) for layer in layers if layer]
    actual = column_states.column_states(model, texts, [*layers, *alone], pooling, mini_batch_size)
    tableless = copy.deepcopy(model)
    exits = {layer: model.elastic.exits[str(layer)] for layer in (2, 4)}
    tableless.set_depths(exits={layer: (each.weight, each.bias) for layer, each in exits.items()})
    for name, inputs in texts.items():
        assert actual[name].layers.keys() == {*layers} | {StateOnly(layer) for layer in {2, 4} & {*layers}}
        expected = nested_states(tableless, inputs, layers)
        for layer in {2, 4} & {*layers}:
            vectors = actual[name].pooled(StateOnly(layer), pooling)
            torch.testing.assert_close(vectors, expected.pooled(layer, pooling), rtol=1e-10, atol=1e-10)
            parameters = [model.elastic.exits[str(layer)].weight, model.embed_tokens.weight]
            assert all(part.any() for part in torch.autograd.grad(vectors.sum(), parameters, retain_graph=True))


def test_a_step_of_the_table_alone(tmp_path):
    with_table(layers=(0,), ignored=(7, 8)).save_pretrained(tmp_path, exact=True)
    model, batch = M3BertModel.from_pretrained(tmp_path, output_layer=0).double(), columns()
    objective = Contrastive(Grid.parse("0x8,32")).double()
    expected = plain(model, objective, batch)
    assert_same_step(model, NestedModel(model, objective)(**batch)["loss"], expected, 1e-12)


@PATHS
def test_flattened_texts_make_the_same_step(paths, monkeypatch):
    model, batch = with_table(paths=paths).double(), columns()
    objective = Contrastive(GRID).double()
    expected = plain(model, objective, batch)
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    AttentionInterface.register("flash_of_the_test", attention_of_flattened_texts)
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_of_the_test")
    for given in (model, NestedModel(model, objective)):
        loss = plain(model, objective, batch) if given is model else given(**batch)["loss"]
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        actual = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        for one, other in zip(actual, gradients, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@PATHS
@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_document_reads_its_own_tokens_only(attention, own_rows, paths, monkeypatch):
    monkeypatch.setattr("m3bert.trainers.core.column_states.encodes_own_rows", lambda encoder: own_rows)
    model = M3BertForMaskedLM._from_config(tiny_config(), attn_implementation=attention).double().eval()
    give_table(model.model, paths=paths)
    batch = packed_batch()
    layers = [0, 2, 4]
    states = column_states.column_states(model, {"text": batch}, layers)["text"]
    for places in documents(batch):
        alone = nested_states(model, {"input_ids": batch["input_ids"][places][None]}, layers)
        for layer in layers:
            torch.testing.assert_close(states.layers[layer][places], alone.layers[layer][0], rtol=1e-10, atol=1e-10)
