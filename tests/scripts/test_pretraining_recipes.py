"""The recipes of m3BERT's stages and of the papers' baselines: every recipe fits its encoder, and has the values of
the paper."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from modeling_m3bert import M3BertConfig, M3BertModel
from scripts import recipes
from tests.conftest import tiny_config
from tests.scripts.test_recipes import BACKBONES, args_of, logged, run
from trainers import DistillationConfig, Granularity


STAGES = {
    "m3bert_stage1": "multigranular-mlm",
    "m3bert_stage2": "multigranular-mlm",
    "m3bert_stage3": "contrastive",
    "m3bert_matryoshka_distillation": "matryoshka-distillation",
}
FINE_TUNING = {"m3bert_finetune_pairs", "m3bert_finetune_public"}
# Tables 1 and 3: the grid of each overlay on a recipe of fine-tuning.
TABLES_1_AND_3 = {f"m3bert_single_{layer}x{dim}": f"{layer}x{dim}" for layer in (4, 12) for dim in (32, 64, 128, 768)}
TABLES_1_AND_3 |= {"m3bert_mrl_lite_stage2": "4x32,64,128,768", "m3bert_mrl_lite_stage3": "4x32,64,128"}
# Section 2.3: AdamW, bfloat16, and sequences of a step on 8 devices.
ADAMW = {"adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.01, "bf16": False, "max_length": 512}
ALL, FEW = "4,8,12 x 32,64,128,768", "4,12 x 32,64,128"
PAPER = {
    "m3bert_stage1": (ALL, 1e-4, 2**17, {"lr_scheduler_type": "cosine", "warmup_steps": 10_000}),
    "m3bert_stage2": (ALL, 1e-4, 2**17, {"lr_scheduler_type": "cosine", "warmup_steps": 10_000}),
    "m3bert_stage3": (FEW, 2e-4, 2**20, {"lr_scheduler_type": "cosine", "warmup_steps": 10_000, "temperature": 0.05}),
    "m3bert_matryoshka_distillation": (ALL, 1e-4, 2**17, {"max_steps": 50_000, "mlm_probability": 0.15}),
}
TABLE_2 = {f"m3bert_standard_4x{dim}": {"grid": f"4x{dim}", "max_steps": 100_000} for dim in (32, 64, 128, 768)}
TABLE_2["m3bert_matryoshka_100k"] = {"max_steps": 100_000}
# Table 4: what is changed of the model.
SWITCHES = {
    "m3bert_without_swiglu": {"mlp_gated": False, "hidden_act": "gelu"},
    "m3bert_without_pre_norm": {"norm_position": "post"},
    "m3bert_without_rmsnorm": {"norm_type": "layernorm"},
    "m3bert_with_hidden_dropout": {"hidden_dropout": 0.1},
    "m3bert_with_bias": {"attention_bias": True, "mlp_bias": True},
}
# Rows of Table 5: the method, what it goes on top of, its pairs.
TABLE_5 = {
    "m3bert_continued": ("multigranular-mlm", "m3bert_stage1", None),
    "m3bert_distil_to_all": ("matryoshka-distillation", "m3bert_matryoshka_distillation", 11),
    "m3bert_distil_from_12x64": ("matryoshka-distillation", "m3bert_matryoshka_distillation", 1),
}
BASELINES = {"baseline_simcse": ("simcse", "bert")} | {
    f"baseline_espresso_{name}": ("espresso", name) for name in ("tinybert", "bert", "bge_m3", "qwen3")
}
MRL_ONLY = {"mipic_mrl_only": "mipic_bert", "mic_mrl_only": "mic_bert"}
OVERLAYS = {*TABLE_2, *TABLES_1_AND_3, *SWITCHES, *TABLE_5, *MRL_ONLY, "m3bert_architecture", "baseline_of_mic"}

# What an overlay for "any ... recipe" is tried on.
ANY = {"MIPIC": "mipic_bert", "MIC": "mic_bert", "IBKD": "ibkd_sts", "baseline": "baseline_espresso_bert"}


def stack_of(name: str) -> list[str]:
    """A recipe and what its first line says that it goes on top of, lowest first."""
    title = recipes.title_of(recipes.find_recipe(name))
    if "/" not in name:
        return [name]
    below = re.match(r"On top of (?:any (\w+) recipe|(\w+)(?: or \w+)?(?: and (\w+))?):", title)
    assert below, f"{name} does not say what it goes on top of"
    family, first, second = below.groups()
    between = [f"ablations/{second}"] if second else []
    return [ANY[family] if family else first, *between, name]


def method_of(name: str) -> str:
    """The method that a recipe's header trains."""
    return re.search(rf"train ([\w-]+) --config {name}\b", recipes.find_recipe(name).read_text())[1]


def config_of(stack: list[str]) -> Any:
    """The config of the encoder that a recipe is made for, with the changes that it makes."""
    options = recipes.read_recipes(stack)
    suffix = next((name for name in BACKBONES if stack[0].endswith(f"_{name}")), None)
    known = BACKBONES[suffix] if suffix else M3BertConfig()
    changes = {"matryoshka_layers": None, "matryoshka_dims": None} if suffix is None else {}
    return type(known)(**{**known.to_dict(), **changes, **options.get("model_config", {})})


