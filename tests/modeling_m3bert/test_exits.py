"""Exits in the architecture: what reads them, elastic loading and saving with them, and models without."""

import itertools

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from m3bert import modeling
from tests.conftest import padded_batch, refused, tiny_config
from tests.modeling_m3bert.static_models import WIDTH, affine
from tests.modeling_m3bert.test_modeling_m3bert import SWITCHES


LAYERS = (2, 4)


def with_exits(layers=LAYERS, model_class=modeling.M3BertModel, **changes):
    model = model_class(tiny_config(**changes)).eval()
    if layers:
        model.base_model.set_depths(exits={layer: affine() for layer in layers})
    return model


@pytest.mark.parametrize(
    ("attention", "switches"),
    [("eager", {}), *(("sdpa", switches) for switches in SWITCHES)],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "paper",
)
@pytest.mark.parametrize("layers", [(), LAYERS, (2, 6)], ids=str)
def test_the_state_is_the_exit_of_the_raw_state_and_a_cut_equals_it(tmp_path, layers, attention, switches):
    full = with_exits(layers, **switches)
    full.save_pretrained(tmp_path)
    full.set_attn_implementation(attention)
    batch = padded_batch()
    with torch.no_grad():
        raw = full(**batch, output_hidden_states=True).hidden_states
        for layer, dim in itertools.product(full.config.legal_layers, [8, 32]):
            expected = raw[layer] if layer == 6 else full.norm(raw[layer])
            if layer in layers:
                exit = full.elastic.exits[str(layer)]
                expected = expected @ exit.weight.T + exit.bias
            state = full(**batch, output_layer=layer, output_dim=dim).last_hidden_state
            torch.testing.assert_close(state, expected[..., :dim], atol=1e-5, rtol=1e-5)
            size = {"output_layer": layer, "output_dim": dim, "attn_implementation": attention}
            cut = modeling.M3BertModel.from_pretrained(tmp_path, **size)
            assert len(cut.layers) == layer and torch.equal(cut(**batch).last_hidden_state, state)


def test_a_cut_has_its_own_exit_and_no_other(tmp_path):
    full = with_exits(matryoshka_layers=[])
    full.save_pretrained(tmp_path / "full")
    assert full.config.legal_layers == [1, 2, 3, 4, 5, 6]
    cut = AutoModel.from_pretrained(tmp_path / "full", output_layer=4, output_dim=16)
    cut.save_pretrained(tmp_path / "cut")
    assert {*load_file(tmp_path / "cut" / "elastic" / "weights.safetensors")} == {"exits.4.bias", "exits.4.weight"}
    again = AutoModel.from_pretrained(tmp_path / "cut").eval()
    # Layer 2 lost its exit: its raw states would not be what the full model gives.
    assert again.config.legal_layers == [1, 3, 4]
    batch = padded_batch()
    refused("output_layer=2 is not available here; legal values: 1, 3, 4", again, **batch, output_layer=2)
    with torch.no_grad():
        for layer in (1, 4):
            expected = full(**batch, output_layer=layer, output_dim=16).last_hidden_state
            assert torch.equal(again(**batch, output_layer=layer).last_hidden_state, expected)


def test_a_model_of_new_weights_has_no_exits():
    config = with_exits().config
    model = modeling.M3BertModel(config)
    assert len(model.layers) == 6 and model.config.elastic is None and not [*model.elastic.exits]
    assert config.elastic["exits"] == [2, 4]


@pytest.mark.parametrize(
    "model_class",
    [modeling.M3BertForMaskedLM, modeling.M3BertForSequenceClassification, modeling.M3BertForTokenClassification],
)
def test_heads_read_the_state_after_the_exit(tmp_path, model_class):
    model = with_exits(model_class=model_class)
    batch = padded_batch()
    with torch.no_grad():
        logits = model(**batch, output_layer=2, output_dim=8)[0]
        exits = model.base_model.elastic.exits
        model.base_model.elastic.exits = torch.nn.ModuleDict()
        assert not torch.allclose(model(**batch, output_layer=2, output_dim=8)[0], logits)
        model.base_model.elastic.exits = exits
        model.save_pretrained(tmp_path)
        cut = model_class.from_pretrained(tmp_path, output_layer=2, output_dim=8)
        assert torch.equal(cut(**batch)[0], logits)
        assert list(cut.base_model.elastic.exits) == ["2"]


def test_a_smaller_width_computes_only_its_rows():
    model = with_exits()
    exit, state = model.elastic.exits["2"], torch.randn(3, WIDTH)
    with torch.no_grad():
        exit.weight[8:], exit.bias[8:] = torch.nan, torch.nan
        assert torch.isfinite(exit(state, 8)).all()
