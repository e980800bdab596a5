"""Elastic loading and saving: less depth and width out of one checkpoint, equal to slicing the full model."""

import json
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertModel

from benchmarks.elastic_loading import measure
from m3bert.modeling import (
    M3BertForMaskedLM,
    M3BertForSequenceClassification,
    M3BertForTokenClassification,
    M3BertModel,
)
from m3bert.models.settings import EmbeddingSettings
from tests.conftest import padded_batch, refused, tiny_config, write_modules


def test_a_cut_model_can_be_asked_for_less_but_not_for_more(tmp_path, tiny_model):
    tiny_model.save_pretrained(tmp_path)
    cut = AutoModel.from_pretrained(tmp_path, output_layer=4, output_dim=16)
    batch = padded_batch()
    assert cut(**batch, output_layer=2, output_dim=8).last_hidden_state.shape == (4, 7, 8)
    # Every weight is as wide as it was: only depth is gone.
    assert cut(**batch, output_dim=32).last_hidden_state.shape == (4, 7, 32)
    refused("output_layer=6 is not available here; legal values: 2, 4", cut, **batch, output_layer=6)


def test_a_cut_model_is_saved_as_a_complete_smaller_checkpoint(tmp_path, tiny_masked_lm):
    tiny_masked_lm.save_pretrained(tmp_path / "full")
    cut = M3BertForMaskedLM.from_pretrained(tmp_path / "full", output_layer=4, output_dim=16).eval()
    cut.save_pretrained(tmp_path / "cut")
    stored = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert (stored["num_hidden_layers"], stored["matryoshka_layers"], stored["output_dim"]) == (4, [2, 4], 16)
    with safe_open(tmp_path / "cut" / "model.safetensors", "pt") as file:
        assert not any(name.startswith(("model.layers.4", "model.layers.5")) for name in file.keys())
    again = M3BertForMaskedLM.from_pretrained(tmp_path / "cut").eval()
    shallower = M3BertForMaskedLM.from_pretrained(tmp_path / "cut", output_layer=2, output_dim=8).eval()
    batch = padded_batch()
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, tiny_masked_lm(**batch, output_layer=4, output_dim=16).logits)
        assert torch.equal(shallower(**batch).logits, tiny_masked_lm(**batch, output_layer=2, output_dim=8).logits)


def test_a_size_keeps_the_settings_that_it_was_loaded_with(tmp_path, tiny_model):
    tiny_model.save_pretrained(tmp_path / "full")
    written = write_modules(tmp_path / "full", width=32, max_length=9, pooling="cls", prompts={"query": "q: "})
    cut = M3BertModel.from_pretrained(tmp_path / "full", output_layer=2, output_dim=8)
    cut.save_pretrained(tmp_path / "cut")
    assert all((tmp_path / "cut" / name).exists() for name in written)
    full, actual = (EmbeddingSettings.read(tmp_path / name) for name in ("full", "cut"))
    assert actual == full and actual.pooling == "cls"
    pooling = json.loads((tmp_path / "cut" / "1_Pooling" / "config.json").read_text())
    assert pooling["word_embedding_dimension"] == 8
    M3BertModel(cut.config).save_pretrained(tmp_path / "new")
    assert EmbeddingSettings.find(tmp_path / "new") is None


def test_the_users_config_is_not_changed_by_building_a_model():
    config = tiny_config(output_layer=2)
    model = M3BertForSequenceClassification(config)
    assert config.num_hidden_layers == 6
    assert model.config is model.model.config
    assert len(model.model.layers) == model.config.num_hidden_layers == 2


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_a_third_of_the_layers_adds_little_memory():
    (full, _), (cut, cut_bytes), (exits, exit_bytes) = measure().values()
    assert cut <= 0.60 * full
    # The one exit that is read is 1% of the model; the memory of a process varies by another percent.
    assert exits <= 1.03 * cut
    assert cut_bytes < exit_bytes <= 1.02 * cut_bytes


def test_a_checkpoint_cut_short_is_refused(tmp_path, tiny_model):
    tiny_model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused("The weights in .* cannot be read", AutoModel.from_pretrained, tmp_path)


SIZES = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 6, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: M3BertModel(tiny_config(num_hidden_layers=4, matryoshka_layers=[2, 4])), r"18 tensors.*layers\.4"),
        (lambda: BertModel(BertConfig(vocab_size=99, **SIZES)), "of another architecture"),
    ],
    ids=["some layers", "BERT"],
)
@pytest.mark.parametrize("auto", [AutoModel, AutoModelForMaskedLM])
def test_weights_of_another_model_are_refused(tmp_path, other, message, auto):
    other().save_pretrained(tmp_path)
    tiny_config().save_pretrained(tmp_path)
    refused(message, auto.from_pretrained, tmp_path)


CLASSES = {
    "AutoModel": M3BertModel,
    "AutoModelForMaskedLM": M3BertForMaskedLM,
    "AutoModelForSequenceClassification": M3BertForSequenceClassification,
    "AutoModelForTokenClassification": M3BertForTokenClassification,
}
RUN = """
import torch, transformers
from safetensors.torch import load_file, save_file
batch, outputs = load_file("batch.safetensors"), {}
for name in CLASSES:
    auto = getattr(transformers, name)
    auto.from_pretrained("AutoModel", trust_remote_code=True)  # a checkpoint opens with every head
    for size, arguments in {"full": {}, "cut": {"output_layer": 4, "output_dim": 8}}.items():
        model = auto.from_pretrained(name, trust_remote_code=True, **arguments).eval()
        model.save_pretrained("again")
        again = auto.from_pretrained("again", trust_remote_code=True).eval()
        with torch.no_grad():
            outputs[f"{name} {size}"] = model(**batch)[0].contiguous()
            assert torch.equal(again(**batch)[0], outputs[f"{name} {size}"])
save_file(outputs, "outputs.safetensors")
"""


def test_saved_models_load_run_and_save_again_without_the_project(tmp_path, run_bare):
    models, batch = {name: kind(tiny_config()).eval() for name, kind in CLASSES.items()}, padded_batch()
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    save_file(batch, tmp_path / "batch.safetensors")
    run_bare(f"CLASSES = {[*CLASSES]}\n" + RUN)
    outputs = load_file(tmp_path / "outputs.safetensors")
    with torch.no_grad():
        for name, model in models.items():
            assert torch.equal(outputs[f"{name} full"], model(**batch)[0])
            assert torch.equal(outputs[f"{name} cut"], model(**batch, output_layer=4, output_dim=8)[0])
