"""NestedTrainer: what it logs, evaluates and refuses, and that the Trainer's features work unchanged."""

import copy
import functools
import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertForMaskedLM, DataCollatorForTokenClassification

from m3bert.modeling import M3BertForMaskedLM
from m3bert.trainers import Granularity, Grid, MultigranularMLM, NestedBatch, NestedTrainer
from m3bert.trainers.core.objective import TermLog, Terms
from tests.conftest import refused
from tests.trainers.kernels import Counts
from tests.trainers.tiny_run import (
    GRID,
    PLAIN_STEP,
    arguments,
    assert_same_weights,
    assert_terms_sum_to_the_loss,
    bert_config,
    masked_dataset,
    mlm_trainer,
    quiet_model,
    weights,
)


def test_every_term_is_logged_and_makes_up_the_loss(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=4, logging_steps=2)
    before = weights(trainer.backbone)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    for entry in logs:
        terms = {name: value for name, value in entry.items() if name.startswith("mlm_")}
        assert set(terms) == {"mlm_2x8", "mlm_2x32", "mlm_6x8", "mlm_6x32"}
        assert sum(terms.values()) == pytest.approx(entry["loss"], rel=1e-4)
    after = weights(trainer.backbone)
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert unmoved == []


def test_a_default_outside_the_trained_grid_is_refused(tiny_tokenizer, tmp_path):
    """Else the saved checkpoint would not open."""
    with pytest.raises(ValueError, match="output_dim=16 is not available here; legal values: 8, 32"):
        mlm_trainer(tiny_tokenizer, tmp_path, model=quiet_model(output_dim=16))


@pytest.mark.parametrize("kind", ["m3bert", "bert"])
def test_the_models_config_is_its_owners_until_it_is_trained(tiny_tokenizer, tmp_path, kind):
    """Making a trainer changes nothing; training it, or saving what it has, declares the trained grid."""
    for use in ("train", "save_model"):
        if kind == "m3bert":
            model = quiet_model(matryoshka_layers=[], matryoshka_dims=[])
        else:
            model = BertForMaskedLM(bert_config())
        model.config.use_cache = False  # transformers' own Trainer sets that
        before = copy.deepcopy(model.config.to_dict())
        trainer = mlm_trainer(tiny_tokenizer, tmp_path / use, model=model, max_steps=1)
        assert model.config.to_dict() == before
        trainer.evaluate()
        assert model.config.to_dict() == before
        getattr(trainer, use)()
        assert (model.config.matryoshka_layers, model.config.matryoshka_dims) == ([2, 6], [8, 32])
        assert model.config.is_matryoshka and model.config.matryoshka_dimensions == [8, 32]
    stored = json.loads((tmp_path / "save_model" / "config.json").read_text())
    assert (stored["matryoshka_layers"], stored["matryoshka_dims"]) == ([2, 6], [8, 32])


def test_evaluation_reports_every_granularity(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2
    assert {"eval_mlm_2x8", "eval_mlm_2x32", "eval_mlm_6x8", "eval_mlm_6x32"} <= set(evaluations[0])
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == evaluations[1]["eval_loss"]
    data = masked_dataset(6)
    collator = DataCollatorForTokenClassification(tiny_tokenizer)
    means = []
    with torch.no_grad():
        for rows in (range(3), range(3, 6)):
            inputs = collator([data[row] for row in rows])
            labels = inputs.pop("labels")
            logits = trainer.backbone.eval()(**inputs, output_layer=2, output_dim=8).logits
            means.append(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    assert metrics["eval_mlm_2x8"] == pytest.approx(sum(means) / 2, rel=1e-4)


def test_bfloat16_trains_close_to_float32(tiny_tokenizer, tmp_path):
    losses = []
    for bf16 in (False, True):
        trainer = mlm_trainer(tiny_tokenizer, tmp_path, bf16=bf16, max_steps=2)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert trainer.backbone.dtype == torch.float32
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


@pytest.mark.parametrize("option", ["activation_checkpointing", pytest.param("torch_compile", marks=pytest.mark.slow)])
def test_checkpointing_and_compiling_change_no_number(tiny_tokenizer, tmp_path, option):
    runs = []
    for changes in ({}, {option: True}):
        trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=2, **changes)
        trainer.train()
        runs.append(trainer)
    assert_same_weights(runs[0].backbone, runs[1].backbone, atol=2e-4)
    runs[1].save_model(str(tmp_path / "saved"))
    assert_same_weights(M3BertForMaskedLM.from_pretrained(tmp_path / "saved"), runs[1].backbone)
    if option == "activation_checkpointing":
        assert runs[1].backbone.is_activation_checkpointing


class Poisoned(MultigranularMLM):
    """Of one of its forward passes in training, or of every one in evaluation, a term is not finite."""

    def __init__(self, grid: Grid, call: int | None = None):
        super().__init__(grid)
        self.call, self.calls = call, 0

    def forward(self, batch: NestedBatch) -> Terms:
        terms = super().forward(batch)
        self.calls += self.training
        if self.calls == self.call or not (self.training or self.call):
            broken = self.term(Granularity(6, 8))
            terms[broken] = terms[broken] * math.nan
        return terms


def test_a_loss_that_is_not_finite_stops_the_run(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(
        tiny_tokenizer, tmp_path, objective=Poisoned(GRID, 3), max_steps=4, save_strategy="steps", save_steps=1
    )
    refused(r"not finite at step 3 \(terms: mlm_6x8\)", trainer.train)
    good = M3BertForMaskedLM.from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.isfinite(tensor).all() for tensor in good.state_dict().values())
    assert_same_weights(good, trainer.backbone)
    assert not (tmp_path / "checkpoint-3").exists()


def test_of_accumulated_batches_the_first_the_middle_and_the_last_are_watched(tiny_tokenizer, tmp_path):
    """The second of two steps of four batches: whichever of its batches is broken, the first step stays."""
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2}
    expected = mlm_trainer(tiny_tokenizer, tmp_path / "one step", **{**changes, "max_steps": 1})
    expected.train()
    for call in (5, 6, 8):
        trainer = mlm_trainer(tiny_tokenizer, tmp_path / "broken", objective=Poisoned(GRID, call), **changes)
        refused(r"not finite at step 2 \(terms: mlm_6x8\)", trainer.train)
        assert_same_weights(trainer.backbone, expected.backbone)


