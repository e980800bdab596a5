"""Tiny elastic repositories of native encoders, with random exits, a path and a static table."""

import shutil
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig, PreTrainedTokenizerBase

from m3bert.modeling.modeling_elastic import make_elastic
from m3bert.modeling.parts_elastic import layer_list
from tests.conftest import save


WIDTH, DEPTH, VOCABULARY = 32, 6, 99
PATH = [1, 2, 5, 6]  # depth 4
PROMPTS = {"query": "read the ", "document": "text of "}
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 4, "intermediate_size": 37,
    "vocab_size": VOCABULARY, "pad_token_id": 1, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
CAUSAL = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 0, "eos_token_id": 2}
KINDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "xlm-roberta", "mpnet", "nomic_bert"), SIZES),
    "distilbert": {
        "dim": WIDTH, "n_layers": DEPTH, "n_heads": 4, "hidden_dim": 37, "vocab_size": VOCABULARY, "pad_token_id": 1,
        "max_position_embeddings": 64, "initializer_range": 0.2,
    },
    "modernbert": {
        **SIZES, "bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2, "local_attention": 8,
    },
    "gemma3_text": {**CAUSAL, "sliding_window": 8, "use_bidirectional_attention": True},
    **dict.fromkeys(("llama", "qwen3"), CAUSAL),
}  # fmt: skip
FAMILIES = {
    **dict.fromkeys(("roberta", "electra", "ernie", "deberta-v2", "gte", "jina_embeddings_v3"), SIZES),
    **dict.fromkeys(("eurobert", "granite"), CAUSAL),
    "m3bert": {**SIZES, "matryoshka_layers": [], "matryoshka_dims": []},
    **KINDS,
}


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[family](**{**FAMILIES[family], **changes})


def affine(inputs: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of a random exit."""
    return torch.randn(WIDTH, inputs) * 0.2, torch.randn(WIDTH) * 0.1


def save_source(
    folder: Path, tokenizer: PreTrainedTokenizerBase, kind: str = "bert", *, pooling: str = "mean", **settings: Any
) -> Any:
    """Save a native encoder of random weights as an embedding model, and return it."""
    model = AutoModel.from_config(config_of(kind)).eval()
    save(folder, model, tokenizer, **{"max_length": 40, "prompts": PROMPTS, "pooling": pooling, **settings})
    return model


def save_elastic(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    kind: str = "bert",
    *,
    table: bool = True,
    path: list[int] | None = PATH,
    source: Path | None = None,
    fit: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """
    Save an elastic repository whose depths 2 and 4 have exits, and return its model. Depth 4 is a path with one
    refitted matrix. With a table, it is depth 0, and depth 4 reads it.

    Args:
        folder (`Path`): Folder to write.
        tokenizer: Tokenizer to save.
        kind (`str`): Model type.
        table (`bool`): Whether there is a static table.
        path (`list[int]`, *optional*): Layers of depth 4. Default: the first four.
        source (`Path`, *optional*): Folder with the native encoder. Default: one of random weights.
        fit (`Mapping`, *optional*): Further entries of the record of the fit.
        settings: Arguments of [`save_source`].
    """
    if source is None:
        source = folder.with_name(f"{folder.name}-source")
        save_source(source, tokenizer, kind, **settings)
    shutil.copytree(source, folder, dirs_exist_ok=True)
    model = make_elastic(AutoModel.from_pretrained(source).eval())
    paths = {}
    if path is not None:
        name, layers = layer_list(model, DEPTH)
        place, layer = 1, layers[path[1] - 1]
        last = [key for key, module in layer.named_modules() if isinstance(module, nn.Linear)][-1]
        matrix = layer.get_submodule(last).weight
        paths[4] = path, {f"{name}.{place}.{last}.weight": torch.randn_like(matrix) * 0.2}
    digest = sha256((source / "model.safetensors").read_bytes()).hexdigest()
    model.set_depths(
        exits={depth: affine() for depth in (2, 4)},
        joints={4: affine(2 * WIDTH)} if table else {},
        paths=paths,
        table=torch.randn(VOCABULARY, WIDTH).half().float() if table else None,
        ignored_ids=sorted(set(tokenizer.all_special_ids)) if table else [],
        fit={"source": "maker/encoder", "source_sha256": digest, **(fit or {})},
    )
    model.save_pretrained(folder)
    shutil.copyfile(source / "model.safetensors", folder / "model.safetensors")  # byte for byte
    return model


def save_sizes(folder: Path, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> None:
    """As [`save_elastic`], but only depth 3 has an exit, which reads the table; 2, and 4 with its path, have none."""
    model = save_elastic(folder, tokenizer, **settings)
    table, ignored = model.elastic.table.weight, model.config.elastic["ignored_ids"]
    exits, joints = {3: affine()}, {3: affine(2 * WIDTH)}
    model.set_depths(
        exits=exits, joints=joints, paths={4: (PATH, {})}, depths=[2], table=table, ignored_ids=ignored, fit={}
    )
    model.save_pretrained(folder)
