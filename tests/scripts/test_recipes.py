"""The recipes: each one fits the encoder that it is made for, and the commands in its header start."""

from __future__ import annotations

import gzip
import json
import re
from glob import glob
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModel,
    BertConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    RobertaConfig,
    XLMRobertaConfig,
)

from m3bert import cli
from m3bert.commands import recipes, train
from m3bert.modeling import M3BertConfig, M3BertForMaskedLM
from m3bert.trainers import DistillationConfig
from tests.conftest import WORDS


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


# Published encoder that recipes name -> a config of its kind and layers; few layers where no recipe names one.
SMALL = BertConfig(hidden_size=384, num_hidden_layers=2)
PUBLISHED = {
    "BAAI/bge-m3": BACKBONES["bge_m3"],
    "Qwen/Qwen3-Embedding-0.6B": BACKBONES["qwen3"],
    "google-bert/bert-base-multilingual-uncased": BertConfig(),
    "google-bert/bert-base-uncased": BertConfig(),
    "huawei-noah/TinyBERT_General_6L_768D": BACKBONES["tinybert"],
    "intfloat/multilingual-e5-base": XLMRobertaConfig(),
    "intfloat/multilingual-e5-small": BACKBONES["released"],
    "sentence-transformers/all-MiniLM-L12-v2": BACKBONES["released"],
    "nreimers/MiniLM-L6-H384-uncased": SMALL,
    "nreimers/TinyBERT_L-4_H-312_v2": SMALL,
    "Luyu/co-condenser-marco-retriever": SMALL,
    "Shitao/RetroMAE_MSMARCO_distill": SMALL,
    "princeton-nlp/sup-simcse-bert-large-uncased": SMALL,
    "princeton-nlp/sup-simcse-roberta-large": RobertaConfig(num_hidden_layers=2),
    "answerdotai/ModernBERT-base": ModernBertConfig(),
    "nomic-ai/modernbert-embed-base": ModernBertConfig(),
}
NEW_MODEL = ["--model_config", json.dumps({"hidden_size": 96, "intermediate_size": 16})]
# Recipe -> what its commands need beside two steps on small data.
NEEDED = {
    "m3bert_stage1": NEW_MODEL,
    "ablations/m3bert_architecture": NEW_MODEL,
    "m3bert_matryoshka_distillation": ["--allow_untrained_teacher", "true"],
}


def narrowed(recipe: str) -> str:
    """A recipe for encoders of an eighth of the width: with an eighth of each dim, such as 32 and 64 of
    `4,12 x 32,64`, and of the keys of `level_weights`."""
    dims = re.compile(r"(?:(?<=\dx)|(?<=\d x ))\d+(?:,\d+(?![\dx]))*|(?<=[{ ])\d+(?=: )")
    return dims.sub(lambda found: re.sub(r"\d+", lambda dim: str(int(dim[0]) // 8), found[0]), recipe)


def commands_of(name: str) -> list[list[str]]:
    """The words of the complete commands in the header of a recipe, at an eighth of the width."""
    recipe = narrowed(recipes.find_recipe(name).read_text()).replace("\\\n#", "")
    return [line.split() for line in re.findall(r"^#   .*?\bm3bert (.*\w)$", recipe, re.MULTILINE)]


def save_stand_in(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Save a random model of the kind and the layers of a config, with an eighth of its width."""
    sizes = {"hidden_size": config.hidden_size // 8, "head_dim": 8, "intermediate_size": 16}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 514, "initializer_range": 0.2}
    sizes |= {"matryoshka_dims": [4, 8, 16, config.hidden_size // 8]}
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    known = config.to_dict()
    small = type(config)(**known | {key: value for key, value in (sizes | special).items() if key in known})
    model = M3BertForMaskedLM(small) if isinstance(small, M3BertConfig) else AutoModel.from_config(small)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_data(file: Path, columns: list[str]) -> None:
    """Write a text file, or rows of texts in these columns."""
    texts = [" ".join(pair) for pair in permutations(WORDS[:12], 2)]
    rows = [json.dumps(dict(zip(columns, texts[row:], strict=False))) for row in range(40)]
    file.parent.mkdir(parents=True, exist_ok=True)
    with (gzip.open if file.suffix == ".gz" else open)(file, "wt") as lines:
        lines.write("\n".join(texts if file.suffix == ".txt" else rows))


def write_inputs(commands: list[list[str]], columns: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    """Write what the commands read and none of them makes: models of m3BERT, and files of texts or of rows."""
    words = [word for command in commands for word in command]
    before = dict(reversed([pair[::-1] for pair in pairwise(words)]))  # word -> the word before its first occurrence
    for word in before:
        if word.startswith("runs/") and before[word] == "--model_name_or_path":
            save_stand_in(M3BertConfig(), tokenizer, Path(word))
        elif word.endswith((".txt", ".jsonl", ".gz")) and before[word] != "--output_file":
            write_data(Path(word.replace("*", "1")), ["text"] if word == "passages.jsonl" else columns)
    for language in ("en", "de"):  # of the folder `data`
        write_data(Path(f"data/{language}/1.txt"), columns)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipes.recipe_names() if "/" not in name or commands_of(name)])
def test_the_commands_of_a_recipe_start(name, only_hub, tiny_tokenizer, quick_options, tmp_path, monkeypatch):
    """Two steps of the commands in its header, with small files and models in place of all that they read."""
    commands = commands_of(name)
    *preparing, training = commands
    stack = [word for before, word in pairwise(training) if before == "--config"]
    texts = {each: narrowed(recipes.find_recipe(each).read_text()) for each in stack}
    columns = " ".join(recipes.read_recipes(stack).get("text_columns", ["anchor", "positive", "negative"]))
    monkeypatch.chdir(tmp_path)
    for each, text in texts.items():  # a file in the working folder is read in place of the recipe of its name
        Path(each).parent.mkdir(exist_ok=True)
        Path(each).write_text(text)
    for model in filter("".join(texts.values()).__contains__, PUBLISHED):
        only_hub.publish(model, save_stand_in(PUBLISHED[model], tiny_tokenizer, Path("hub", model)))
    write_inputs(commands, re.split(r"\W", columns), tiny_tokenizer)
    options = quick_options(
        max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=1, max_length=32, bf16=False
    )
    for command in [*preparing, [*training, *options, *NEEDED.get(name, [])]]:
        cli.main([file for word in command for file in sorted(glob(word)) or [word]])
    output = Path(training[training.index("--output_dir") + 1])
    assert (output / "config.json").is_file() or (output / "adapter_config.json").is_file()
