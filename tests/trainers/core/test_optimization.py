"""Projectors with a learning rate and a warm-up of their own."""

from __future__ import annotations

import pytest
import torch

from tests.trainers.tiny_run import pair_config, pair_trainer
from trainers import MIPICConfig, MIPICTrainer
from trainers.core.optimization import warm_up_apart


def test_projectors_have_a_learning_rate_and_a_warm_up_of_their_own(tiny_tokenizer, tmp_path, sentences):
    changes = {"learning_rate": 1e-4, "projector_learning_rate": 1e-2, "lr_scheduler_type": "linear"}
    changes |= {"warmup_steps": 0, "projector_warmup_steps": 0.5, "max_steps": 8, "weight_decay": 0.1}
    args = pair_config(MIPICConfig, tmp_path, grid="6x8,16,32", **changes)
    trainer = pair_trainer(MIPICTrainer, args, tiny_tokenizer, sentences)
    trainer.create_optimizer_and_scheduler(8)
    own = {id(parameter) for parameter in trainer.model.objective.parameters()}
    groups = trainer.optimizer.param_groups
    seen = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(seen) == sorted(id(parameter) for parameter in trainer.model.parameters()), "each of them once"
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(8):
        for group in groups:
            ours = {id(parameter) in own for parameter in group["params"]}
            assert len(ours) == 1
            if group["weight_decay"]:
                rates[ours.pop()].append(group["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates[False] == pytest.approx([1e-4 * (8 - step) / 8 for step in range(8)])
    warm = [1e-2 * step / 4 for step in range(4)] + [1e-2 * (8 - step) / 4 for step in range(4, 8)]
    assert rates[True] == pytest.approx(warm)
    decays = [{group["weight_decay"] for group in groups if id(group["params"][0]) in own}]
    assert decays == [{0.0, 0.1}], "biases of projectors do not decay"


def test_a_schedule_that_looks_at_losses_cannot_be_set_apart(tmp_path):
    optimizer = torch.optim.SGD([torch.zeros(1)])
    args = pair_config(MIPICConfig, tmp_path, lr_scheduler_type="linear")
    with pytest.raises(ValueError, match="needs a schedule that depends on the step alone"):
        warm_up_apart(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), args, 2, 8)
