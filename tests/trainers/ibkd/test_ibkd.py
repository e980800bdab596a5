"""The trainers of IBKD: teacher and student of different kinds, what is published, and two processes."""

import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, BertModel, PreTrainedTokenizerFast

from m3bert import trainers
from m3bert.evaluation import GridEncoder
from m3bert.models.settings import MODULES_FILE, PROJECTION_FOLDER
from tests.conftest import assert_close, quiet, refused, tiny_config
from tests.trainers.tiny_run import assert_same_weights, bert_config, pair_config, quiet_model


pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer


def distiller(model, tokenizer, texts, folder, teacher_folder, **changes) -> trainers.IBKDTrainer:
    """Texts, or for a dict of columns their rows."""
    values = {
        "teacher_name_or_path": str(teacher_folder), "teacher_cache_dir": str(teacher_folder.parent / "cache"),
        "per_device_train_batch_size": 8, "max_steps": 3, "max_length": 48, "logging_steps": 1,
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    args = trainers.IBKDConfig(**quiet(folder / "student", **{**values, **changes}))
    columns = texts if isinstance(texts, dict) else {"text": texts}
    return trainers.IBKDTrainer(model, args, tokenizer, Dataset.from_dict(columns))


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of letters: it has nothing in common with the teacher's words."""
    vocabulary = {
        token: index for index, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", cls_token="<s>", sep_token="</s>",
        model_max_length=48, model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


@pytest.mark.parametrize(
    "method", ["ibkd", "hpd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ckd", "crd", "mse"))]
)
def test_a_student_learns_from_a_teacher_with_another_tokenizer(encoder_folder, sentences, tmp_path, method):
    changes = {"projection_dim": 6} if method == "hpd" else {}
    trainer = distiller(
        quiet_model().model, letters(), sentences, tmp_path, encoder_folder, method=method, max_steps=20,
        learning_rate=3e-3, **changes,
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    names = {"ibkd": {"infonce_6x32", "hsic_6x32"}, "ckd": {"infonce_6x32"}, "hpd": {"hpd_6x6"}}
    logged = {key for key in trainer.state.log_history[0] if "_6x" in key}
    assert logged == names.get(method, {f"{method}_6x32"})


def test_distillation_over_a_grid(tiny_tokenizer, encoder_folder, sentences, tmp_path):
    trainer = distiller(
        quiet_model().model, tiny_tokenizer, sentences, tmp_path, encoder_folder, grid="2,4,6x8,32", max_steps=1
    )
    trainer.train()
    grid = trainers.Grid.parse("2,4,6x8,32")
    assert {f"{part}_{g}" for part in ("infonce", "hsic") for g in grid} <= trainer.state.log_history[0].keys()
    assert trainer.backbone.config.matryoshka_dims == [8, 32]
    parts = trainer.model.objective.parts
    assert isinstance(parts["infonce"], trainers.TeacherContrast)
    assert set(parts["infonce"].maps) == {"2", "4", "6"}
    assert isinstance(parts["hsic"], trainers.HSIC)


def test_all_columns_are_taught_and_joined_texts_are_the_key(tiny_tokenizer, encoder_folder, sentences, tmp_path):
    rows = {"title": sentences[:16], "text": sentences[16:32], "other": sentences[32:48]}
    trainer = distiller(
        quiet_model().model, tiny_tokenizer, rows, tmp_path, encoder_folder, text_columns=["title+text", "other"],
        max_steps=1,
    )  # fmt: skip
    trainer.train()
    joined = f"{sentences[0]} </s> {sentences[16]}"
    expected = torch.from_numpy(SentenceTransformer(str(encoder_folder)).encode([joined, sentences[32]]))
    assert_close(trainer.teacher.of([joined, sentences[32]]), expected)


def finetuner(model, tokenizer, sentences, folder, **changes) -> trainers.IBKDFinetuningTrainer:
    values = {"max_steps": 3, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    args = pair_config(trainers.IBKDFinetuningConfig, folder, **{**values, **changes})
    third = len(sentences) // 3
    rows = {
        "anchor": sentences[:third],
        "positive": sentences[third : 2 * third],
        "negative": sentences[2 * third : 3 * third],
    }
    return trainers.IBKDFinetuningTrainer(model, args, tokenizer, Dataset.from_dict(rows))


def test_the_second_stage_is_a_contrastive_loss_and_hsic(tiny_tokenizer, sentences, tmp_path):
    trainer = finetuner(quiet_model().model, tiny_tokenizer, sentences, tmp_path)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["loss"] == pytest.approx(entry["contrastive_6x32"] + 0.5 * entry["hsic_6x32"], rel=1e-4)
    assert isinstance(trainer.model.objective, trainers.Composition)
    without = finetuner(quiet_model().model, tiny_tokenizer, sentences, tmp_path, beta=0.0)
    assert set(without.model.objective.parts) == {"contrastive"}


def test_a_projection_is_trained_and_published_with_the_student(tiny_tokenizer, sentences, tmp_path):
    trainer = finetuner(quiet_model().model, tiny_tokenizer, sentences, tmp_path / "student", projection_dim=6)
    before = trainer.projection.weight.detach().clone()
    torch.testing.assert_close(before @ before.T, torch.eye(6), atol=1e-5, rtol=0)
    trainer.train()
    trainer.save_model()
    assert not torch.allclose(trainer.projection.weight, before)
    assert trainer.state.log_history[0].keys() >= {"contrastive_6x6", "hsic_6x6"}
    assert 6 not in trainer.backbone.config.matryoshka_dims
    assert not (tmp_path / "student" / "objective.safetensors").exists()
    encoder = GridEncoder(trainer.backbone, tiny_tokenizer, trainers.Grid.parse("6x6"), projection=trainer.projection)
    theirs = SentenceTransformer(str(tmp_path / "student"), trust_remote_code=True).encode(sentences[:5])
    np.testing.assert_allclose(theirs, encoder.encode(sentences[:5]).layers[6].numpy(), atol=1e-5)


def test_the_full_size_is_that_of_the_projection(tmp_path):
    """Of every configuration whose default is the full size."""
    for config_class in (trainers.SimCSEConfig, trainers.IBKDConfig, trainers.IBKDFinetuningConfig):
        for projection_dim, size in ((None, "6x32"), (8, "6x8")):
            args = config_class(**quiet(tmp_path, projection_dim=projection_dim))
            assert str(args.grid_for(tiny_config())) == size


def test_a_run_with_a_projection_resumes(tiny_tokenizer, sentences, tmp_path):
    changes = {"projection_dim": 6, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = finetuner(quiet_model().model, tiny_tokenizer, sentences, tmp_path / "whole", **changes)
    whole.train()
    resumed = finetuner(quiet_model().model, tiny_tokenizer, sentences, tmp_path / "resumed", **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same_weights(resumed.model, whole.model)
    shutil.rmtree(tmp_path / "whole" / "checkpoint-2" / PROJECTION_FOLDER)
    again = finetuner(quiet_model().model, tiny_tokenizer, sentences, tmp_path / "again", **changes)
    with pytest.raises(ValueError, match=f"has no {PROJECTION_FOLDER}/config.json"):
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    (tmp_path / "whole" / "checkpoint-2" / MODULES_FILE).unlink()
    with pytest.raises(ValueError, match="checkpoint-2 has no projection"):
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))


def test_a_projection_with_cached_gradients_is_that_of_the_whole_batch(tiny_tokenizer, sentences, tmp_path):
    found = []
    for mini_batch_size in (None, 3):
        torch.manual_seed(0)
        trainer = finetuner(
            quiet_model().model, tiny_tokenizer, sentences, tmp_path, projection_dim=6, max_steps=1, optim="sgd",
            mini_batch_size=mini_batch_size,
        )  # fmt: skip
        trainer.train()
        found.append(trainer.model)
    assert_same_weights(*found)


def test_prefixes_of_a_projection(tiny_tokenizer, sentences, tmp_path):
    trainer = finetuner(quiet_model().model, tiny_tokenizer, sentences, tmp_path, projection_dim=8, grid="6x2,4,8")
    trainer.train()
    assert {"contrastive_6x2", "contrastive_6x4", "contrastive_6x8"} <= trainer.state.log_history[0].keys()
    for grid, outside in (("2,6x8", "2x8"), ("6x8,16", "6x16")):
        with pytest.raises(ValueError, match=f"projects layer 6 to 8 dims; outside of it: {outside}"):
            finetuner(quiet_model().model, tiny_tokenizer, sentences, tmp_path, projection_dim=8, grid=grid)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "pkd"}, "method='pkd' is unknown; legal values: ibkd, ckd, mse, crd, hpd"),
        ({"method": "hpd"}, "method='hpd' needs projection_dim"),
        ({"teacher_name_or_path": None}, "needs a teacher: set teacher_name_or_path"),
        ({"hsic": {"sigma": 1.0}}, "hsic has unknown keys: sigma; legal values: kernel, gamma, "),
        ({"method": "hpd", "projection_dim": 24}, "HPD trains one granularity of 20 dims"),
    ],
)
def test_bad_input_of_the_first_stage(tiny_tokenizer, encoder_folder, sentences, tmp_path, changes, message):
    refused(message, distiller, quiet_model().model, tiny_tokenizer, sentences, tmp_path, encoder_folder, **changes)


def test_the_texts_of_a_stream_are_embedded_before_training(tiny_tokenizer, encoder_folder, sentences, tmp_path):
    stream = IterableDataset.from_generator(lambda: ({"text": text} for text in sentences))
    changes = {"teacher_name_or_path": str(encoder_folder), "teacher_cache_dir": str(tmp_path / "cache")}
    args = trainers.IBKDConfig(**quiet(tmp_path, text_columns=["text"], max_steps=1, **changes))
    trainer = trainers.IBKDTrainer(quiet_model().model, args, tiny_tokenizer, stream)
    expected = trainers.Teacher(str(encoder_folder)).embed(sentences, tmp_path / "other")
    assert_close(trainer.teacher.of(sentences), expected.of(sentences))
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_student_of_any_architecture(tiny_tokenizer, encoder_folder, sentences, tmp_path):
    model = BertModel(bert_config(hidden_size=16, num_hidden_layers=2))
    trainer = distiller(model, tiny_tokenizer, sentences, tmp_path, encoder_folder, max_steps=2)
    trainer.train()
    trainer.save_model()
    again = AutoModel.from_pretrained(tmp_path / "student")
    assert again.config.model_type == "bert"
    assert_same_weights(again, trainer.backbone)
