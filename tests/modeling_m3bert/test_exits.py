"""Exits in the architecture: what reads them, elastic loading and saving with them, and models without."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from modeling_m3bert import (
    M3BertConfig,
    M3BertForMaskedLM,
    M3BertForMultipleChoice,
    M3BertForQuestionAnswering,
    M3BertForSequenceClassification,
    M3BertForTokenClassification,
    M3BertModel,
)
from tests.conftest import padded_batch, tiny_config
from tests.modeling_m3bert.test_modeling_m3bert import SWITCHES
from trainers import nested_states


WIDTH = 32
LAYERS = (0, 2, 4)


def random_exits(layers=LAYERS) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {layer: (torch.randn(WIDTH, WIDTH) / WIDTH**0.5, torch.randn(WIDTH)) for layer in layers}


def with_exits(layers=LAYERS, model_class=M3BertModel, **changes):
    model = model_class(tiny_config(**changes)).eval()
    model.base_model.set_exits(random_exits(layers))
    return model


@pytest.mark.parametrize("switches", SWITCHES[:4], ids=lambda s: ",".join(s) or "paper")
@pytest.mark.parametrize("layers", [LAYERS, (2, 6)])
def test_the_state_is_the_exit_of_the_raw_state_and_a_cut_equals_it(tmp_path, switches, layers):
    full = with_exits(layers, **switches)
    full.save_pretrained(tmp_path)
    batch = padded_batch()
    with torch.no_grad():
        raw = full(**batch, output_hidden_states=True).hidden_states
        for layer, dim in itertools.product(full.config.legal_layers, [8, 32]):
            expected = raw[layer] if layer in (0, 6) else full.norm(raw[layer])
            if layer in layers:
                exit = full.exits[str(layer)]
                expected = expected @ exit.weight.T + exit.bias
            state = full(**batch, output_layer=layer, output_dim=dim).last_hidden_state
            torch.testing.assert_close(state, expected[..., :dim], atol=1e-5, rtol=1e-5)
            cut = M3BertModel.from_pretrained(tmp_path, output_layer=layer, output_dim=dim)
            assert torch.equal(cut(**batch).last_hidden_state, state)
            # A product with fewer rows may sum in another order.
            torch.testing.assert_close(nested_states(full, batch, [layer]).layers[layer][..., :dim], state)


def test_hidden_states_stay_raw():
    plain = M3BertModel(tiny_config()).eval()
    batch = padded_batch()
    with torch.no_grad():
        raw = plain(**batch, output_hidden_states=True)
        plain.set_exits(random_exits((0, 2, 6)))
        exited = plain(**batch, output_hidden_states=True)
    assert all(torch.equal(one, other) for one, other in zip(raw.hidden_states, exited.hidden_states, strict=True))
    assert not torch.allclose(raw.last_hidden_state, exited.last_hidden_state)


def test_a_cut_has_its_own_exit_and_no_other(tmp_path):
    full = with_exits(matryoshka_layers=[])
    full.save_pretrained(tmp_path / "full")
    assert full.config.legal_layers == [0, 1, 2, 3, 4, 5, 6]
    cut = AutoModel.from_pretrained(tmp_path / "full", output_layer=4, output_dim=16)
    cut.save_pretrained(tmp_path / "cut")
    with safe_open(tmp_path / "cut" / "model.safetensors", "pt") as file:
        assert [name for name in file.keys() if "exits" in name] == ["exits.4.bias", "exits.4.weight"]
    again = AutoModel.from_pretrained(tmp_path / "cut").eval()
    # Layers 0 and 2 lost their exits: their raw states would not be what the full model gives.
    assert again.config.legal_layers == [1, 3, 4]
    batch = padded_batch()
    with pytest.raises(ValueError, match="output_layer=2 is not available here; legal values: 1, 3, 4"):
        again(**batch, output_layer=2)
    with torch.no_grad():
        for layer in (1, 4):
            expected = full(**batch, output_layer=layer, output_dim=16).last_hidden_state
            assert torch.equal(again(**batch, output_layer=layer).last_hidden_state, expected)


def test_the_embedding_layer_alone_is_a_model(tmp_path):
    full = with_exits()
    full.save_pretrained(tmp_path / "full")
    table = AutoModel.from_pretrained(tmp_path / "full", output_layer=0, output_dim=16)
    assert len(table.layers) == 0 and table.config.legal_layers == [0]
    table.save_pretrained(tmp_path / "table")
    again = AutoModel.from_pretrained(tmp_path / "table").eval()
    batch = padded_batch()
    with torch.no_grad():
        expected = full(**batch, output_layer=0, output_dim=16).last_hidden_state
        assert torch.equal(again(**batch).last_hidden_state, expected)
        ids = batch["input_ids"][:, :1]  # without other tokens: nothing but the token and its position counts
        first = full(ids, output_layer=0, output_dim=16).last_hidden_state
    torch.testing.assert_close(first[:, 0], expected[:, 0])


def test_without_an_exit_the_embedding_layer_is_no_output():
    with pytest.raises(ValueError, match="output_layer=0 is not available here; legal values: 2, 4, 6"):
        M3BertConfig(num_hidden_layers=6, output_layer=0)


def test_a_checkpoint_without_exits_mentions_neither_them_nor_a_table(tmp_path, tiny_model):
    tiny_model.save_pretrained(tmp_path)
    names = {*json.loads((tmp_path / "config.json").read_text()), *load_file(tmp_path / "model.safetensors")}
    assert not [name for name in names if "exit" in name or "static" in name]


@pytest.mark.parametrize("layers", [[7], [-1], [2, 1], [2, 2]])
def test_an_exit_of_a_layer_that_is_not_there_is_refused(layers):
    with pytest.raises(ValueError, match=r"exit_layers=\[.*\] must be ascending and within 0..6"):
        tiny_config(exit_layers=layers)
    if layers in ([7], [-1]):
        with pytest.raises(ValueError, match="must be ascending and within 0..6"):
            M3BertModel(tiny_config()).set_exits(random_exits(layers))


def test_a_checkpoint_whose_exit_is_missing_is_refused(tmp_path):
    with_exits().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["exits.2.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"Missing encoder tensors: exits\.2\.weight"):
        AutoModel.from_pretrained(tmp_path)
    AutoModel.from_pretrained(tmp_path, output_layer=4)  # does not read it


@pytest.mark.parametrize("changes", [{"exit_layers": [2, 4]}, {"exit_layers": [2], "static_layers": [2]}], ids=str)
def test_a_fresh_exit_is_the_identity_of_the_state(tiny_model, changes):
    model, batch = M3BertModel(tiny_config(**changes)).eval(), padded_batch()
    with torch.no_grad():
        for name, parameter in tiny_model.named_parameters():
            model.get_parameter(name).copy_(parameter)
        one, other = (each(**batch, output_layer=2).last_hidden_state for each in (tiny_model, model))
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "model_class",
    [
        M3BertForMaskedLM,
        M3BertForSequenceClassification,
        M3BertForTokenClassification,
        M3BertForQuestionAnswering,
        M3BertForMultipleChoice,
    ],
)
def test_heads_read_the_state_after_the_exit(tmp_path, model_class):
    model = with_exits(model_class=model_class)
    batch = padded_batch()
    if model_class is M3BertForMultipleChoice:
        batch = {name: value.view(2, 2, 7) for name, value in batch.items()}
    with torch.no_grad():
        logits = model(**batch, output_layer=2, output_dim=8)[0]
        exits = model.base_model.exits
        model.base_model.exits = torch.nn.ModuleDict()
        assert not torch.allclose(model(**batch, output_layer=2, output_dim=8)[0], logits)
        model.base_model.exits = exits
        model.save_pretrained(tmp_path)
        cut = model_class.from_pretrained(tmp_path, output_layer=2, output_dim=8)
        assert torch.equal(cut(**batch)[0], logits)
        assert list(cut.base_model.exits) == ["2"]


def test_a_smaller_width_computes_only_its_rows():
    model = with_exits()
    exit, state = model.exits["2"], torch.randn(3, WIDTH)
    with torch.no_grad():
        exit.weight[8:], exit.bias[8:] = torch.nan, torch.nan
        assert torch.isfinite(exit(state, 8)).all()
