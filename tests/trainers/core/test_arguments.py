"""Training arguments that all trainers share, and the objective that a config builds."""

import dataclasses
import re
from fnmatch import fnmatch
from inspect import signature
from pathlib import Path

import pytest
from accelerate.parallelism_config import ParallelismConfig
from transformers import TrainingArguments

from m3bert import trainers
from m3bert.trainers import METHODS, NestedTrainingArguments
from m3bert.trainers.core.arguments import REFUSED
from tests.conftest import refused, tiny_config
from tests.trainers.tiny_run import arguments


def test_the_grid_defaults_to_the_models_own(tmp_path):
    args = arguments(tmp_path)
    assert str(args.grid_for(tiny_config())) == "2,4,6x8,16,32"
    assert str(arguments(tmp_path, grid="1x4").grid_for(tiny_config())) == "1x4"
    refused("names no matryoshka_layers", args.grid_for, tiny_config(matryoshka_layers=[]))
    refused("is not a grid", arguments, tmp_path, grid="4,8")


def test_several_gpus_need_a_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr(NestedTrainingArguments, "n_gpu", 2)
    refused(r"sees 2 GPUs: start one per GPU with torchrun or accelerate launch, or set", arguments, tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_a_config_passes_every_field_that_its_objective_takes(method):
    config_class = getattr(trainers, METHODS[method][0])
    objective_class = getattr(config_class, "objective_class", None)
    if objective_class is None or not config_class.objective_fields:
        pytest.skip("its objective is built by hand")
    takes = {
        name for base in objective_class.__mro__ if "__init__" in vars(base) for name in signature(base).parameters
    }
    fields = {field.name for field in dataclasses.fields(config_class)}
    assert set(config_class.objective_fields) == takes & fields - {"grid"}


SET = {
    "label_smoothing_factor": 0.1, "label_names": ["labels"], "neftune_noise_alpha": 5.0, "use_liger_kernel": True,
    "auto_find_batch_size": True, "bf16_full_eval": True, "fp16_full_eval": True, "batch_eval_metrics": True,
    "include_for_metrics": ["inputs"], "eval_use_gather_object": True, "debug": "underflow_overflow",
    "parallelism_config": ParallelismConfig(),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_would_mean_something_else_is_refused(tmp_path, name):
    refused(f"^{name} is not supported: {re.escape(REFUSED[name])}.$", arguments, tmp_path, **{name: SET[name]})


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
