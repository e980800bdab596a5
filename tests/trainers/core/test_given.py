"""What a trainer takes: models and teachers by name or in memory, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel
from transformers import TrainingArguments

from tests.conftest import quiet, write_modules
from tests.trainers.tiny_run import quiet_model
from trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    IBKDConfig,
    IBKDTrainer,
    MultigranularMLMConfig,
    MultigranularMLMTrainer,
    Teacher,
)


@pytest.fixture
def pairs(sentences):
    return Dataset.from_dict({"anchor": sentences[:16], "positive": sentences[16:32]})


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    """An encoder with its tokenizer, pooled by [CLS] and published for texts of 24 tokens."""
    quiet_model().model.save_pretrained(tmp_path / "encoder")
    tiny_tokenizer.save_pretrained(tmp_path / "encoder")
    write_modules(tmp_path / "encoder", width=32, pooling="cls", max_length=24)
    return tmp_path / "encoder"


def options(tmp_path, **changes):
    return quiet(tmp_path / "out", grid="6x8,32", max_steps=1, per_device_train_batch_size=8, **changes)


def loss_of(trainer):
    return trainer.train().training_loss


def test_a_model_by_name_and_in_memory_trains_the_same(folder, pairs, tmp_path, tiny_tokenizer):
    library = pytest.importorskip("sentence_transformers")
    model = type(quiet_model().model).from_pretrained(folder)
    given = {
        "folder": str(folder),
        "path": folder,
        "model": model,
        "SentenceTransformer": library.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu"),
    }
    losses = {}
    for name, each in given.items():
        trainer = ContrastiveTrainer(each, ContrastiveConfig(**options(tmp_path)), train_dataset=pairs)
        assert trainer.args.pooling == "cls" and trainer.args.max_length == 24, name
        assert trainer.processing_class.get_vocab() == tiny_tokenizer.get_vocab()
        losses[name] = loss_of(trainer)
    assert all(loss == pytest.approx(losses["model"], rel=1e-5) for loss in losses.values()), losses


def test_peft_config_trains_a_new_adapter(folder, pairs, tmp_path):
    config = LoraConfig(r=2, target_modules="all-linear")
    args = ContrastiveConfig(**options(tmp_path))
    trainer = ContrastiveTrainer(folder, args, train_dataset=pairs, peft_config=config)
    assert isinstance(trainer.backbone, PeftModel)
    trainable = {name for name, one in trainer.backbone.named_parameters() if one.requires_grad}
    assert trainable and all("lora_" in name for name in trainable)
    with pytest.raises(ValueError, match="the model has one: pass one of them"):
        ContrastiveTrainer(trainer.backbone, args, train_dataset=pairs, peft_config=config)


def test_a_teacher_by_name_and_in_memory_teaches_the_same(encoder_folder, folder, sentences, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    texts = Dataset.from_dict({"text": sentences[:8]})
    loaded = library.SentenceTransformer(str(encoder_folder), device="cpu")
    embeddings = []
    for teacher in (str(encoder_folder), encoder_folder, loaded, Teacher(str(encoder_folder))):
        args = IBKDConfig(**options(tmp_path, method="mse", teacher_cache_dir=str(tmp_path / "teachers")))
        trainer = IBKDTrainer(folder, args, train_dataset=texts, teacher=teacher)
        embeddings.append(trainer.teacher.of(sentences[:8]))
    for each in embeddings[1:]:
        torch.testing.assert_close(each, embeddings[0])
    with torch.no_grad():
        next(loaded.parameters()).mul_(2)
    changed = IBKDTrainer(folder, args, train_dataset=texts, teacher=loaded).teacher.of(sentences[:8])
    assert not torch.allclose(changed, embeddings[0]), "the weights in memory teach, not those on disk"


ROWS = [{"anchor": "a", "positive": "b"}]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": 5}, "model is a int: pass a folder, a Hub id, a model of transformers or peft, or a Sentence"),
        ({"args": None}, "args is a TrainingArguments: ContrastiveTrainer takes a ContrastiveConfig"),
        ({"train_dataset": ROWS}, r"train_dataset is a list: pass a Dataset .*Dataset\.from_list\(rows\)"),
        ({"eval_dataset": ROWS}, "eval_dataset is a list: pass a Dataset"),
        (
            {"train_dataset": DatasetDict({"train": Dataset.from_list(ROWS)})},
            "train_dataset is a DatasetDict: pass one of its splits, 'train'",
        ),
        ({"teacher": 5}, "teacher is a int: pass a folder, a Hub id, a SentenceTransformer, a Teacher or"),
        ({"processing_class": None}, "no name to find its tokenizer by: pass processing_class"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(pairs, tmp_path, tiny_tokenizer, changes, message):
    args = ContrastiveConfig(**options(tmp_path))
    if "args" in changes:
        changes = {"args": TrainingArguments(**quiet(tmp_path))}
    given = {"model": quiet_model().model, "args": args, "processing_class": tiny_tokenizer, "train_dataset": pairs}
    with pytest.raises(ValueError, match=message) as caught:
        ContrastiveTrainer(**given | changes)
    assert "\n" not in str(caught.value)


def test_a_masked_lm_says_how_texts_become_input_ids(tmp_path, tiny_tokenizer, sentences):
    args = MultigranularMLMConfig(**options(tmp_path))
    texts = Dataset.from_dict({"text": sentences})
    with pytest.raises(ValueError, match=r"lacks the column\(s\) input_ids; it has text\. .*tokenize_texts makes"):
        MultigranularMLMTrainer(quiet_model(), args, tiny_tokenizer, texts)
