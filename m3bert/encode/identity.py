"""
What the vectors of an encoder depend on. Every cache, store, results file and index that keeps something of an encoder
records these parts under these names, and compares them before it is read.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from ..utils.hashing import fingerprint_of, key_of, weights_fingerprint
from .states import unwrap_encoder


# Entries of a config that change no vector: where it is from, its heads, its training, and its size by default.
WITHOUT_EFFECT = {
    *("_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype"),
    *("id2label", "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "use_cache"),
    *("gradient_checkpointing", "matryoshka_layers", "matryoshka_dims", "is_matryoshka", "matryoshka_dimensions"),
    *("output_layer", "output_dim", "converted_from", "fit", "source_auto_map"),
}


def encoder_parts(
    model: Any, tokenizer: Any, projection: nn.Module | None = None, *, without: tuple[str, ...] = ()
) -> dict[str, str]:
    """
    Digests of an encoder: its `weights` with those of its projection, its `config` with its adapters, and its
    `tokenizer`. They are computed at each call: no change of a weight is missed.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The encoder, with or without a head.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        projection (`nn.Module`, *optional*): Its projection.
        without (`tuple[str, ...]`, *optional*): Modules of the encoder whose weights do not count, nor an entry of
            this name in the config.
    """
    encoder = unwrap_encoder(model)
    weights = {**encoder.state_dict(), **({} if projection is None else projection.state_dict())}
    counted = ((name, its) for name, its in weights.items() if name.partition(".")[0] not in without)
    values = {name: its for name, its in config_values(encoder.config).items() if name not in without}
    return {
        "weights": weights_fingerprint(counted),
        "config": key_of({**values, "adapters": adapters_of(encoder)}),
        "tokenizer": key_of(tokenizer_values(tokenizer)),
    }


def config_values(config: Any) -> dict[str, Any]:
    """The entries of a config that vectors depend on. What has the default of its class is left out: a later version
    of transformers may add entries."""
    defaults = type(config).default_config_fields()
    values = _with_effect(config.to_dict())
    differing = {name: its for name, its in values.items() if its != defaults.get(name)}
    return {"model_type": config.model_type, **differing}


def _with_effect(values: Any) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {
        str(name): _with_effect(its)
        for name, its in values.items()
        if name not in WITHOUT_EFFECT and "drop" not in str(name)
    }


def adapters_of(encoder: nn.Module) -> list[Any]:
    """Per layer with adapters of peft: its name, the active adapters, whether they are off, and their scale."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        [name, its.active_adapters, its.disable_adapters, getattr(its, "scaling", None)]
        for name, its in encoder.named_modules()
        if isinstance(its, BaseTunerLayer)
    ]


def tokenizer_values(tokenizer: Any) -> dict[str, Any]:
    """All that token ids and their places depend on. The longest text is an argument of each call."""
    sides = {name: getattr(tokenizer, name, None) for name in ("truncation_side", "padding_side")}
    return {"tokens": tokenizer_fingerprint(tokenizer), **sides}


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A digest of all that token ids depend on, without padding and truncation, which every call sets. Also of a
    [`tokenizers.Tokenizer`]; of a slow tokenizer, it is that of the files that it saves."""
    if isinstance(tokenizer, PreTrainedTokenizerBase) and not tokenizer.is_fast:
        with tempfile.TemporaryDirectory() as folder:
            files = sorted(map(Path, tokenizer.save_pretrained(folder)))
            return fingerprint_of(text for file in files for text in (file.name, file.read_bytes().hex()))
    parts = json.loads(getattr(tokenizer, "backend_tokenizer", tokenizer).to_str())
    return key_of({name: part for name, part in parts.items() if name not in ("padding", "truncation")})
