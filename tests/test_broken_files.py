"""Files that once ended in a traceback, or in an error that did not name them: found by `test_fuzz.py`."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel

from modeling_m3bert import M3BertModel
from scripts.command import naming
from tests.conftest import tiny_config
from trainers.evaluation import GridEncoder
from trainers.hub.training_record import file_name


def test_weights_of_another_shape_are_one_line(tiny_tokenizer, tmp_path):
    M3BertModel(tiny_config()).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.ones(3, 5)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be loaded: "), naming(tmp_path):
        GridEncoder.from_pretrained(tmp_path)


def test_weights_of_another_family_that_are_cut_are_named(encoder_folder, tiny_tokenizer, tmp_path):
    BertModel.from_pretrained(encoder_folder).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="model.safetensors cannot be read; it may be incomplete"):
        GridEncoder.from_pretrained(tmp_path)


def test_a_signature_in_a_url_is_not_recorded():
    assert file_name("https://host/pairs.jsonl?signature=secret") == "pairs.jsonl"
    assert file_name("data/what?.jsonl") == "what?.jsonl"
