"""A checkpoint on disk: what is complete, what it says of itself, and which files are published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from hub_cards.checkpoint import Checkpoint
from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from tests.conftest import tiny_config, write_modules
from trainers import Granularity


@pytest.fixture
def folder(tmp_path, tiny_tokenizer) -> Path:
    """A tiny m3BERT that was never trained, with its tokenizer."""
    folder = tmp_path / "model"
    M3BertModel(tiny_config()).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "gone, message", [("config.json", "has no config.json"), ("model.safetensors", "no weights in safetensors")]
)
def test_an_incomplete_checkpoint_is_refused(folder, gone, message):
    (folder / gone).unlink()
    with pytest.raises(ValueError, match=message):
        Checkpoint(folder)


def test_an_adapter_alone_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"only an adapter: merge it \(m3bert train --merge_adapter, or merge_and_unload"
    ):
        Checkpoint(tmp_path)


def test_weights_that_are_cut_short_are_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors cannot be read; it may be incomplete"):
        Checkpoint(folder)


def test_all_shards_must_be_there(tmp_path):
    M3BertModel(tiny_config()).save_pretrained(tmp_path, max_shard_size="60KB")
    *_, last = sorted(tmp_path.glob("model-*.safetensors"))
    Checkpoint(tmp_path)
    last.unlink()
    with pytest.raises(ValueError, match=f"lacks {last.name}, which its index lists"):
        Checkpoint(tmp_path)


def test_what_an_untrained_m3bert_says_of_itself(folder):
    checkpoint = Checkpoint(folder)
    assert (checkpoint.elastic, checkpoint.quantized, checkpoint.head) == (True, False, "AutoModel")
    assert checkpoint.record is None and checkpoint.projection is None and checkpoint.pooling == "mean"
    assert checkpoint.full == Granularity(6, 32) and str(checkpoint.trained_grid) == str(checkpoint.grid)
    assert checkpoint.max_length == 48 and checkpoint.prompts == {}


def test_what_another_architecture_says_of_itself(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=99, **sizes)).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert not checkpoint.elastic and checkpoint.trained_grid is None and not checkpoint.trained
    assert str(checkpoint.grid) == "1,2,3x16,32" and checkpoint.full == Granularity(3, 32)


def test_modules_say_how_texts_are_embedded(folder):
    write_modules(folder, width=32, pooling="cls", max_length=20, prompts={"query": "find: ", "document": ""})
    checkpoint = Checkpoint(folder)
    assert checkpoint.pooling == "cls" and checkpoint.max_length == 20
    assert checkpoint.prompts == {"query": "find: "}


def test_a_record_is_what_it_was_trained_at(run):
    checkpoint = Checkpoint(run / "output")
    assert checkpoint.trained and str(checkpoint.trained_grid) == checkpoint.record.grid
    assert checkpoint.grid == checkpoint.trained_grid


def test_a_head_is_loaded_with_its_own_class(tmp_path):
    M3BertForMaskedLM(tiny_config()).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.head == "AutoModelForMaskedLM" and isinstance(checkpoint.load(), M3BertForMaskedLM)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["SomethingElse"]}))
    with pytest.raises(ValueError, match="holds a SomethingElse; legal endings of a class: ForMaskedLM, "):
        _ = Checkpoint(tmp_path).head


def test_the_fingerprint_is_that_of_the_weights(folder, run):
    checkpoint = Checkpoint(folder)
    assert checkpoint.weights_fingerprint == Checkpoint(folder).weights_fingerprint
    assert checkpoint.weights_fingerprint != Checkpoint(run / "output").weights_fingerprint
    assert load_file(folder / "model.safetensors")  # and the file is as it was


def test_every_file_has_a_reason_to_stay(work):
    for name in ("optimizer.pt", "data.jsonl", "notes.md", "pytorch_model.bin", ".env", "events.out.tfevents", "a.py"):
        (work / name).write_text("x")
    files = dict(Checkpoint(work).files())
    assert {name for name, why in files.items() if why is None} == {
        "1_Pooling/config.json",
        "config.json",
        "config_sentence_transformers.json",
        "configuration_m3bert.py",
        "model.safetensors",
        "modeling_elastic.py",
        "modeling_m3bert.py",
        "modules.json",
        "sentence_bert_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert files["optimizer.pt"] == "state of the training run" == files["training_args.json"]
    assert files["checkpoint-2/model.safetensors"] == "a training checkpoint" and files["data.jsonl"] == "data"
    assert files["notes.md"] == "not part of a checkpoint" == files["events.out.tfevents"] == files["a.py"]
    assert "can run code" in files["pytorch_model.bin"] and ".env" not in files


def test_a_link_out_of_the_checkpoint_is_refused(folder, tmp_path):
    (tmp_path / "secrets.json").write_text("{}")
    (folder / "added_tokens.json").symlink_to(tmp_path / "secrets.json")
    with pytest.raises(ValueError, match=r"added_tokens\.json is a link out of .*: put the file there, or remove it"):
        list(Checkpoint(folder).files())
