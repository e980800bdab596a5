"""Quality while training: evaluators of sentence-transformers and of grids, which select the best checkpoint."""

import json

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import EarlyStoppingCallback

from m3bert.evaluation import GridEncoder, GridEvaluator, as_sentence_transformer, find_tasks, load_task, score_grid
from m3bert.modeling import M3BertModel
from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer, Granularity
from tests.conftest import quiet, save, tiny_config
from tests.evaluation_data import write_data
from tests.trainers.tiny_run import run_two


library = pytest.importorskip("sentence_transformers")
from sentence_transformers.sentence_transformer.evaluation import (  # noqa: E402  # the line above may skip
    EmbeddingSimilarityEvaluator,
)


STEPS = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
STEPS |= {"save_total_limit": 5, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}


@pytest.fixture
def data(tmp_path, sentences):
    return write_data(tmp_path / "data", sentences)


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    """An encoder pooled by [CLS], which normalises, has prompts and reads 24 tokens."""
    torch.manual_seed(2)
    settings = {"pooling": "cls", "max_length": 24, "normalize": True, "prompts": {"query": "open "}}
    return save(tmp_path / "encoder", M3BertModel(tiny_config(attention_dropout=0.1)), tiny_tokenizer, **settings)


def similarity(sentences) -> EmbeddingSimilarityEvaluator:
    return EmbeddingSimilarityEvaluator(sentences[:20], sentences[20:40], np.linspace(0, 1, 20).tolist(), name="mine")


def metrics_of(trainer) -> list[dict[str, float]]:
    """What was logged at each evaluation."""
    return [entry for entry in trainer.state.log_history if any(name.startswith("eval_") for name in entry)]


def contrastive(folder, output, sentences, evaluator, evaluation=None, **changes):
    args = ContrastiveConfig(**quiet(output, grid="2,6x8,32", **STEPS | {"per_device_train_batch_size": 8} | changes))
    pairs = Dataset.from_dict({"anchor": sentences[:16], "positive": sentences[16:32]})
    return ContrastiveTrainer(folder, args, train_dataset=pairs, eval_dataset=evaluation, evaluator=evaluator)


@pytest.mark.parametrize("granularity", [None, Granularity(2, 8), Granularity(0, 32)])
def test_a_model_in_memory_embeds_as_its_folder(folder, sentences, granularity):
    if granularity == Granularity(0, 32):
        model = M3BertModel.from_pretrained(folder)
        model.set_depths(table=torch.randn(99, 32).half().float())
        model.save_pretrained(folder)
    encoder = GridEncoder.from_pretrained(folder)
    options = {} if granularity is None else {"output_layer": granularity.layer, "output_dim": granularity.dim}
    loaded = library.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu", model_kwargs=options)
    model = as_sentence_transformer(encoder, granularity)
    for name in ("encode", "encode_query", "encode_document"):
        found, expected = (getattr(each, name)(sentences[:6]) for each in (model, loaded))
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert model.similarity_fn_name == "cosine"


def test_the_best_checkpoint_by_an_evaluator_of_sentence_transformers(folder, sentences, tmp_path):
    evaluator = similarity(sentences)
    changes = {"load_best_model_at_end": True, "metric_for_best_model": "eval_mine_spearman_cosine"}
    trainer = contrastive(folder, tmp_path / "out", sentences, evaluator, **changes)
    trainer.train()
    found = [metrics["eval_mine_spearman_cosine"] for metrics in metrics_of(trainer)]
    assert len(found) == 4 and len(set(found)) > 1 and trainer.state.best_metric == max(found)
    trainer.save_model(str(tmp_path / "best"))
    best = library.SentenceTransformer(str(tmp_path / "best"), trust_remote_code=True, device="cpu")
    assert similarity(sentences)(best)["mine_spearman_cosine"] == pytest.approx(max(found), abs=1e-6)


