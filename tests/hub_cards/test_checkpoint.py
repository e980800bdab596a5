"""A checkpoint on disk: what is complete, what it says of itself, and which files are published."""

from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.trainers import Granularity
from tests.conftest import refused, tiny_config, write_modules


@pytest.fixture
def folder(tmp_path, tiny_tokenizer) -> Path:
    """A tiny m3BERT that was never trained, with its tokenizer."""
    folder = tmp_path / "model"
    M3BertModel(tiny_config()).save_pretrained(folder, max_shard_size="60KB")
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("end", [-100, 0])
def test_weights_that_are_cut_short_are_refused(folder, end):
    file = sorted(folder.glob("model-*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:end])
    refused(f"{file.name} cannot be read; it may be incomplete", Checkpoint, folder)
    file.unlink()
    refused(f"lacks {file.name}, which its index lists", Checkpoint, folder)


def test_what_an_untrained_m3bert_says_of_itself(folder):
    checkpoint = Checkpoint(folder)
    assert (checkpoint.elastic, checkpoint.quantized, checkpoint.head) == (True, False, "AutoModel")
    assert checkpoint.record is None and checkpoint.projection is None and checkpoint.settings.pooling == "mean"
    assert checkpoint.full == Granularity(6, 32) and str(checkpoint.trained_grid) == str(checkpoint.grid)
    assert checkpoint.max_length == 48 and checkpoint.settings.used_prompts == {}
    write_modules(folder, width=32, pooling="cls", max_length=20, prompts={"query": "find: ", "document": ""})
    checkpoint = Checkpoint(folder)
    assert checkpoint.settings.pooling == "cls" and checkpoint.max_length == 20
    assert checkpoint.settings.used_prompts == {"query": "find: "}


def test_what_another_architecture_says_of_itself(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=99, **sizes)).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert not checkpoint.elastic and checkpoint.trained_grid is None and not checkpoint.trained
    assert str(checkpoint.grid) == "1,2,3x16,32" and checkpoint.full == Granularity(3, 32)


def test_a_record_is_what_it_was_trained_at(run):
    checkpoint = Checkpoint(run / "output")
    assert checkpoint.trained and str(checkpoint.trained_grid) == checkpoint.record.grid
    assert checkpoint.grid == checkpoint.trained_grid


def test_a_head_is_loaded_with_its_own_class(tmp_path):
    M3BertForMaskedLM(tiny_config()).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.head == "AutoModelForMaskedLM" and isinstance(checkpoint.load(), M3BertForMaskedLM)


def test_only_what_belongs_to_a_model_is_published(work):
    for name in ("optimizer.pt", "data.jsonl", "notes.md", "pytorch_model.bin", ".env", "events.out.tfevents", "a.py"):
        (work / name).write_text("x")
    assert set(Checkpoint(work).files()) == {
        "1_Pooling/config.json", "config.json", "config_sentence_transformers.json", "configuration_elastic.py",
        "configuration_m3bert.py", "files_elastic.py", "model.safetensors", "modeling_elastic.py",
        "modeling_m3bert.py", "modules.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json",
        "training.json",
    }  # fmt: skip


def test_a_link_out_of_the_checkpoint_is_refused(folder, tmp_path):
    (tmp_path / "secrets.json").write_text("{}")
    (folder / "added_tokens.json").symlink_to(tmp_path / "secrets.json")
    refused(r"added_tokens\.json is a link out of .*: put the file there, or remove it", Checkpoint(folder).files)
