"""What a checkpoint remembers of its run: every setting that is not a default, and nothing of the machine."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from datasets import Dataset, DatasetInfo

import trainers
from modeling_m3bert import M3BertModel, convert_to_m3bert
from tests.conftest import tiny_config
from tests.published import contrastive_trainer
from trainers import ContrastiveConfig, papers
from trainers.record import RECORD_FILE, TrainingRecord, changed_settings, hub_datasets, hub_id, origin_of


def test_every_setting_that_is_not_a_default_is_on_record(tmp_path):
    plain = changed_settings(ContrastiveConfig(output_dir=str(tmp_path)))
    assert set(plain) == {"learning_rate", "per_device_train_batch_size"}  # which are always asked for
    changed = {
        "temperature": 0.02,
        "weight_decay": 0.5,
        "max_grad_norm": 2.0,
        "warmup_steps": 7,
        "lr_scheduler_type": "cosine",
        "text_columns": ["a", "b"],
        "dataloader_drop_last": False,
    }
    assert changed_settings(ContrastiveConfig(output_dir=str(tmp_path), **changed)) == {**plain, **changed}


def test_paths_tokens_and_bookkeeping_are_not(tmp_path):
    args = ContrastiveConfig(
        output_dir=str(tmp_path / "out"),
        hub_token="hf_secret",
        run_name="mine",
        logging_steps=3,
        save_steps=4,
        optim_args=f"file={tmp_path}",
        lr_scheduler_kwargs={"file": str(tmp_path)},
    )
    text = json.dumps(changed_settings(args))
    assert "hf_secret" not in text and "mine" not in text and "logging" not in text
    assert str(tmp_path) not in text and json.loads(text)["optim_args"] == f"file={tmp_path.name}"
    assert json.loads(text)["lr_scheduler_kwargs"] == {"file": tmp_path.name}


def test_a_run_goes_on_after_its_record_was_written(tmp_path, tiny_tokenizer, sentences):
    """Looking at the defaults must not reset what a running trainer shares with its library."""
    trainer = contrastive_trainer(tmp_path, tiny_tokenizer, sentences, save_steps=1, max_steps=3)
    trainer.train()
    steps = [TrainingRecord.find(tmp_path / f"checkpoint-{step}").steps for step in (1, 2, 3)]
    assert steps == [1, 2, 3]


def test_what_is_saved_is_found_again(tmp_path, tiny_tokenizer, sentences):
    trainer = contrastive_trainer(tmp_path, tiny_tokenizer, sentences)
    trainer.train()
    trainer.save_model()
    found = TrainingRecord.find(tmp_path)
    assert found == trainer.record() and found.rows == 24 and found.batch_size == 8
    assert found.paper["id"] == papers.M3BERT.id and found.grid == "2,4,6x8,16,32"
    assert str(tmp_path) not in (tmp_path / RECORD_FILE).read_text()
    (tmp_path / RECORD_FILE).write_text("{}")
    with pytest.raises(ValueError, match="is not a training record"):
        TrainingRecord.find(tmp_path)


def test_a_second_objective_knows_the_first(tmp_path, tiny_tokenizer, sentences):
    first = contrastive_trainer(tmp_path / "first", tiny_tokenizer, sentences)
    first.base_model = "user/base"
    first.save_model()
    model = M3BertModel.from_pretrained(tmp_path / "first")
    second = contrastive_trainer(tmp_path / "second", tiny_tokenizer, sentences, model)
    assert second.record().base_model == "user/base" and second.record().earlier == ["Matryoshka contrastive"]
    second.save_model()
    second.save_model()  # its own record is not an earlier one
    assert TrainingRecord.find(tmp_path / "second").earlier == ["Matryoshka contrastive"]


def test_the_origin_is_a_name_on_the_hub_or_nothing(tmp_path):
    assert hub_id("user/model") == "user/model" and hub_id("bert-base") == "bert-base"
    assert hub_id(str(tmp_path)) is None and hub_id("/no/such") is None and hub_id("") is None and hub_id(None) is None
    assert origin_of(tiny_config(name_or_path="user/model")) == ("user/model", [])
    assert origin_of(tiny_config(converted_from="user/bert")) == ("user/bert", [])


def test_a_conversion_remembers_its_source(tmp_path):
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = BertModel(BertConfig(vocab_size=99, **sizes))
    bert.config.name_or_path = "user/bert"
    converted = convert_to_m3bert(bert)
    converted.save_pretrained(tmp_path)
    assert M3BertModel.from_pretrained(tmp_path).config.converted_from == "user/bert"
    bert.config.name_or_path = str(tmp_path / "that" / "is" / "gone")
    assert convert_to_m3bert(bert).config.converted_from is None


def test_data_sets_of_the_hub_are_named():
    url = "hf://datasets/user/pairs@abc/data/train.parquet"
    info = DatasetInfo(download_checksums={url: {}, f"{url}2": {}, "/home/me/file.jsonl": {}})
    assert hub_datasets([Dataset.from_dict({"a": [1]}, info=info), [1, 2], None]) == ["user/pairs"]


@pytest.mark.parametrize("name", [name for name in trainers.__all__ if name.endswith("Trainer")])
def test_every_trainer_says_which_equation_of_which_paper_it_is(name):
    trainer = getattr(trainers, name)
    if name in ("NestedTrainer", "EmbeddingTrainer"):  # of any objective
        return
    assert trainer._paper.citation.startswith("@misc{") and trainer._equation and trainer._tag_names
    assert trainer._name != trainers.NestedTrainer._name


def test_no_setting_of_an_objective_counts_as_bookkeeping():
    """Their names must not look like those that are left out."""
    from transformers import TrainingArguments

    from trainers.record import BOOKKEEPING

    common = {field.name for field in fields(TrainingArguments)}
    configs = [getattr(trainers, name) for name in trainers.__all__ if name.endswith("Config")]
    own = {field.name for config in configs for field in fields(config)} - common
    assert {name for name in own if BOOKKEEPING.match(name)} == {"grid", "teacher_cache_dir"}
