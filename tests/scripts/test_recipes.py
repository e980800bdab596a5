"""The recipe files end to end, on local data: a few steps of a small model in place of the real one."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer, BertConfig, Qwen3Config, Qwen3Model, XLMRobertaConfig

from modeling_m3bert import M3BertConfig, M3BertModel
from scripts.train import OBJECTIVES, main, parse
from tests.conftest import tiny_config
from trainers import Composition


RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
LOCALLY = ["--use_cpu", "--max_steps", "20", "--per_device_train_batch_size", "8", "--disable_tqdm", "true"]


def read(file: Path, limit: int | None = None) -> list[dict]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in islice(lines, limit)]


def triplets(data: Path) -> list[dict[str, str]]:
    """Queries of MS MARCO with a passage of the best grade, its first sentence as a title, and one of no grade."""
    folder = data / "msmarco-mini"
    passages = {row["id"]: row["text"] for row in read(folder / "corpus.jsonl.gz")}
    queries = {row["id"]: row["text"] for row in read(folder / "queries.jsonl.gz")}
    with gzip.open(folder / "qrels.tsv.gz", "rt", encoding="utf-8") as lines:
        judged = [line.rstrip("\n").split("\t") for line in islice(lines, 1, None)]
    judged = [(query, passage) for query, passage, grade in judged if int(grade) == 3 and passage in passages]
    others = list(passages.values())
    return [
        {
            "query": queries[query],
            "positive": passages[passage],
            "negative": others[index],
            "document": passages[passage],
            "title": passages[passage].split(".")[0],
            "description": passages[passage],
        }
        for index, (query, passage) in enumerate(judged)
    ]


@pytest.fixture
def folder(tmp_path, data_folder, minilm) -> Path:
    """A small model with the real encoder's tokenizer, and files of the kinds that the recipes take."""
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(tmp_path / "model")
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id)
    M3BertModel(config).save_pretrained(tmp_path / "model")
    rows = triplets(data_folder)
    assert len(rows) > 100
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows + rows[:5])))
    sentences = [row["sentence1"] for row in read(data_folder / "snli" / "dev.jsonl.gz", limit=400)]
    (tmp_path / "sentences.txt").write_text("\n".join(sentences))
    return tmp_path


@pytest.mark.parametrize(
    ("objective", "recipe", "file", "grid", "term"),
    [
        ("contrastive", "m3bert_stage3", "rows.jsonl", "2,6 x 8,16", "contrastive_2x8"),
        ("contrastive", "m3bert_finetune_pairs", "rows.jsonl", "2,6 x 8,32", "contrastive_6x32"),
        ("contrastive", "msmarco_triplets", "rows.jsonl", "2,4,6 x 8,32", "contrastive_4x8"),
        ("simcse", "unsupervised_simcse", "sentences.txt", None, "simcse_6x32"),
    ],
)
def test_a_recipe_runs(folder, capsys, objective, recipe, file, grid, term):
    output = folder / "out"
    arguments = [objective, "--config", RECIPES / f"{recipe}.yaml", "--model_name_or_path", folder / "model"]
    arguments += ["--train_files", folder / file, "--output_dir", output, *LOCALLY]
    main([str(argument) for argument in arguments + (["--grid", grid] if grid else [])])
    printed = capsys.readouterr().out
    (checkpoint,) = output.glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == 20
    assert term in state["log_history"][0]
    trained = M3BertModel.from_pretrained(output)
    assert trained.config.matryoshka_layers == ([2, 4, 6] if recipe == "msmarco_triplets" else [2, 6] if grid else [6])
    assert ("dropped" in printed) == (recipe == "m3bert_stage3")


# The published encoders: what a recipe may rely on.
BACKBONES = {
    "tinybert": BertConfig(num_hidden_layers=6),
    "bert": BertConfig(),
    "bge_m3": XLMRobertaConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16),
    "qwen3": Qwen3Config(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16),
    "qwen3_lora": Qwen3Config(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16),
    "m3bert": M3BertConfig(),
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
ABLATIONS = {
    "mipic_without_sia": ("mipic_bert", {"mrl", "pic"}),
    "mipic_without_pic": ("mipic_bert", {"mrl", "sia"}),
    "mipic_pic_at_full_width_bert": ("mipic_bert", {"mrl", "sia", "pic"}),
    "mic_scr_only": ("mic_bert", {"mrl", "scr"}),
    "mic_sir_only": ("mic_bert", {"mrl", "sir"}),
    "mic_first_layer": ("mic_bert", {"mrl", "scr", "sir"}),
    "mic_last_layer_bert": ("mic_bert", {"mrl", "scr", "sir"}),
}


