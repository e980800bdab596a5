"""Training arguments that all trainers share, and the objective that a config builds."""

from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
from accelerate.parallelism_config import ParallelismConfig
from transformers import TrainingArguments

from m3bert.trainers import (
    ContrastiveConfig,
    EspressoConfig,
    Grid,
    Matryoshka2dConfig,
    MatryoshkaDistillationConfig,
    MultigranularMLMConfig,
    NestedTrainingArguments,
    SimCSEConfig,
    StarbucksConfig,
)
from m3bert.trainers.core.arguments import REFUSED
from tests.conftest import tiny_config
from tests.trainers.tiny_run import arguments


def test_the_grid_defaults_to_the_models_own(tmp_path):
    args = arguments(tmp_path)
    assert str(args.grid_for(tiny_config())) == "2,4,6x8,16,32"
    assert str(arguments(tmp_path, grid="1x4").grid_for(tiny_config())) == "1x4"
    with pytest.raises(ValueError, match="names no matryoshka_layers"):
        args.grid_for(tiny_config(matryoshka_layers=[]))
    with pytest.raises(ValueError, match="is not a grid"):
        arguments(tmp_path, grid="4,8")


def test_several_gpus_need_a_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr(NestedTrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match=r"sees 2 GPUs: start one per GPU with torchrun or accelerate launch, or set"):
        arguments(tmp_path)


SHARED = {
    "temperature": 0.2,
    "pooling": "cls",
    "symmetric": True,
    "mask_duplicates": False,
    "learn_temperature": True,
    "gather_negatives": False,
}
EXCLUDED = {"ring", "own_negatives"}  # by values above; tests of the ring and of recipes set them
# A config, its grid, and values of its fields that are not their defaults.
BUILT = [
    (ContrastiveConfig, "2,6x8,32", {**SHARED, "reduction": "mean"}),
    (SimCSEConfig, "6x32", SHARED),
    (EspressoConfig, "2,6x8,32", {**SHARED, "layer_weighting": "uniform", "alignment_weight": 0.5}),
    (Matryoshka2dConfig, "2,6x8,32", {**SHARED, "kl_weight": 2.0, "kl_temperature": 0.7}),
    (StarbucksConfig, "2x8,6x32", {**SHARED, "kl_weight": 2.0}),
    (MultigranularMLMConfig, "2,6x8,32", {}),
    (
        MatryoshkaDistillationConfig,
        "2,6x8,32",
        {
            "pairs": "6x32>2x8",
            "distillation_weight": 2.0,
            "distillation_temperature": 3.0,
            "distillation_direction": "forward",
        },
    ),
]
# Where an objective calls an argument otherwise than it is passed.
ATTRIBUTES = {
    "distillation_weight": "weight",
    "distillation_temperature": "temperature",
    "distillation_direction": "direction",
}


@pytest.mark.parametrize(("config_class", "grid", "changes"), BUILT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_config_builds_its_objective_from_its_own_fields(tmp_path, quiet_arguments, config_class, grid, changes):
    args = config_class(**quiet_arguments(tmp_path, grid=grid, **changes))
    objective = args.build_objective(Grid.parse(grid))
    assert type(objective) is config_class.objective_class and str(objective.grid) == grid
    assert set(changes) == set(args.objective_arguments()) - EXCLUDED, "none is left out"
    for name, value in changes.items():
        if name == "learn_temperature":
            assert objective.log_scale is not None
        elif name == "temperature":
            assert float(objective.temperature) == pytest.approx(value)
        elif name == "pairs":
            assert objective.pairs == Grid.parse(grid).pairs(value)
        else:
            assert getattr(objective, ATTRIBUTES.get(name, name)) == value


SET = {
    "label_smoothing_factor": 0.1,
    "label_names": ["labels"],
    "neftune_noise_alpha": 5.0,
    "use_liger_kernel": True,
    "auto_find_batch_size": True,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "batch_eval_metrics": True,
    "include_for_metrics": ["inputs"],
    "eval_use_gather_object": True,
    "debug": "underflow_overflow",
    "parallelism_config": ParallelismConfig(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_would_mean_something_else_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"^{name} is not supported: {re.escape(REFUSED[name])}.$"):
        arguments(tmp_path, **{name: SET[name]})


def test_the_docs_say_of_every_option_of_transformers_what_it_is_here():
    text = Path(__file__).parents[3].joinpath("docs", "train.md").read_text(encoding="utf-8")
    section = text.split("## Options of transformers")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    said = {name: here for names, here in rows for name in re.findall("`([^`]+)`", names)}
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    found = {name: [pattern for pattern in said if fnmatch(name, pattern)] for name in fields}
    assert {name: patterns for name, patterns in found.items() if len(patterns) != 1} == {}
    assert {pattern for patterns in found.values() for pattern in patterns} == said.keys()
    assert (
        {name for name, here in said.items() if here == "refused"} - {"liger_kernel_config"}
        == REFUSED.keys()
        == SET.keys()
    )