def test_a_total_that_is_not_finite_stops_the_run_where_all_terms_are_and_an_evaluation(tiny_tokenizer, tmp_path):
    class Overflowing(MultigranularMLM):
        def forward(self, batch):
            return {replace(term, weight=math.inf): value for term, value in super().forward(batch).items()}

    trainer = mlm_trainer(tiny_tokenizer, tmp_path, objective=Overflowing(GRID), max_steps=1)
    refused(r"not finite at step 1 \(terms: loss\)", trainer.train)
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, objective=Poisoned(GRID))
    refused(r"evaluation loss is not finite \(terms: mlm_6x8, loss\)", trainer.evaluate)


def test_terms_are_read_once_per_step(tiny_tokenizer, tmp_path, monkeypatch):
    trainer = mlm_trainer(
        tiny_tokenizer, tmp_path, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=4
    )
    reads = []

    def counting(method):
        def counted(*args, **kwargs):
            with Counts() as counts:
                result = method(*args, **kwargs)
            reads.append(counts.waits.total())
            return result

        return counted

    for name in ("add", "broken"):
        monkeypatch.setattr(TermLog, name, counting(getattr(TermLog, name)))
    trainer.train()
    assert reads == [0, 0, 0, 0, 1] * 2


def test_compute_metrics_is_refused_where_there_are_no_logits(tiny_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="compute_metrics needs logits, which this trainer does not have: pass eval"):
        NestedTrainer(quiet_model(), MultigranularMLM(GRID), arguments(tmp_path), dict, compute_metrics=dict)


@pytest.mark.parametrize(("metric", "legal"), [(None, False), ("mlm_6x8", False), ("eval_a_loss", True)])
def test_the_best_of_several_evaluation_sets_needs_one_of_them(tiny_tokenizer, tmp_path, metric, legal):
    best = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
    args = arguments(tmp_path, **best, metric_for_best_model=metric)
    sets = {"eval_dataset": dict.fromkeys("ab", [{}])}
    with nullcontext() if legal else pytest.raises(ValueError, match="legal values: eval_a_loss, eval_b_loss"):
        NestedTrainer(quiet_model(), MultigranularMLM(GRID), args, dict, **sets)


def test_a_trainer_that_publishes_nothing_writes_weights_and_arguments_only(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=1)
    trainer.save_model()
    assert not (tmp_path / "training.json").exists() and not (tmp_path / "modules.json").exists()
    assert json.loads((tmp_path / "training_args.json").read_text())["max_steps"] == 1
    assert not hasattr(trainer, "record")


@functools.cache
def naive_step(learning_rate: float) -> M3BertForMaskedLM:
    """One SGD step on all data: the sum over the grid of the mean over labelled tokens, size by size."""
    model = quiet_model()
    totals: dict[str, torch.Tensor] = {}
    count = 0
    for row in masked_dataset():
        labels = torch.tensor([row["labels"]])
        hidden = model.model(torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states
        states = {2: model.model.norm(hidden[2]), 6: hidden[6]}
        count += int((labels != -100).sum())
        for g in GRID:
            logits = states[g.layer][..., : g.dim] @ model.lm_head.weight[:, : g.dim].T + model.lm_head.bias
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            totals[str(g)] = totals.get(str(g), 0) + loss
    (sum(totals.values()) / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= learning_rate * parameter.grad
    return model


@pytest.mark.parametrize(("batch", "accumulation"), [(16, 1), (4, 4), (5, 4)])
def test_accumulation_equals_the_big_batch(tiny_tokenizer, tmp_path, batch, accumulation):
    trainer = mlm_trainer(
        tiny_tokenizer, tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        **PLAIN_STEP,
    )  # fmt: skip
    trainer.train()
    expected = naive_step(learning_rate=0.1)
    assert_same_weights(trainer.backbone, expected, atol=2e-6)
    assert_terms_sum_to_the_loss(trainer)
