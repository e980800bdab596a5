"""
What servers need to find in the files of an embedding checkpoint. The facts come from their sources (read 2026-11-22):

- text-embeddings-inference: `ModelConfig`, `PoolConfig`, `STConfig` and `NewSTConfig` in `router/src/lib.rs`;
  `ModuleConfig` in `backends/src/lib.rs`; `BertConfig`, `DistilBertConfig` and `DenseConfig` in
  `backends/candle/src/models/`. A field of the wrong type makes it refuse the whole file.
- vLLM: `get_pooling_config`, `get_sentence_transformer_tokenizer_config` and `try_get_dense_modules` in
  `vllm/transformers_utils/config.py`. It ignores `sentence_bert_config.json` without both fields below.
- Infinity loads a folder with sentence-transformers, or the files in `onnx/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modeling_m3bert.settings_m3bert import ENCODER_FILE, MODULES_FILE, POOLING_FOLDER, SIMILARITY_FILE, SWITCHES


Kinds = tuple[type, ...]
INTEGER: Kinds = (int,)
NUMBER: Kinds = (int, float)
# File -> required field -> its types in JSON.
REQUIRED: dict[str, dict[str, Kinds]] = {
    "config.json": {"architectures": (list,), "model_type": (str,), "max_position_embeddings": INTEGER},
    ENCODER_FILE: {"max_seq_length": INTEGER, "do_lower_case": (bool,)},
    f"{POOLING_FOLDER}/config.json": {
        "word_embedding_dimension": INTEGER,
        "pooling_mode_cls_token": (bool,),
        "pooling_mode_mean_tokens": (bool,),
    },
    # Servers start without prompts, but then cannot offer those that the encoder was trained with.
    SIMILARITY_FILE: {"prompts": (dict,)},
}
# Field of config.json that may be missing -> types of its values.
MAPPINGS: dict[str, Kinds] = {"id2label": (str,), "label2id": INTEGER, "auto_map": (str,)}
BERT: dict[str, Kinds] = {
    "vocab_size": INTEGER,
    "hidden_size": INTEGER,
    "num_hidden_layers": INTEGER,
    "num_attention_heads": INTEGER,
    "intermediate_size": INTEGER,
    "hidden_act": (str,),
    "hidden_dropout_prob": NUMBER,
    "type_vocab_size": INTEGER,
    "initializer_range": NUMBER,
    "layer_norm_eps": NUMBER,
    "pad_token_id": INTEGER,
}
DISTILBERT: dict[str, Kinds] = {
    **dict.fromkeys(("vocab_size", "dim", "n_layers", "n_heads", "hidden_dim", "pad_token_id"), INTEGER),
    "activation": (str,),
}
# Native model type -> the fields that text-embeddings-inference builds it from.
ARCHITECTURES = {**dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), BERT), "distilbert": DISTILBERT}
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swiglu", "tanh")
MODULE_TYPES = tuple(
    f"sentence_transformers.models.{kind}" for kind in ("Transformer", "Pooling", "Dense", "Normalize")
)
DENSE: dict[str, Kinds] = {"in_features": INTEGER, "out_features": INTEGER, "bias": (bool,)}
DENSE_ACTIVATIONS = ("torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh")


def problems_for_servers(folder: str | Path) -> list[str]:
    """
    Check the files of an embedding checkpoint for what text-embeddings-inference, vLLM and Infinity require.

    Whether a server knows the model type is another question: a native export has one that they know, an m3BERT needs
    a server that runs remote code.

    Args:
        folder (`Path`): Folder of the checkpoint.

    Returns:
        `list[str]`: one sentence per problem, which names the file and the field; empty if there are none.
    """
    return list(_problems(Path(folder)))


def _problems(folder: Path) -> Iterator[str]:
    if not (folder / "tokenizer.json").is_file():
        yield "tokenizer.json is missing: servers need a fast tokenizer."
    found: dict[str, Any] = {}
    for name in (*REQUIRED, MODULES_FILE):
        try:
            found[name] = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            yield f"{name} is missing."
    for name in found.keys() & REQUIRED.keys():
        yield from _fields(name, found[name], REQUIRED[name])
    config = found.get("config.json", {})
    yield from _config(config)
    pooling = found.get(f"{POOLING_FOLDER}/config.json", {})
    if pooling and sum(pooling.get(switch) is True for switch in SWITCHES.values()) != 1:
        yield f"{POOLING_FOLDER}/config.json must set exactly one pooling_mode."
    prompts = found.get(SIMILARITY_FILE, {}).get("prompts", {})
    if not all(isinstance(prompt, str) for prompt in prompts.values()):
        yield f"{SIMILARITY_FILE} has a prompt that is no text."
    longest, positions = found.get(ENCODER_FILE, {}).get("max_seq_length"), config.get("max_position_embeddings")
    if isinstance(longest, int) and isinstance(positions, int) and not 0 < longest <= positions:
        yield f"{ENCODER_FILE}: max_seq_length={longest} must be within 1..{positions}, the model's positions."
    for module in found.get(MODULES_FILE, []):
        yield from _module(folder, module)


def _config(config: dict[str, Any]) -> Iterator[str]:
    for name, kinds in MAPPINGS.items():
        if not all(_is(value, kinds) for value in config.get(name, {}).values()):
            yield f"config.json: {name} must map to {_spell(kinds)}."
    fields = ARCHITECTURES.get(config.get("model_type", ""), {})
    yield from _fields("config.json", config, fields)
    for name in fields.keys() & {"hidden_act", "activation"}:
        if config.get(name) not in ACTIVATIONS:
            yield f"config.json: {name}={config.get(name)!r} is not one of {', '.join(ACTIVATIONS)}."
    if config.get("is_matryoshka"):  # vLLM checks a request for fewer dims against this list
        dims = config.get("matryoshka_dimensions") or []
        if not dims or not all(_is(dim, INTEGER) for dim in dims) or sorted(set(dims)) != dims:
            yield "config.json: matryoshka_dimensions must be ascending integers, since is_matryoshka is true."


def _module(folder: Path, module: dict[str, Any]) -> Iterator[str]:
    yield from _fields(MODULES_FILE, module, {"idx": INTEGER, "name": (str,), "path": (str,), "type": (str,)})
    kind, path = module.get("type"), module.get("path", "")
    if kind not in MODULE_TYPES:
        yield f"{MODULES_FILE}: {kind!r} is not one of {', '.join(MODULE_TYPES)}."
    if kind != "sentence_transformers.models.Dense":
        return
    file, weights = folder / path / "config.json", folder / path / "model.safetensors"
    missing = [part for part in (file, weights) if not part.is_file()]
    yield from (f"{path}/{part.name} is missing." for part in missing)
    if file not in missing:
        config = json.loads(file.read_text(encoding="utf-8"))
        yield from _fields(f"{path}/config.json", config, DENSE)
        if config.get("activation_function") not in DENSE_ACTIVATIONS:
            yield f"{path}/config.json: activation_function must be one of {', '.join(DENSE_ACTIVATIONS)}."


def _fields(file: str, content: dict[str, Any], fields: dict[str, Kinds]) -> Iterator[str]:
    for name, kinds in fields.items():
        if name not in content:
            yield f"{file} lacks {name}."
        elif not _is(content[name], kinds):
            yield f"{file}: {name}={content[name]!r} must be {_spell(kinds)}."


def _is(value: Any, kinds: Kinds) -> bool:
    """As `isinstance`, except that True and False are no numbers."""
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))


def _spell(kinds: Kinds) -> str:
    return " or ".join(kind.__name__ for kind in kinds)
