"""On a GPU: objectives, training, fitted exits and a search give what they give on the CPU."""

from typing import Any

import pytest
import torch
from datasets import Dataset

from m3bert import trainers
from m3bert.evaluation import GridEncoder
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from tests.conftest import quiet, tiny_config
from tests.encode.test_ranks import OBJECTIVES, OWN_BATCH, embedding_gradients
from tests.exits.test_fit import random_texts
from tests.trainers.tiny_run import assert_same_weights, mlm_trainer, quiet_model


pytestmark = pytest.mark.gpu
MLM_GRID = trainers.Grid.parse("2,4,6x8,16,32")
MASKED = {
    "mlm": lambda: trainers.MultigranularMLM(MLM_GRID),
    "distillation": lambda: trainers.MatryoshkaDistillation(MLM_GRID, pairs="6x32>all", distillation_temperature=2.0),
}
METHODS = {
    "contrastive": (trainers.ContrastiveTrainer, trainers.ContrastiveConfig, {"grid": "2,6x8,32"}),
    "cached": (trainers.ContrastiveTrainer, trainers.ContrastiveConfig, {"grid": "2,6x8,32", "mini_batch_size": 3}),
    "mipic": (trainers.MIPICTrainer, trainers.MIPICConfig, {"unsupervised": False}),
    "mic": (trainers.MICTrainer, trainers.MICConfig, {"unsupervised": False}),
}


def moved(batch: Any, device: str) -> Any:
    if isinstance(batch, dict):
        return {name: moved(value, device) for name, value in batch.items()}
    return batch.to(device)


@pytest.mark.parametrize("name", [*OBJECTIVES, *OWN_BATCH])
def test_an_objective_has_the_same_gradients(name):
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        found.append(embedding_gradients((OBJECTIVES | OWN_BATCH)[name](), slice(None), device))
    assert found[0].keys() == found[1].keys()
    for key, expected in found[0].items():
        # ESE's decomposition of a squared matrix magnifies the rounding of sums.
        message = lambda text, key=key: f"{key}: {text}"  # noqa: E731
        torch.testing.assert_close(found[1][key].cpu(), expected, atol=1e-9, rtol=1e-6, msg=message)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", list(MASKED))
def test_a_masked_lm_has_the_same_gradients(name, half):
    ids = torch.randint(5, 99, (16, 20))
    labels = torch.where(torch.rand(ids.shape) < 0.4, ids, -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    torch.manual_seed(1)
    model = M3BertForMaskedLM(tiny_config(embedding_dropout=0.0, attention_dropout=0.0, initializer_range=0.05))
    found = []
    for device in ("cpu", "cuda"):
        nested = trainers.NestedModel(model, MASKED[name]()).to(device).train()
        nested.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=half and device == "cuda"):
            loss = nested(**moved(batch, device))["loss"]
        loss.backward()
        gradients = [parameter.grad.to("cpu", copy=True) for parameter in model.parameters()]
        found.append([loss.detach().cpu(), *gradients])
    for expected, actual in zip(*found, strict=True):
        assert (actual - expected).norm() < (0.03 if half else 1e-4) * expected.norm()


@pytest.mark.parametrize("method", list(METHODS))
def test_training_takes_the_same_steps(method, tiny_tokenizer, sentences, tmp_path):
    trainer_class, config_class, settings = METHODS[method]
    dataset = Dataset.from_dict({"query": sentences[:24], "answer": sentences[24:]})
    values = {"max_steps": 3, "learning_rate": 1e-3, "per_device_train_batch_size": 8, "logging_steps": 1, "seed": 3}
    values |= {"adam_epsilon": 1e-3}  # else a gradient of nearly 0 moves a weight as far as any other
    models, losses = [], []
    for on_cpu in (True, False):
        folder = tmp_path / str(on_cpu)
        args = config_class(**quiet(folder, **{**values, **settings, "use_cpu": on_cpu}))
        model = quiet_model().model
        trainer = trainer_class(model, args, tiny_tokenizer, dataset, eval_dataset=dataset)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        losses[-1].append(trainer.evaluate()["eval_loss"])
        assert model.device.type == ("cpu" if on_cpu else "cuda")
        trainer.save_model()
        models.append(M3BertModel.from_pretrained(folder))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert_same_weights(*models, atol=1e-4)


@pytest.mark.parametrize("options", [{"bf16": True}, {"fp16": True}, {"torch_compile": True}, {"tf32": True}], ids=str)
def test_masked_lm_training_with_an_option_of_a_gpu_stays_close(options, tiny_tokenizer, tmp_path):
    losses = []
    for changes in ({}, {"use_cpu": False, **options}):
        trainer = mlm_trainer(tiny_tokenizer, tmp_path / str(len(losses)), learning_rate=1e-3, **changes)
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


@pytest.mark.parametrize("paths", [None, {4: [1, 2, 5, 6]}], ids=["exits", "paths"])
def test_fitted_exits_are_the_same(paths, tiny_tokenizer):
    texts, grid, found = random_texts(300), trainers.Grid.parse("0,2,4,6x8,32"), []
    for device in ("cpu", "cuda"):
        torch.manual_seed(5)
        model = M3BertModel(tiny_config(matryoshka_layers=[], matryoshka_dims=[])).eval().to(device)
        trainers.fit_exits(model, tiny_tokenizer, texts, layers=[2, 4] if paths is None else [2], paths=paths)
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        found.append(GridEncoder(model, tiny_tokenizer, grid).encode(texts[:50]))
    for granularity in grid:
        ours, expected = (torch.as_tensor(each.at(granularity, normalize=True)) for each in reversed(found))
        torch.testing.assert_close(ours, expected, atol=2e-3, rtol=2e-3)