def parts_of(tmp_path: Path, method: str, backbone: str, *recipes: str) -> tuple[Any, dict[str, Any]]:
    """The configuration and the parts that recipes make for a published encoder, checked against its sizes."""
    arguments = [argument for recipe in recipes for argument in ("--config", str(RECIPES / f"{recipe}.yaml"))]
    arguments += ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--train_files", "sentences.txt"]
    _, args = parse(OBJECTIVES[method][0], arguments)
    parts = args.parts(args.grid_for(BACKBONES[backbone]))
    Composition(parts).validate(BACKBONES[backbone])
    return args, parts


@pytest.mark.parametrize("backbone", list(MIPIC_PAPER))
def test_recipes_of_mipic_are_the_papers(tmp_path, backbone):
    layers, checkpoints, alpha = MIPIC_PAPER[backbone]
    args, parts = parts_of(tmp_path, "mipic", backbone, f"mipic_{backbone}")
    weights = {name: weight for name, (weight, _) in parts.items()}
    assert weights == pytest.approx({"mrl": alpha, "sia": 1 - alpha, "pic": 1 - alpha})
    mrl, sia, pic = (objective for _, objective in parts.values())
    width = BACKBONES[backbone].hidden_size
    assert mrl.grid.dims == sia.grid.dims == [16, 32, 64, 128, 256, 512, width] and mrl.layers == [layers[-1]]
    assert (sia.layers, str(pic.grid)) == (layers, checkpoints)
    assert (sia.token_shares, sia.smallest_token_count) == ([0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 8)
    assert sia.temperature == pic.temperature == mrl.temperature == 0.05 and args.per_device_train_batch_size == 16
    assert args.unsupervised and args.pooling == "anchor" and args.num_train_epochs == 5


@pytest.mark.parametrize("backbone", list(MIC_PAPER))
def test_recipes_of_mic_are_the_papers(tmp_path, backbone):
    args, parts = parts_of(tmp_path, "mic", backbone, f"mic_{backbone}")
    assert {name: weight for name, (weight, _) in parts.items()} == {"mrl": 1.0, "scr": 0.6, "sir": 0.6}
    mrl, scr, sir = (objective for _, objective in parts.values())
    assert scr.layers == sir.layers == MIC_PAPER[backbone] and mrl.reduction == "mean"
    assert scr.grid.dims == sir.grid.dims == [16, 32, 64, 128, 256, 512, BACKBONES[backbone].hidden_size]
    assert (scr.threshold, scr.variance_weight, sir.scale) == (0.1, 0.1, 2.0)
    assert args.unsupervised and args.per_device_train_batch_size == 32 and args.num_train_epochs == 5


@pytest.mark.parametrize("ablation", list(ABLATIONS))
def test_ablations_go_over_a_recipe(tmp_path, ablation):
    recipe, expected = ABLATIONS[ablation]
    method = recipe.split("_")[0]
    _, parts = parts_of(tmp_path, method, "bert", recipe, f"ablations/{ablation}")
    assert set(parts) == expected
    _, whole = parts_of(tmp_path, method, "bert", recipe)
    assert {name: weight for name, (weight, _) in parts.items()}.items() <= {
        name: weight for name, (weight, _) in whole.items()
    }.items()
    layers = {name: objective.layers for name, (_, objective) in parts.items()}
    if "layer" in ablation:
        assert layers["scr"] == layers["sir"] == ([1] if "first" in ablation else [12])
    if "full_width" in ablation:
        chained = parts["pic"][1].grid
        assert chained.dims == [768] and chained.layers == whole["pic"][1].grid.layers


@pytest.mark.parametrize(
    ("recipe", "studied", "weights"),
    [
        ("mipic_bert", "mipic_chain_of_means_bert", {"mrl": 1, "sia": 0.1, "pic": 1}),
        ("mic_bert", "mic_with_pic_bert", {"mrl": 1, "scr": 0.01, "sir": 0.01, "pic": 0.14}),
    ],
)
def test_what_was_studied_goes_over_a_recipe(tmp_path, recipe, studied, weights):
    args, parts = parts_of(tmp_path, recipe.split("_")[0], "bert", recipe, f"studied/{studied}")
    assert {name: weight for name, (weight, _) in parts.items()} == weights and args.pooling == "mean"
    (layers,) = {tuple(parts[name][1].layers) for name in ("sia", "scr", "sir") if name in parts}
    assert layers == (12,)
    assert parts["pic"][1].detach_target and parts["pic"][1].pooling == "mean"
    assert "sia" not in parts or not parts["sia"][1].projections, "of SIA, CKA alone"


# Sizes of the tiny model in place of the published one's.
TINY = {
    "mipic": ["--grid", "6x8,32", "--sia_layers", "2", "6", "--pic_checkpoints", "2x8,6x32"],
    "mic": ["--grid", "6x8,32", "--isotropy_layers", "2", "4"],
}


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [("mipic_bert", ["--sia_token_shares", "0.2"]), ("mipic_m3bert", ["--sia_token_shares", "0.2"]), ("mic_bert", [])],
)
def test_a_recipe_of_mipic_and_mic_trains(folder, recipe, changes):
    method = recipe.split("_")[0]
    output = folder / "out"
    arguments = [method, "--config", RECIPES / f"{recipe}.yaml", "--model_name_or_path", folder / "model"]
    arguments += ["--train_files", folder / "sentences.txt", "--output_dir", output, *LOCALLY, *TINY[method], *changes]
    main([str(argument) for argument in arguments])
    (checkpoint,) = output.glob("checkpoint-*")
    first = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"][0]
    assert {"contrastive_6x8", {"mipic": "sia_cka_2x8", "mic": "sir_variation_2x8"}[method]} <= set(first)
    assert M3BertModel.from_pretrained(output).config.matryoshka_layers == [6]
    assert (checkpoint / "objective.safetensors").exists() == (method == "mipic")


