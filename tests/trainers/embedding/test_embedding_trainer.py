"""The trainer of all objectives on pooled embeddings: it trains every method, and needs dropout for two views."""

import math

import peft
import pytest
import torch
import transformers
from datasets import Dataset

from m3bert import trainers
from m3bert.modeling import M3BertModel
from m3bert.trainers import (
    Composition,
    Contrastive,
    ContrastiveConfig,
    ContrastiveTrainer,
    CrossDepth,
    EspressoConfig,
    EspressoTrainer,
    Grid,
    Matryoshka2dConfig,
    Matryoshka2dTrainer,
    SimCSEConfig,
    SimCSETrainer,
    StarbucksConfig,
    StarbucksTrainer,
    TeacherEmbeddings,
)
from m3bert.trainers.embedding.trainer import has_dropout
from tests.conftest import quiet, tiny_config
from tests.trainers.tiny_run import bert_config, pair_config


RUNS = {
    "simcse": (SimCSEConfig, SimCSETrainer, {"unsupervised": False}, ["simcse_6x32"]),
    "unsupervised": (SimCSEConfig, SimCSETrainer, {"text_columns": ["query"]}, ["simcse_6x32"]),
    "espresso": (EspressoConfig, EspressoTrainer, {"grid": "2,6x8,32"}, ["espresso_2x8", "espresso_align_6x8"]),
    "2dmse": (Matryoshka2dConfig, Matryoshka2dTrainer, {"grid": "2,6x8,32"}, ["2dmse_align", "2dmse_prior_full"]),
    "starbucks": (StarbucksConfig, StarbucksTrainer, {"grid": "2x8,6x32"}, ["starbucks_2x8", "starbucks_kl_2x8"]),
}


def run(name, model, tokenizer, sentences, folder, **changes):
    config_class, trainer_class, settings, _ = RUNS[name]
    dataset = Dataset.from_dict({"query": sentences[:24], "answer": sentences[24:]})
    values = {"max_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 8}
    values |= {"per_device_eval_batch_size": 8, "logging_steps": 1}
    args = config_class(**quiet(folder, **{**values, **settings, **changes}))
    return trainer_class(model, args, tokenizer, dataset, eval_dataset=dataset)


@pytest.mark.parametrize("mini_batch_size", [None, 3])
@pytest.mark.parametrize("name", list(RUNS))
def test_every_objective_trains_and_leaves_the_model_its_own(
    tiny_tokenizer, sentences, tmp_path, name, mini_batch_size
):
    model = M3BertModel(tiny_config())
    before = {n: p.clone() for n, p in model.named_parameters()}
    trainer = run(name, model, tiny_tokenizer, sentences, tmp_path, mini_batch_size=mini_batch_size)
    trainer.train()
    assert all(not torch.equal(parameter, before[n]) for n, parameter in model.named_parameters())
    assert set(RUNS[name][3]) <= set(trainer.state.log_history[0])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])
    assert model.forward.__func__ is M3BertModel.forward


def test_an_objective_that_one_composed_is_trained(tiny_tokenizer, sentences, tmp_path):
    grid = Grid.parse("2,6x8,32")
    objective = Composition({"same": (1.0, Contrastive(grid)), "across": (2.0, CrossDepth(grid))})
    args = pair_config(ContrastiveConfig, tmp_path, grid=str(grid), max_steps=1)
    dataset = Dataset.from_dict({"query": sentences[:8], "answer": sentences[8:16]})
    trainer = ContrastiveTrainer(M3BertModel(tiny_config()), args, tiny_tokenizer, dataset, objective=objective)
    trainer.train()
    assert {"same_2x8", "across_2x8"} <= set(trainer.state.log_history[0])


def test_dropout_is_looked_for_in_the_encoder_and_its_adapter():
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 1}
    config = bert_config(**no_dropout, classifier_dropout=0.1)
    assert not has_dropout(transformers.BertForSequenceClassification(config)), "the head's is no view of a text"
    lora = peft.LoraConfig(target_modules=["query"], lora_dropout=0.1)
    assert has_dropout(peft.get_peft_model(transformers.BertModel(config), lora))
    config.attention_probs_dropout_prob = 0.1
    assert has_dropout(transformers.BertModel(config))


