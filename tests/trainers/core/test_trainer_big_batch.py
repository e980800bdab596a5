"""Accumulated batches and two processes make the step of the one big batch."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn

from m3bert.modeling import M3BertForMaskedLM
from tests.trainers.tiny_run import (
    GRID,
    PLAIN_STEP,
    assert_same_weights,
    masked_dataset,
    mlm_trainer,
    quiet_model,
    run_two,
)


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
        tiny_tokenizer,
        tmp_path,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **PLAIN_STEP,
    )
    trainer.train()
    expected = naive_step(learning_rate=0.1)
    assert_same_weights(trainer.backbone, expected, atol=2e-6)
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert sum(value for name, value in log.items() if name.startswith("mlm_")) == pytest.approx(log["loss"], rel=1e-4)


RUN_TWO = """
from tests.trainers.tiny_run import PLAIN_STEP, mlm_trainer
from tests.conftest import tiny_tokenizer
tokenizer = tiny_tokenizer.__wrapped__()
trainer = mlm_trainer(
    tokenizer, Path(sys.argv[1]), per_device_train_batch_size=4, gradient_accumulation_steps=2, ddp_backend="gloo",
    **PLAIN_STEP,
)
assert trainer.accelerator.num_processes == 2
trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    trainer.state.save_to_json(str(Path(sys.argv[1]) / "state.json"))
"""


def test_two_processes_equal_the_big_batch(tmp_path):
    run_two(tmp_path, RUN_TWO)
    expected = naive_step(learning_rate=0.1)
    assert_same_weights(M3BertForMaskedLM.from_pretrained(tmp_path), expected, atol=2e-6)
    (log,) = [entry for entry in json.loads((tmp_path / "state.json").read_text())["log_history"] if "loss" in entry]
    assert sum(value for name, value in log.items() if name.startswith("mlm_")) == pytest.approx(log["loss"], rel=1e-4)