def test_a_grid_is_scored_as_an_evaluation_of_the_checkpoint(folder, data, sentences, tmp_path):
    """With the loss of held-out pairs beside it; the first task's full size selects where there is no loss."""
    pairs = Dataset.from_dict({"anchor": sentences[32:40], "positive": sentences[40:48]})
    evaluator = GridEvaluator(["stsb", *find_tasks(["cranfield"])], data=data)
    trainer = contrastive(folder, tmp_path / "out", sentences, evaluator, {"a": pairs, "b": pairs})
    trainer.train()
    seen = metrics_of(trainer)
    assert [{"eval_a_loss", "eval_b_loss"} & entry.keys() for entry in seen] == [{"eval_a_loss"}, {"eval_b_loss"}] * 4
    assert all(("eval_stsb_2x8_spearman" in entry) == ("eval_a_loss" in entry) for entry in seen), "scored once"
    trainer.save_model()
    saved = GridEncoder.from_pretrained(tmp_path / "out", grid="2,6x8,32")
    for task, metric in (("stsb", "spearman"), ("cranfield", "ndcg@10")):
        scores = score_grid(saved, load_task(find_tasks([task])[0], data))
        found = {g: seen[-2][f"eval_{task}_{g}_{metric}"] for g in saved.grid}
        assert found == pytest.approx({g: scores[g][metric] for g in saved.grid}, abs=1e-6)


def test_quality_selects_where_there_is_no_loss_and_stops_early(folder, data, sentences, tmp_path):
    evaluator = GridEvaluator(["stsb"], grid="6x32", data=data)
    trainer = contrastive(folder, tmp_path / "out", sentences, evaluator, load_best_model_at_end=True, max_steps=30)
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    found = [metrics["eval_stsb_6x32_spearman"] for metrics in metrics_of(trainer)]
    assert trainer.args.metric_for_best_model == "stsb_6x32_spearman" and trainer.args.greater_is_better
    assert trainer.state.best_metric == max(found) and len(found) == found.index(max(found)) + 3 < 30


def test_an_evaluator_changes_no_training(folder, data, sentences, tmp_path):
    """With dropout, whose random numbers it must not use up."""
    weights = []
    for evaluator in (None, [GridEvaluator(["stsb"], data=data), similarity(sentences)]):
        changes = {} if evaluator else {"eval_strategy": "no"}
        trainer = contrastive(folder, tmp_path / "out", sentences, evaluator, **changes)
        trainer.train()
        weights.append(trainer.backbone.state_dict())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


EVALUATION_OF_TWO = """
import json, sys
from datasets import Dataset
from tests.trainers.test_evaluator import GridEvaluator, contrastive, metrics_of, similarity

folder = sys.argv[1]
sentences = open(f"{folder}/sentences.txt").read().splitlines()
evaluators = [GridEvaluator(["stsb"], data=f"{folder}/data"), similarity(sentences)]
changes = {"max_steps": 1, "load_best_model_at_end": True, "per_device_train_batch_size": 4}
trainer = contrastive(f"{folder}/encoder", f"{folder}/out", sentences, evaluators, **changes)
trainer.train()
(metrics,) = metrics_of(trainer)
json.dump(metrics, open(f"{folder}/metrics-{trainer.args.process_index}.json", "w"))
if trainer.is_world_process_zero():
    trainer.save_model(f"{folder}/saved")
"""


def test_of_two_processes_the_first_evaluates_and_both_know(folder, data, sentences, tmp_path):
    (tmp_path / "sentences.txt").write_text("\n".join(sentences))
    run_two(tmp_path, EVALUATION_OF_TWO)
    first, second = (json.loads((tmp_path / f"metrics-{rank}.json").read_text()) for rank in (0, 1))
    assert first["eval_mine_spearman_cosine"] == second["eval_mine_spearman_cosine"]
    saved = GridEncoder.from_pretrained(tmp_path / "saved", grid="2,6x8,32")
    expected = GridEvaluator(["stsb"], data=data)(saved)
    assert {name: second[f"eval_{name}"] for name in expected} == pytest.approx(expected, abs=1e-6)