def test_two_views_of_a_text_need_dropout(tiny_tokenizer, sentences, tmp_path):
    without = M3BertModel(tiny_config(embedding_dropout=0.0, attention_dropout=0.0))
    with pytest.raises(ValueError, match="M3BertModel has no dropout .* two views of a text would be the same"):
        run("unsupervised", without, tiny_tokenizer, sentences, tmp_path)
    bert = transformers.BertModel(bert_config())
    trainer = run("unsupervised", bert, tiny_tokenizer, sentences, tmp_path)
    views = trainer.data_collator([{"query": text} for text in sentences[:4]])
    assert list(views) == ["query", "query (view 2)"]
    model = trainer.model.train()
    states = [text.pooled(6) for text in model.encode(views).values()]
    assert not torch.allclose(*states)
    with pytest.raises(ValueError, match="takes one text column; found: query, answer"):
        run("unsupervised", bert, tiny_tokenizer, sentences, tmp_path, text_columns=None)


@pytest.mark.parametrize("name", ["espresso", "2dmse", "starbucks"])
def test_the_teacher_must_be_in_the_grid(tiny_tokenizer, sentences, tmp_path, name):
    grid = "2x8,4x32" if name == "starbucks" else "2,4x8,32"
    with pytest.raises(ValueError, match="needs the full size 6x32: it is the teacher of the others"):
        run(name, M3BertModel(tiny_config()), tiny_tokenizer, sentences, tmp_path, grid=grid)


def test_a_learned_temperature_trains_without_decay_and_is_resumed_and_not_published(
    tiny_tokenizer, sentences, tmp_path
):
    dataset = Dataset.from_dict({"query": sentences[:24], "answer": sentences[24:]})
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 8}
    changes |= {"learn_temperature": True, "projector_learning_rate": 0.1, "grid": "6x8,32", "weight_decay": 0.1}
    trained = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        args = ContrastiveConfig(**quiet(tmp_path if resume is None else tmp_path / "again", **changes))
        torch.manual_seed(0)
        trainer = ContrastiveTrainer(M3BertModel(tiny_config()), args, tiny_tokenizer, dataset)
        assert "objective.log_scale" not in trainer.get_decay_parameter_names(trainer.model)
        trainer.train(resume_from_checkpoint=resume)
        trained.append(trainer.model.objective.log_scale.item())
    assert trained[0] == trained[1] != pytest.approx(-math.log(0.05), abs=1e-6)
    assert (tmp_path / "checkpoint-2" / "objective.safetensors").is_file()
    trainer.save_model()
    assert not (tmp_path / "again" / "objective.safetensors").is_file()


@pytest.mark.parametrize("method", ["Contrastive", "SimCSE", "MIPIC", "IBKDFinetuning", "IBKD"])
def test_a_trainer_looks_at_its_columns_once(tiny_tokenizer, sentences, tmp_path, monkeypatch, method):
    """Of all its data sets together: what stream it is may not be read twice."""
    config_class, trainer_class = getattr(trainers, f"{method}Config"), getattr(trainers, f"{method}Trainer")
    asked, columns_of = [], config_class.columns_of

    def counting(self, *datasets):
        asked.append(datasets)
        return columns_of(self, *datasets)

    monkeypatch.setattr(config_class, "columns_of", counting)
    changes = {"per_device_train_batch_size": 8} | ({"method": "mse"} if method == "IBKD" else {"unsupervised": False})
    pairs = Dataset.from_dict({"query": sentences[:24], "answer": sentences[24:]})
    vectors = TeacherEmbeddings.write(["open"], torch.ones(1, 20), tmp_path / "teacher.npy")
    teacher = {"teacher": vectors} if method == "IBKD" else {}
    args = config_class(**quiet(tmp_path, grid="6x32" if method == "SimCSE" else "6x8,32", **changes))
    trainer = trainer_class(
        M3BertModel(tiny_config()), args, tiny_tokenizer, pairs, eval_dataset={"a": pairs, "b": pairs}, **teacher
    )
    assert len(asked) == 1 and trainer.columns == ("query", "answer")
