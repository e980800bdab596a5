"""What a trainer takes: models and teachers by name or in memory."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, PeftModel

from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer, IBKDConfig, IBKDTrainer, Teacher
from tests.conftest import quiet, write_modules
from tests.trainers.tiny_run import quiet_model


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


def test_what_would_train_on_the_wrong_rows_or_on_none_is_refused(folder, pairs, tmp_path):
    args = ContrastiveConfig(**options(tmp_path))
    splits = DatasetDict({"train": pairs, "test": pairs})
    with pytest.raises(ValueError, match="splits of one data set, train, test: pass one of them"):
        ContrastiveTrainer(folder, args, train_dataset=splits)
    with pytest.raises(ValueError, match=r"\(7 rows\) is smaller than one batch \(8 rows\)"):
        ContrastiveTrainer(folder, args, train_dataset=pairs.select(range(7)))
    args = ContrastiveConfig(**options(tmp_path, dataloader_drop_last=False))
    assert ContrastiveTrainer(folder, args, train_dataset=pairs.select(range(7))).train().global_step == 1
