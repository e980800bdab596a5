"""Files that once ended in a traceback, or in an error that did not name them: found by `test_fuzz.py`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel

from modeling_m3bert import EmbeddingSettings, M3BertModel
from scripts.command import naming
from scripts.recipes import read_recipes
from tests.conftest import tiny_config, write_modules
from tests.test_fuzz import LINES, PLAN, RECORD, RESULTS
from trainers import Grid
from trainers.core.composition import mapping_of
from trainers.data.collators import joined_text
from trainers.data.files import load_files, require_texts, stream_files
from trainers.evaluation import GridEncoder, GridResults
from trainers.hub.training_record import TrainingRecord, file_name
from trainers.index.corpus import Corpus
from trainers.index.plan import Plan


def documents(file: str) -> list[Any]:
    return list(Corpus([file], "anchor").documents())


def record(file: Path) -> TrainingRecord | None:
    return TrainingRecord.find(file.parent)


SCORE = RESULTS["scores"][0]
LOAD = GridResults.load
JSON_FILES: dict[str, tuple[str, Callable[[Path], Any], Any, str]] = {
    "an array of results": ("results.json", LOAD, [], "is not a JSON object"),
    "a version that is a list": ("results.json", LOAD, {**RESULTS, "schema_version": []}, "version \\[\\]"),
    "scores that are no list": ("results.json", LOAD, {**RESULTS, "scores": 3}, "scores must be"),
    "a score of text": ("results.json", LOAD, {**RESULTS, "scores": [{**SCORE, "value": "x"}]}, "value of"),
    "an unknown field": ("results.json", LOAD, {**RESULTS, "scores": [{**SCORE, "a\n": 1}]}, r"'a\\n'"),
    "a granularity of nothing": (
        "results.json", LOAD, {**RESULTS, "scores": [{**SCORE, "granularity": ""}]}, "is not a grid",
    ),
    "a task that is a path": (
        "results.json", LOAD, {**RESULTS, "scores": [{**SCORE, "task_type": "../x"}]}, "task '../x'",
    ),
    "variances of a path": ("results.json", LOAD, {**RESULTS, "variances": {"a/b": {}}}, "task 'a/b'"),
    "a plan that is a list": ("plan.json", Plan.load, [1], "is not a JSON object"),
    "a shortlist of text": ("plan.json", Plan.load, {**PLAN, "shortlist": "10"}, "shortlist must be of type int"),
    "a record of numbers": ("training.json", record, {**RECORD, "tags": 3}, "tags must be of type list"),
    "a record that is text": ("training.json", record, "x", "is not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_json_file_of_another_form_is_refused(name, tmp_path):
    file, read, content, message = JSON_FILES[name]
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"{file}.*{message}"):
        read(tmp_path / file)


SETTINGS = {
    "no array": ("modules.json", {}, "modules.json is not a JSON array"),
    "no path": ("modules.json", [{"type": "x"}], "has a module without type and path"),
    "a length of text": (
        "sentence_bert_config.json",
        {"max_seq_length": "48"},
        "='48' must be of type int",
    ),
    "a prompt of numbers": (
        "config_sentence_transformers.json",
        {"prompts": {"query": 3}},
        "a prompt that is not text",
    ),
    "prompts in a list": ("config_sentence_transformers.json", {"prompts": ["a"]}, "prompts=.* must be of type dict"),
    "a pooling of numbers": ("1_Pooling/config.json", {"pooling_mode": [1, 2]}, "the pooling '1 \\+ 2'; legal values"),
    "a map without sizes": ("2_Dense/config.json", {}, "2_Dense of .* has no in_features and out_features"),
    "a map of another size": ("2_Dense/config.json", {"in_features": 9, "out_features": 4}, "size mismatch"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_another_form_are_refused(name, tmp_path):
    file, content, message = SETTINGS[name]
    (tmp_path / "config.json").write_text("{}")
    write_modules(tmp_path, width=8, max_length=48, projection=torch.nn.Linear(8, 4))
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as refused:
        EmbeddingSettings.find(tmp_path)
    assert "\n" not in str(refused.value)


def test_weights_of_another_shape_are_one_line(tiny_tokenizer, tmp_path):
    M3BertModel(tiny_config()).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.ones(3, 5)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{tmp_path}.* cannot be loaded: .*embed_tokens.weight"):
        GridEncoder.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be loaded: .*embed_tokens.weight"), naming(tmp_path):
        M3BertModel.from_pretrained(tmp_path)


def test_weights_of_another_family_that_are_cut_are_named(encoder_folder, tiny_tokenizer, tmp_path):
    BertModel.from_pretrained(encoder_folder).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="model.safetensors cannot be read; it may be incomplete"):
        GridEncoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("text", ["a: [", "a: |x", "\x1f", "2001-99-99", "{a: b"])
def test_words_that_are_not_yaml_are_one_line(text, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    for read in (lambda: mapping_of("--pic", text), lambda: read_recipes([str(tmp_path / "recipe.yaml")])):
        with pytest.raises(ValueError, match="(--pic|recipe.yaml).* is not YAML: ") as refused:
            read()
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("read", [lambda file: load_files([file]), lambda file: list(stream_files([file])), documents])
@pytest.mark.parametrize("how", ["cut at once", "cut later", "no gzip", "a flipped bit"])
def test_a_broken_archive_is_named(how, read, tmp_path):
    whole = gzip.compress(b"\n".join(LINES * 50), mtime=0)
    middle = len(whole) // 2
    content = {
        "cut at once": whole[:12],
        "cut later": whole[:-9],
        "no gzip": LINES[0],
        "a flipped bit": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
    }
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(content[how])
    with pytest.raises(ValueError, match="rows.jsonl.gz") as refused:
        read(str(file))
    assert "\n" not in str(refused.value)


def test_names_of_columns_with_line_breaks_stay_on_one_line(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('"a\nb",c\n1,2\n')
    for read in (
        lambda: require_texts(load_files([str(file)]), ["x"]),
        lambda: joined_text({"a\nb": 1, "x": 2}, "x", ""),
    ):
        with pytest.raises(ValueError, match="has a b, ") as refused:
            read()
        assert "\n" not in str(refused.value)


def test_half_a_character_is_no_text(tiny_tokenizer, tiny_model):
    encoder = GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("6x32"))
    with pytest.raises(ValueError, match="is not text: it has half of a surrogate pair"):
        encoder.encode(["a name", "a \ud800 name"])


def test_a_signature_in_a_url_is_not_recorded():
    assert file_name("https://host/pairs.jsonl?signature=secret") == "pairs.jsonl"
    assert file_name("data/what?.jsonl") == "what?.jsonl"
