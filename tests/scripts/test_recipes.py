"""The recipes: each one fits the encoder that it is made for, and a small model trains with some on real data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, ModernBertConfig, Qwen3Config, XLMRobertaConfig

from m3bert.commands import recipes, train
from m3bert.encode.quantizer import find_quantizer
from m3bert.modeling import M3BertConfig, M3BertModel
from m3bert.trainers import DistillationConfig
from tests.conftest import tiny_config


# Suffix of a recipe's name -> the published encoder that it is made for; m3BERT for all others.
BACKBONES = {
    "tinybert": BertConfig(num_hidden_layers=6),
    "bert": BertConfig(),
    "bge_m3": XLMRobertaConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16),
    "qwen3": Qwen3Config(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16),
    "qwen3_lora": Qwen3Config(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16),
    "modernbert": ModernBertConfig(),
    "released": BertConfig(hidden_size=384, num_hidden_layers=12),  # MiniLM-L12, of QAMA's released code
}
# A recipe for each kind of recipe that overlays name.
ANY = {"MIPIC": "mipic_bert", "MIC": "mic_bert", "IBKD": "ibkd_sts", "baseline": "baseline_espresso_bert"}


def run(*arguments: object) -> None:
    train.main([str(argument) for argument in arguments])


def logged(output: Path) -> list[dict[str, float]]:
    (checkpoint,) = output.glob("checkpoint-*")
    return json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]


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
    suffix = next((name for each in stack[::-1] for name in BACKBONES if each.endswith(f"_{name}")), None)
    known = BACKBONES[suffix] if suffix else M3BertConfig()
    changes = {"matryoshka_layers": None, "matryoshka_dims": None} if suffix is None else {}
    return type(known)(**{**known.to_dict(), **changes, **options.get("model_config", {})})


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_a_recipe_fits_its_encoder(tmp_path, name):
    stack = stack_of(name)
    arguments = [word for each in stack for word in ("--config", each)]
    arguments += ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--train_files", "x.txt"]
    _, _, args = train.parse(train.method_of(method_of(stack[0]))[0], arguments)
    config = config_of(stack)
    grid = args.grid_for(config)
    if not isinstance(args, DistillationConfig):  # whose objectives need the embeddings of a teacher
        args.build_objective(grid).validate(config)
    keys = re.findall(r"^(\w+):", recipes.find_recipe(name).read_text(), re.MULTILINE)
    assert len(keys) == len(set(keys)), "of an option that is given twice, YAML keeps the last"


# Recipe -> file to train on, sizes of the tiny model in place of the published one's, and a term of the log.
RUNS = {
    "m3bert_stage3": ("rows.jsonl", ["--grid", "2,6 x 8,16"], "contrastive_2x8"),
    "unsupervised_simcse": ("sentences.txt", [], "simcse_6x32"),
    "mipic_bert": (
        "sentences.txt",
        ["--grid", "6x8,32", "--sia", "{layers: [2, 6], token_shares: [0.2]}", "--pic", "{chain: '2x8,6x32'}"],
        "sia_cka_2x8",
    ),
    "mic_bert": (
        "sentences.txt",
        ["--grid", "6x8,32", "--scr", "{layers: [2, 4]}", "--sir", "{layers: [2, 4]}"],
        "sir_variation_2x8",
    ),
    "qama": ("rows.jsonl", ["--grid", "6x8,16,32", "--text_columns", "query", "positive"], "qama_contrast_6x16"),
}


@pytest.mark.parametrize("recipe", RUNS)
def test_a_recipe_trains(real_files, capsys, quick_options, recipe):
    file, options, term = RUNS[recipe]
    output = real_files / "out"
    if recipe == "qama":
        pytest.importorskip("sentence_transformers")
        options = [*options, "--teacher_cache_dir", real_files / "teachers"]
    run(
        method_of(recipe), "--config", recipe, "--model_name_or_path", real_files / "model", "--train_files",
        real_files / file, "--output_dir", output, *quick_options(max_steps=2), "--per_device_train_batch_size", 8,
        *options,
    )  # fmt: skip
    assert term in logged(output)[0]
    assert ("dropped" in capsys.readouterr().out) == (recipe == "m3bert_stage3")
    if recipe == "qama":
        assert find_quantizer(str(output)).config.dims == [8, 16, 32]
    else:
        assert M3BertModel.from_pretrained(output).config.matryoshka_layers[-1] == 6


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


@pytest.mark.slow
def test_a_recipe_of_m3bert_trains_a_new_model(real_files, quick_options):
    sizes = {key: getattr(tiny_config(), key) for key in ("hidden_size", "intermediate_size", "num_attention_heads")}
    run(
        "multigranular-mlm", "--config", "m3bert_stage1", "--tokenizer_name", real_files / "model", "--train_files",
        real_files / "sentences.txt", "--output_dir", real_files / "out", "--per_device_train_batch_size", 8,
        "--gradient_accumulation_steps", 1, "--bf16", "false", "--grid", "4,12x8,32", *quick_options(max_steps=2),
        "--model_config", json.dumps(sizes),
    )  # fmt: skip
    assert "mlm_4x8" in logged(real_files / "out")[0]
    assert M3BertModel.from_pretrained(real_files / "out").config.num_hidden_layers == 12