def test_a_backbone_without_dropout_gets_some(folder):
    """As in the recipes of Qwen3: through an adapter, or through a value of the config."""
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 6, "num_attention_heads": 4}
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tiny = Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=8, **sizes)
    Qwen3Model(tiny).save_pretrained(folder / "qwen")
    tokenizer.save_pretrained(folder / "qwen")
    for recipe in ("mipic_qwen3", "mipic_qwen3_lora"):
        arguments = ["mipic", "--config", RECIPES / f"{recipe}.yaml", "--model_name_or_path", folder / "qwen"]
        arguments += ["--train_files", folder / "sentences.txt", "--output_dir", folder / recipe, *LOCALLY, "--bf16"]
        arguments += ["false", "--max_steps", "2", "--sia_token_shares", "0.2", *TINY["mipic"]]
        main([str(argument) for argument in arguments])
    assert (folder / "mipic_qwen3" / "model.safetensors").is_file()
    assert (folder / "mipic_qwen3_lora" / "adapter_model.safetensors").is_file()
    wrong = ["mipic", "--model_name_or_path", folder / "qwen", "--train_files", folder / "sentences.txt"]
    wrong += ["--output_dir", folder / "wrong", "--use_cpu"]
    with pytest.raises(ValueError, match="Qwen3Model has no dropout"):
        main([str(argument) for argument in wrong])
    with pytest.raises(ValueError, match="values that qwen3 does not have: atention_dropout"):
        main([str(argument) for argument in [*wrong, "--model_config", "{atention_dropout: 0.1}"]])


def test_every_recipe_is_tested():
    from tests.scripts.test_distillation_recipes import OVERLAYS, RECIPE_NAMES  # which imports from here

    names = {path.stem for path in RECIPES.glob("*.yaml")}
    (marks,) = (mark for mark in test_a_recipe_runs.pytestmark if mark.name == "parametrize")
    tested = {arguments[1] for arguments in marks.args[1]}
    tested |= {f"mipic_{name}" for name in MIPIC_PAPER} | {f"mic_{name}" for name in MIC_PAPER}
    assert names == tested | RECIPE_NAMES
    overlays = {path.parent.name + "/" + path.stem for path in RECIPES.glob("*/*.yaml")}
    studied = {f"studied/{name}" for name in ("mipic_chain_of_means_bert", "mic_with_pic_bert")}
    assert overlays == {f"ablations/{name}" for name in ABLATIONS} | studied | set(OVERLAYS)
    for path in RECIPES.rglob("*.yaml"):
        assert "output_dir" not in yaml.safe_load(path.read_text()), "where to write is the user's to say"
