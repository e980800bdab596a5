"""The recipes: each one fits the encoder that it is made for."""

import re
from typing import Any

import pytest
from transformers import BertConfig, ModernBertConfig, Qwen3Config, XLMRobertaConfig

from m3bert.commands import recipes, train
from m3bert.modeling import M3BertConfig
from m3bert.trainers import DistillationConfig


# Suffix of a recipe's name -> the published encoder that it is made for; m3BERT for all others.
BACKBONES = {
    "tinybert": BertConfig(num_hidden_layers=6),
    "bert": BertConfig(),
    "bge_m3": XLMRobertaConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16),
    "qwen3": Qwen3Config(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8),
    "qwen3_lora": Qwen3Config(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8),
    "modernbert": ModernBertConfig(),
    "released": BertConfig(hidden_size=384, num_hidden_layers=12),  # MiniLM-L12, of QAMA's released code
}
# A recipe for each kind of recipe that overlays name.
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
