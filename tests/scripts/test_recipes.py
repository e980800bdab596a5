"""The recipes: the command that lists them, the papers' values, and runs of a small model on real data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer, BertConfig, Qwen3Config, XLMRobertaConfig

from modeling_m3bert import M3BertConfig, M3BertForMaskedLM, M3BertModel
from scripts import recipes, train
from trainers import Composition
from trainers.hub.quantizer import find_quantizer


def run(*arguments: object) -> None:
    train.main([str(argument) for argument in arguments])


def logged(output: Path) -> list[dict[str, float]]:
    (checkpoint,) = output.glob("checkpoint-*")
    return json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]


def args_of(tmp_path: Path, method: str, *names: str, **changes: object) -> Any:
    """The config that recipes make, on a machine without a GPU."""
    arguments = [word for name in names for word in ("--config", name)]
    arguments += ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--train_files", "x.txt"]
    arguments += [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    _, _, args = train.parse(train.method_of(method)[0], arguments)
    return args


# Recipes of Matryoshka training and SimCSE: method, file to train on, grid of the tiny model, and a term of the log.
FIRST_RECIPES = {
    "m3bert_stage3": ("contrastive", "rows.jsonl", "2,6 x 8,16", "contrastive_2x8"),
    "m3bert_finetune_pairs": ("contrastive", "rows.jsonl", "2,6 x 8,32", "contrastive_6x32"),
    "msmarco_triplets": ("contrastive", "rows.jsonl", "2,4,6 x 8,32", "contrastive_4x8"),
    "unsupervised_simcse": ("simcse", "sentences.txt", None, "simcse_6x32"),
}
# The published encoders: what a recipe may rely on.
BACKBONES = {
    "tinybert": BertConfig(num_hidden_layers=6),
    "bert": BertConfig(),
    "bge_m3": XLMRobertaConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16),
    "qwen3": Qwen3Config(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16),
    "qwen3_lora": Qwen3Config(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16),
    "m3bert": M3BertConfig(),
    "released": BertConfig(hidden_size=384, num_hidden_layers=12),  # MiniLM-L12, of QAMA's released code
}
# Layers, chain and alpha of MIPIC (2604.24374, Table 7 and A.5), layers of MIC (2605.29987, appendix D).
MIPIC_PAPER = {
    "tinybert": ([1, 2, 3, 4, 5, 6], "1x16,2x32,3x64,4x256,5x512,6x768", 0.4),
    "bert": ([2, 4, 6, 8, 9, 10, 12], "2x16,4x32,6x64,8x128,9x256,10x512,12x768", 0.4),
    "bge_m3": ([1, 4, 7, 11, 15, 19, 24], "1x16,4x32,7x64,11x128,15x256,19x512,24x1024", 0.5),
    "qwen3": ([2, 6, 12, 16, 20, 24, 28], "2x16,6x32,12x64,16x128,20x256,24x512,28x1024", 0.5),
}
MIPIC_PAPER |= {"qwen3_lora": MIPIC_PAPER["qwen3"], "m3bert": MIPIC_PAPER["bert"]}
MIC_PAPER = {"tinybert": [2, 4], "bert": [8, 10], "bge_m3": [4, 7, 11], "m3bert": [8, 10]}
# Overlay -> what it goes on top of, and the parts that are left.
ABLATIONS = {
    "mipic_without_sia": ("mipic_bert", {"mrl", "pic"}),
    "mipic_without_pic": ("mipic_bert", {"mrl", "sia"}),
    "mipic_pic_at_full_width_bert": ("mipic_bert", {"mrl", "sia", "pic"}),
    "mic_scr_only": ("mic_bert", {"mrl", "scr"}),
    "mic_sir_only": ("mic_bert", {"mrl", "sir"}),
    "mic_first_layer": ("mic_bert", {"mrl", "scr", "sir"}),
    "mic_last_layer_bert": ("mic_bert", {"mrl", "scr", "sir"}),
}
STUDIED = {
    "mipic_chain_of_means_bert": ("mipic_bert", {"mrl": 1, "sia": 0.1, "pic": 1}),
    "mic_with_pic_bert": ("mic_bert", {"mrl": 1, "scr": 0.01, "sir": 0.01, "pic": 0.14}),
}
# Table 1 of IBKD (2311.05472): learning rate, batch size, epochs, tau; section 4.3: gamma and the two beta.
IBKD_PAPER = {
    "ibkd_sts": (1e-4, 256, 10, 0.1, 1.0),
    "ibkd_sts_finetuning": (3e-5, 256, 3, 0.05, 0.5),
    "ibkd_retrieval": (1e-4, 128, 3, 0.1, 1.0),
    "ibkd_retrieval_finetuning": (1e-5, 128, 3, 0.05, 0.5),
}
IBKD_HSIC = {"kernel": "rbf", "gamma": 0.5, "input_layer": 0}
IBKD_OVERLAYS = {
    "ablations/ibkd_ckd": {"beta": 0},
    "ablations/ibkd_mse": {"method": "mse"},
    "ablations/ibkd_crd": {"method": "crd"},
    "ablations/ibkd_hpd": {"method": "hpd", "projection_dim": 128},
    "ablations/ibkd_linear_kernel": {"hsic": {**IBKD_HSIC, "kernel": "linear"}},
    "ablations/ibkd_imq_kernel": {"hsic": {**IBKD_HSIC, "kernel": "imq"}},
    "ablations/ibkd_teacher_simcse_bert": {"teacher_name_or_path": "princeton-nlp/sup-simcse-bert-large-uncased"},
    "ablations/ibkd_teacher_retromae": {"teacher_name_or_path": "Shitao/RetroMAE_MSMARCO_distill"},
    "studied/ibkd_normalised": {"hsic": {**IBKD_HSIC, "normalize": True}, "beta": 100.0},
}
# Overlays of the second stage, and what each leaves of the objective.
IBKD_FINETUNING_OVERLAYS = {
    "ablations/ibkd_ckd": ({"beta": 0}, ["contrastive"]),
    "ablations/ibkd_own_negatives": ({"own_negatives": True}, ["contrastive", "hsic"]),
    "ablations/ibkd_linear_kernel": ({"hsic": {**IBKD_HSIC, "kernel": "linear"}}, ["contrastive", "hsic"]),
    "ablations/ibkd_imq_kernel": ({"hsic": {**IBKD_HSIC, "kernel": "imq"}}, ["contrastive", "hsic"]),
}
# QAMA, section Training and Evaluation: learning rate, epochs and clipping; of the released code: width, temperatures.
QAMA_PAPER = {
    "learning_rate": 1e-4,
    "num_train_epochs": 5,
    "max_grad_norm": 1.0,
    "temperature": 0.1,
    "contrast_temperature": 0.05,
    "quantized_gradient": False,
    "quantizer_config": {"skip": "none", "intermediate_size": 32 * 384, "momentum": 0.995},
}
# Steps of the ablation of QAMA -> the terms of each, of pairs.
QAMA_STEPS = {
    "qama_thresholds_only": set(),
    "qama_transform": {"sim", "kl", "rank"},
    "qama_quantization_loss": {"sim", "kl", "rank", "quantization"},
    "qama_matryoshka": {"sim", "kl", "rank", "quantization", "contrast"},
    "qama_regularization": {"sim", "kl", "rank", "quantization", "contrast", "orthogonality", "bottleneck"},
}


def test_every_recipe_is_tested():
    from tests.scripts.test_pretraining_recipes import NAMES

    tested = NAMES | {
        "qama",
        "qama_paper",
        "qama_released",
        "ablations/qama_modernbert",
        *(f"ablations/{step}" for step in QAMA_STEPS),
    }
    tested |= {
        *FIRST_RECIPES,
        *IBKD_PAPER,
        *IBKD_OVERLAYS,
        *IBKD_FINETUNING_OVERLAYS,
        "m3bert_matryoshka_distillation",
        "exit_distillation",
    }
    tested |= {f"mipic_{name}" for name in MIPIC_PAPER} | {f"mic_{name}" for name in MIC_PAPER}
    tested |= {f"ablations/{name}" for name in ABLATIONS} | {f"studied/{name}" for name in STUDIED}
    assert set(recipes.recipe_names()) == tested


@pytest.mark.parametrize("recipe", FIRST_RECIPES)
def test_a_recipe_runs(real_files, capsys, quick_options, recipe):
    method, file, grid, term = FIRST_RECIPES[recipe]
    output = real_files / "out"
    run(
        method, "--config", recipe, "--model_name_or_path", real_files / "model", "--train_files", real_files / file,
        "--output_dir", output, *quick_options(), "--per_device_train_batch_size", 8,
        *(["--grid", grid] if grid else []),
    )  # fmt: skip
    printed = capsys.readouterr().out
    (checkpoint,) = output.glob("checkpoint-*")
    assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == 3
    assert term in logged(output)[0]
    trained = M3BertModel.from_pretrained(output)
    assert trained.config.matryoshka_layers == ([2, 4, 6] if recipe == "msmarco_triplets" else [2, 6] if grid else [6])
    assert ("dropped" in printed) == (recipe == "m3bert_stage3")


def parts_of(tmp_path: Path, backbone: str, *names: str) -> tuple[Any, dict[str, Any], dict[str, float]]:
    """The config, the parts and their weights that recipes of MIPIC or MIC make for a published encoder."""
    args = args_of(tmp_path, names[0].partition("_")[0], *names)
    objective = args.build_objective(args.grid_for(BACKBONES[backbone]))
    assert isinstance(objective, Composition)
    objective.validate(BACKBONES[backbone])
    return args, dict(objective.parts), objective.weights


@pytest.mark.parametrize("backbone", list(MIPIC_PAPER))
def test_recipes_of_mipic_are_the_papers(tmp_path, backbone):
    layers, chain, alpha = MIPIC_PAPER[backbone]
    args, parts, weights = parts_of(tmp_path, backbone, f"mipic_{backbone}")
    assert weights == pytest.approx({"mrl": alpha, "sia": 1 - alpha, "pic": 1 - alpha})
    mrl, sia, pic = parts.values()
    width = BACKBONES[backbone].hidden_size
    assert mrl.grid.dims == sia.grid.dims == [16, 32, 64, 128, 256, 512, width] and mrl.layers == [layers[-1]]
    assert (sia.layers, str(pic.grid)) == (layers, chain)
    assert (sia.token_shares, sia.smallest_token_count) == ([0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 8)
    assert sia.temperature == pic.temperature == mrl.temperature == 0.05 and args.per_device_train_batch_size == 16
    pooling = "lasttoken" if backbone.startswith("qwen3") else "cls"
    assert args.pooling == mrl.pooling == pic.pooling == pooling
    assert args.unsupervised and args.num_train_epochs == 5


@pytest.mark.parametrize("backbone", list(MIC_PAPER))
def test_recipes_of_mic_are_the_papers(tmp_path, backbone):
    args, parts, weights = parts_of(tmp_path, backbone, f"mic_{backbone}")
    assert weights == {"mrl": 1.0, "scr": 0.6, "sir": 0.6}
    mrl, scr, sir = parts.values()
    assert scr.layers == sir.layers == MIC_PAPER[backbone] and mrl.reduction == "mean"
    assert scr.grid.dims == sir.grid.dims == [16, 32, 64, 128, 256, 512, BACKBONES[backbone].hidden_size]
    assert (scr.threshold, scr.variance_weight, sir.scale) == (0.1, 0.1, 2.0)
    assert args.unsupervised and args.per_device_train_batch_size == 32 and args.num_train_epochs == 5


# Sizes of the tiny model in place of the published one's.
TINY = {
    "mipic": ["--grid", "6x8,32", "--sia", "{layers: [2, 6], token_shares: [0.2]}", "--pic", "{chain: '2x8,6x32'}"],
    "mic": ["--grid", "6x8,32", "--scr", "{layers: [2, 4]}", "--sir", "{layers: [2, 4]}"],
}


@pytest.mark.parametrize("recipe", ["mipic_bert", "mic_bert"])
def test_a_recipe_of_mipic_and_mic_trains(real_files, quick_options, recipe):
    method, output = recipe.partition("_")[0], real_files / "out"
    run(
        method, "--config", recipe, "--model_name_or_path", real_files / "model", "--train_files",
        real_files / "sentences.txt", "--output_dir", output, *quick_options(max_steps=2),
        "--per_device_train_batch_size", 8, *TINY[method],
    )  # fmt: skip
    assert {"mrl_6x8", {"mipic": "sia_cka_2x8", "mic": "sir_variation_2x8"}[method]} <= set(logged(output)[0])
    assert M3BertModel.from_pretrained(output).config.matryoshka_layers == [6]
    (checkpoint,) = output.glob("checkpoint-*")
    assert (checkpoint / "objective.safetensors").exists() == (method == "mipic")


def ibkd_args(tmp_path: Path, *names: str) -> Any:
    return args_of(tmp_path, "ibkd-finetuning" if names[0].endswith("finetuning") else "ibkd", *names)


@pytest.mark.parametrize("recipe", list(IBKD_PAPER))
def test_recipes_of_ibkd_are_the_papers(tmp_path, recipe):
    args = ibkd_args(tmp_path, recipe)
    found = (args.learning_rate, args.per_device_train_batch_size, args.num_train_epochs, args.temperature, args.beta)
    assert found == IBKD_PAPER[recipe]
    assert args.hsic == IBKD_HSIC


@pytest.mark.slow
def test_both_stages_of_ibkd_train_a_cut_of_the_teacher(real_files, minilm, quick_options):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    sentences = (real_files / "sentences.txt").read_text().splitlines()[:64]
    (real_files / "few.txt").write_text("\n".join(sentences))
    first, second = real_files / "first", real_files / "second"
    run(
        "ibkd", "--config", "ibkd_sts", "--teacher_name_or_path", minilm, "--student_layers", 2,
        "--teacher_cache_dir", real_files / "teachers", "--train_files", real_files / "few.txt", "--output_dir", first,
        "--teacher_pooling", "mean", "--bf16", "false", "--per_device_train_batch_size", 8, *quick_options(),
    )  # fmt: skip
    assert {"infonce_2x384", "hsic_2x384"} <= logged(first)[0].keys()
    student = M3BertModel.from_pretrained(first)
    assert (len(student.layers), student.config.hidden_size) == (2, 384)
    triples = zip(sentences[:21], sentences[21:42], sentences[42:63], strict=True)
    rows = [dict(zip(("anchor", "positive", "negative"), triple, strict=True)) for triple in triples]
    (real_files / "negatives.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(
        "ibkd-finetuning", "--config", "ibkd_sts_finetuning", "--model_name_or_path", first, "--train_files",
        real_files / "negatives.jsonl", "--output_dir", second, "--projection_dim", 16, "--bf16", "false",
        "--per_device_train_batch_size", 8, *quick_options(max_steps=2),
    )  # fmt: skip
    assert {"contrastive_2x16", "hsic_2x16"} <= logged(second)[0].keys()
    model = sentence_transformers.SentenceTransformer(str(second), trust_remote_code=True)
    assert model.encode(["a text"]).shape == (1, 16)


def test_matryoshka_distillation_goes_on_from_a_trained_model(real_files, quick_options):
    encoder = M3BertModel.from_pretrained(real_files / "model")
    model = M3BertForMaskedLM(encoder.config)
    with torch.no_grad():  # in place of pretraining: it knows which words there are
        model.get_output_embeddings().weight.mul_(0.01)
        tokenizer = AutoTokenizer.from_pretrained(real_files / "model")
        words = tokenizer((real_files / "sentences.txt").read_text())["input_ids"]
        model.get_output_embeddings().bias.fill_(-8)
        model.get_output_embeddings().bias[torch.tensor(words)] = 0
    model.save_pretrained(real_files / "pretrained")
    arguments = [
        "matryoshka-distillation", "--config", "m3bert_matryoshka_distillation", "--tokenizer_name",
        real_files / "model", "--train_files", real_files / "sentences.txt", "--output_dir", real_files / "out",
        "--grid", "2,6x8,32", "--pairs", "6x32>2x8", "--bf16", "false", "--per_device_train_batch_size", 8,
        "--gradient_accumulation_steps", 1, *quick_options(max_steps=2),
    ]  # fmt: skip
    run(*arguments, "--model_name_or_path", real_files / "pretrained")
    assert "mlm_kl_6x32>2x8" in logged(real_files / "out")[0]
    config = '{"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 6, "num_attention_heads": 4}'
    with pytest.raises(ValueError, match="untrained teacher"):
        run(*arguments, "--overwrite", "--model_config", config)


def test_the_pairs_of_matryoshka_distillation_are_the_papers(tmp_path):
    args = args_of(tmp_path, "matryoshka-distillation", "m3bert_matryoshka_distillation")
    assert (args.pairs, args.distillation_weight, args.distillation_temperature) == ("12x768>4x64", 1.0, 1.0)
    assert (args.distillation_direction, args.max_steps, args.mlm_probability) == ("reverse", 50_000, 0.15)
    assert args.grid == "4,8,12 x 32,64,128,768"


def test_the_recipe_of_exit_distillation_is_that_of_its_study():
    from benchmarks.reproduction.exits import TRAINING

    options = yaml.safe_load(recipes.find_recipe("exit_distillation").read_text())
    for name, value in TRAINING.items():
        if name in options:
            assert options[name] == value, name
    shared = {"max_steps", "per_device_train_batch_size", "learning_rate", "warmup_steps", "max_length", "bf16"}
    assert shared <= options.keys()


def test_the_recipe_of_qama_is_that_of_its_study():
    study = pytest.importorskip("benchmarks.reproduction.qama")
    options = yaml.safe_load(recipes.find_recipe("qama").read_text())
    for name, value in study.TRAINING.items():
        if name in options:
            assert options[name] == value, name
    shared = {"max_steps", "per_device_train_batch_size", "learning_rate", "warmup_steps", "temperature"}
    assert shared | {"quantizer_config"} <= options.keys()


def test_the_values_of_qama_are_the_papers(tmp_path):
    args = args_of(tmp_path, "qama", "qama_paper")
    assert {name: getattr(args, name) for name in QAMA_PAPER} == QAMA_PAPER
    assert args.frozen and args.optim.startswith("adamw") and args.weight_decay > 0 and args.warmup_steps > 0


def qama_run(real_files: Path, options: list[str], *names: str) -> tuple[Path, set[str]]:
    """Folder of a run on pairs, and the terms that it logged."""
    output = real_files / "-".join(name.rpartition("/")[2] for name in names)
    configs = [word for name in names for word in ("--config", name)]
    run(
        "qama", *configs, "--model_name_or_path", real_files / "model", "--train_files", real_files / "rows.jsonl",
        "--text_columns", "query", "positive", "--output_dir", output, "--teacher_cache_dir", real_files / "teachers",
        "--grid", "6x8,16,32", "--per_device_train_batch_size", 16, *options,
    )  # fmt: skip
    log = logged(output)[0] if list(output.glob("checkpoint-*")) else {}
    return output, {name for name in log if name.startswith("qama_")}


@pytest.mark.parametrize("recipe", ["qama", pytest.param("qama_paper", marks=pytest.mark.slow)])
def test_a_recipe_of_qama_trains(real_files, quick_options, recipe):
    pytest.importorskip("sentence_transformers")
    output, terms = qama_run(real_files, quick_options(max_steps=2), recipe)
    assert {"qama_sim_6x8", "qama_contrast_6x16", "qama_quantization_6x32", "qama_variance_6x32"} <= terms
    quantizer = find_quantizer(str(output))
    assert quantizer.config.dims == [8, 16, 32] and quantizer.calibrated
    assert quantizer.config.skip == ("none" if recipe == "qama_paper" else "identity")