def check(tmp_path: Path, stack: list[str], **changes: object) -> Any:
    """Parse recipes, and check their grid and pairs against the encoder, as a run would."""
    args, config = args_of(tmp_path, method_of(stack[0]), *stack, **changes), config_of(stack)
    grid = args.grid_for(config)
    if not isinstance(args, DistillationConfig):  # whose objectives need the embeddings of a teacher
        args.build_objective(grid).validate(config)
    return args


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_a_recipe_fits_its_encoder(tmp_path, name):
    check(tmp_path, stack_of(name))
    keys = re.findall(r"^(\w+):", recipes.find_recipe(name).read_text(), re.MULTILINE)
    assert len(keys) == len(set(keys)), "of an option that is given twice, YAML keeps the last"


@pytest.mark.parametrize("name", list(STAGES))
def test_stages_have_the_values_of_the_paper(tmp_path, name):
    grid, rate, batch, options = PAPER[name]
    args = args_of(tmp_path, STAGES[name], name)
    assert args.grid == grid and args.learning_rate == rate
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps * 8 == batch
    assert {key: getattr(args, key) for key in ADAMW | options} == ADAMW | options
    written = yaml.safe_load(recipes.find_recipe(name).read_text())
    assert written["bf16"] and written["include_num_input_tokens_seen"] == "non_padding"
    assert written.get("language_exponent") == (0.7 if name == "m3bert_stage2" else None)
    assert name == "m3bert_stage3" or args.mlm_probability == 0.15


def test_fine_tuning_has_the_values_of_the_paper_and_of_the_released_code(tmp_path):
    args = args_of(tmp_path, "contrastive", "m3bert_finetune_pairs")
    assert (args.learning_rate, args.temperature, args.per_device_train_batch_size) == (5e-4, 0.05, 1024)
    assert args.max_lengths == {"query": 16, "document": 64} and not args.gather_negatives
    assert (args.weight_decay, args.warmup_steps, args.num_train_epochs) == (0, 0.1, 5)
    assert args.lr_scheduler_type == "linear" and str(args.grid_for(M3BertConfig())) == "4,12x32,64,128"


def test_fine_tuning_on_public_data_has_the_values_of_the_paper(tmp_path):
    args = args_of(tmp_path, "contrastive", "m3bert_finetune_public")
    assert (args.learning_rate, args.temperature, args.per_device_train_batch_size) == (2e-5, 0.05, 32)
    assert len(args.text_columns) == 2 and len(args.grid_for(M3BertConfig())) == 1


@pytest.mark.parametrize("name", list(BASELINES))
def test_baselines_have_the_settings_of_the_papers(tmp_path, name):
    method, backbone = BASELINES[name]
    args = check(tmp_path, [name])
    assert method_of(name) == method and args.unsupervised
    assert (args.per_device_train_batch_size, args.learning_rate, args.num_train_epochs) == (16, 2e-5, 5)
    assert (args.max_length, args.temperature, args.lr_scheduler_type) == (256, 0.05, "cosine")
    assert args.pooling == ("lasttoken" if backbone == "qwen3" else "cls")
    grid = args.grid_for(config_of([name]))
    assert grid.full == Granularity(BACKBONES[backbone].num_hidden_layers, BACKBONES[backbone].hidden_size)
    assert len(grid.layers) == (1 if method == "simcse" else BACKBONES[backbone].num_hidden_layers)
    other = check(tmp_path, [name, "ablations/baseline_of_mic"])
    assert (other.per_device_train_batch_size, other.pooling) == (32, "mean")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m3bert_stage1", "ablations/m3bert_standard_4x32", "ablations/m3bert_with_bias"])
def test_a_recipe_of_m3bert_trains_a_new_model(real_files, quick_options, name):
    sizes = {key: getattr(tiny_config(), key) for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    method, file = method_of(stack_of(name)[0]), "sentences.txt"
    options = ["--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 1, "--bf16", "false"]
    if method == "contrastive":
        file = "pairs.jsonl"
        texts = (real_files / "sentences.txt").read_text().splitlines()[:64]
        rows = [{"query": one, "document": other} for one, other in zip(texts[::2], texts[1::2], strict=True)]
        (real_files / file).write_text("\n".join(map(json.dumps, rows)))
        options += ["--mini_batch_size", 4, "--grid", "4x8"]
    elif "standard" in name:
        options += ["--grid", "4x8"]
    else:
        options += ["--grid", "4,12x8,32"]
    configs = [word for each in stack_of(name) for word in ("--config", each)]
    run(
        method, *configs, "--tokenizer_name", real_files / "model", "--train_files", real_files / file,
        "--output_dir", real_files / "out", *options, *quick_options(max_steps=2),
        "--model_config", yaml.safe_dump(sizes),
    )  # fmt: skip
    (entry, *_) = logged(real_files / "out")
    assert entry["num_input_tokens_seen"] > 0
    layers = 12 if name == "m3bert_stage1" else 4
    assert M3BertModel.from_pretrained(real_files / "out").config.num_hidden_layers == layers
