"""Exits in the architecture: what reads them, elastic loading and saving with them, and models without."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from m3bert.modeling import (
    M3BertForMaskedLM,
    M3BertForSequenceClassification,
    M3BertForTokenClassification,
    M3BertModel,
)
from tests.conftest import padded_batch, tiny_config
from tests.modeling_m3bert.static_models import WIDTH, affine


LAYERS = (2, 4)


def random_exits(layers=LAYERS) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {layer: affine() for layer in layers}


def with_exits(layers=LAYERS, model_class=M3BertModel, **changes):
    model = model_class(tiny_config(**changes)).eval()
    model.base_model.set_depths(exits=random_exits(layers))
    return model


def test_the_exit_maps_the_state_and_leaves_the_hidden_states():
    plain = M3BertModel(tiny_config()).eval()
    batch, exits = padded_batch(), random_exits((2, 6))
    with torch.no_grad():
        raw = plain(**batch, output_hidden_states=True)
        plain.set_depths(exits=exits)
        for depth, (weight, bias) in exits.items():
            exited = plain(**batch, output_layer=depth, output_hidden_states=True)
            state = raw.last_hidden_state if depth == 6 else plain.norm(raw.hidden_states[depth])
            torch.testing.assert_close(exited.last_hidden_state, state @ weight.T + bias, atol=1e-5, rtol=1e-5)
            for one, other in zip(raw.hidden_states[:depth], exited.hidden_states[:-1], strict=True):
                assert torch.equal(one, other)


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
    with pytest.raises(ValueError, match="output_layer=2 is not available here; legal values: 1, 3, 4"):
        again(**batch, output_layer=2)
    with torch.no_grad():
        for layer in (1, 4):
            expected = full(**batch, output_layer=layer, output_dim=16).last_hidden_state
            assert torch.equal(again(**batch, output_layer=layer).last_hidden_state, expected)


def test_a_model_of_new_weights_has_no_exits():
    config = with_exits().config
    model = M3BertModel(config)
    assert len(model.layers) == 6 and model.config.elastic is None and not [*model.elastic.exits]
    assert config.elastic["exits"] == [2, 4]


@pytest.mark.parametrize(
    "model_class",
    [
        M3BertForMaskedLM,
        M3BertForSequenceClassification,
        M3BertForTokenClassification,
    ],
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
