"""The plan of a large step: its equations against models, small cases worked out by hand, and each other; its page."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import plan, scaling
from benchmarks._measure import RESULTS, significant
from benchmarks.plan import PAPER, Stage, Step, total
from hub_cards.tables import markdown
from modeling_m3bert import M3BertConfig, M3BertModel
from tests.conftest import tiny_config
from tests.snippets import read, snippets
from trainers.core.states import nested_states


BASE = M3BertConfig()
PAIRS = Stage(64, (2, 6), (8, 32), 16, 10)
PAGE = "docs/scaling.md"


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return json.loads((RESULTS / "scaling.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("bfloat16", [False, True])
def test_activations_are_those_that_autograd_keeps(bfloat16):
    """All that is saved for the backward pass, less parameters and the copies that autocast makes of them."""
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "matryoshka_layers": [1, 3]}
    config = tiny_config(matryoshka_dims=[64], embedding_dropout=0.0, attention_dropout=0.0, **sizes)
    model, shape = M3BertModel(config).train(), (8, 12)
    inputs = {"input_ids": torch.randint(5, 99, shape), "attention_mask": torch.ones(shape, dtype=torch.long)}
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            states = nested_states(model, inputs, (1, 3))
            pooled = [states.pooled(layer) for layer in (1, 3)]
    assert pooled[0].shape == (8, 64)
    measured = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in known)
    compute = 2 if bfloat16 else 4
    step = Step(config, replace(PAIRS, layers=(1, 3)), 1, 8)
    predicted = 96 * (
        3 * plan.layer_activation_bytes(config, compute, fused_norms=False)
        + plan.output_bytes(config, 2, fused_norms=False)
    )
    assert predicted + compute * bfloat16 * step.matrices == pytest.approx(measured, rel=0.06)


def test_checkpointing_keeps_inputs_of_layers():
    plain, less = (plan.activation_bytes(BASE, 2, 2, checkpointing, True) for checkpointing in (False, True))
    assert plain - less == 11 * plan.layer_activation_bytes(BASE, 2) - 12 * 768 * 4


def test_sizes_of_collectives_by_hand():
    """Four GPUs, ten bytes each: a ring all-reduce of 40 sends three quarters twice, an all-gather three blocks."""
    assert plan.all_reduce_bytes(40, 4) == 60
    assert plan.candidate_communication(10, 2, 4, 1, ring=False) == 30 + 60 + 6
    assert plan.candidate_communication(10, 2, 4, 1, ring=True) == 2 * 3 * (10 + 2) + 4 * 10
    assert plan.candidate_communication(10, 2, 1, 1, ring=True) == 0
    assert plan.parameter_communication(10, 4, "ddp", 5, 5) == 60
    assert plan.parameter_communication(10, 4, "fsdp", 2, 1) == 4 * 30


def test_sharding_divides_what_is_kept():
    ddp, fsdp = (Step(BASE, PAPER, 8, 64, strategy).kept_bytes() for strategy in ("ddp", "fsdp"))
    for part in ("parameters", "optimizer", "gradients"):
        assert ddp[part] == 8 * fsdp[part]
    assert ddp["buckets"] == ddp["gradients"] and not fsdp["buckets"]
    assert fsdp["unsharded"] and not ddp["unsharded"]


def test_a_ring_s_memory_does_not_grow_with_the_number_of_gpus():
    """As many pairs per GPU, at full width."""
    wide = replace(PAPER, dims=(768,))
    found = {
        (candidates, gpus): total(
            Step(BASE, replace(wide, batch=2**13 * gpus), gpus, 64, candidates=candidates).loss_bytes()
        )
        for candidates in ("gather", "ring")
        for gpus in (8, 64, 512)
    }
    assert found["ring", 8] == found["ring", 512]
    assert found["gather", 512] - found["gather", 64] == 3 * (512 - 64) * 2**13 * 768 * 4


def test_mini_batches_are_about_equally_large():
    """48 texts in mini-batches of at most 32: twice 24."""
    assert Step(tiny_config(), replace(PAIRS, batch=24), 1, 32).texts_at_a_time == 24
    assert Step(tiny_config(), PAIRS, 1, 500).texts_at_a_time == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 3}, "A batch of 64 pairs cannot be divided over 3 GPUs"),
        ({"stage": replace(PAIRS, layers=(7,))}, "outside the model, which has 6 layers and 32 dims"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Step(**{"config": tiny_config(), "stage": PAIRS, "gpus": 4, "mini_batch": 4} | changes)


def test_the_committed_predictions_are_those_of_the_equations(results):
    """And no prediction of memory is more than a tenth from what was measured."""
    found = {
        name: scaling.megabytes(case.predicted(1, "gather").memory()) for name, case in scaling.cases(False).items()
    }
    sent = {}
    for candidates in plan.CANDIDATES:
        step, loss = (case.predicted(2, candidates) for case in scaling.two_process_cases(False))
        found[f"two processes, {candidates}: a step"] = scaling.megabytes(step.memory())
        found[f"two processes, {candidates}: the loss"] = scaling.megabytes(loss.loss_bytes())
        sent[f"two processes, {candidates}: a step"] = total(step.communication())
    for unit, predicted in (("megabytes", found), ("bytes sent", sent)):
        assert {name: significant(value) for name, value in predicted.items()} == {
            name: values["predicted"] for name, values in results[unit].items()
        }


def commands() -> list[str]:
    code = "".join(snippet.code for snippet in snippets(read(PAGE)) if snippet.language == "bash")
    return code.splitlines()


@pytest.mark.parametrize("command", commands())
def test_the_page_shows_what_the_command_prints(command, capsys):
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "benchmarks.plan"]
    plan.main(words[3:])
    printed = capsys.readouterr().out.strip()
    assert printed.startswith("305,660,928 parameters, ") and printed in read(PAGE)


def measured_table(results: dict[str, Any]) -> str:
    """What the benchmark measured beside what was predicted, as on the page."""
    found = []
    for unit, name in (("megabytes", "MB"), ("bytes sent", "MB sent")):
        for case, values in results[unit].items():
            scale = 1 if unit == "megabytes" else 10**6
            measured, predicted = values["measured"] / scale, values["predicted"] / scale
            error = 100 * (predicted / measured - 1)
            found.append([case, name, f"{measured:.1f}", f"{predicted:.1f}", f"{error:+.1f}%"])
    return markdown(["case", "what", "measured", "predicted", "error"], found, words=2)


def test_the_page_shows_what_was_measured(results):
    assert measured_table(results) in read(PAGE) and results["date"] in read(PAGE)
