"""Projectors with a learning rate of their own."""

from __future__ import annotations

from m3bert.trainers import MIPICConfig, MIPICTrainer
from tests.trainers.tiny_run import pair_config, pair_trainer


def test_projectors_have_a_learning_rate_of_their_own(tiny_tokenizer, tmp_path, sentences):
    changes = {"learning_rate": 1e-4, "projector_learning_rate": 1e-2, "weight_decay": 0.1}
    args = pair_config(MIPICConfig, tmp_path, grid="6x8,16,32", **changes)
    trainer = pair_trainer(MIPICTrainer, args, tiny_tokenizer, sentences)
    groups = trainer.create_optimizer().param_groups
    own = {id(parameter) for parameter in trainer.model.objective.parameters()}
    seen = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(seen) == sorted(id(parameter) for parameter in trainer.model.parameters()), "each of them once"
    for group in groups:
        (ours,) = {id(parameter) in own for parameter in group["params"]}
        assert group["lr"] == (1e-2 if ours else 1e-4)
    decays = {group["weight_decay"] for group in groups if id(group["params"][0]) in own}
    assert decays == {0.0, 0.1}, "biases of projectors do not decay"
