"""
What the vectors of an encoder depend on. Every cache, store, results file and index that keeps something of an encoder
records these parts under these names, and compares them before it is read.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..utils.hashing import fingerprint_of, key_of, plain_tensors, weights_fingerprint
from .states import unwrap_encoder


# Entries of a config that change no vector: where it is from, its heads, its training, and its size by default.
WITHOUT_EFFECT = {
    *("_name_or_path", "name_or_path", "transformers_version", "architectures", "auto_map", "dtype", "torch_dtype"),
    *("id2label", "label2id", "problem_type", "return_dict", "output_attentions", "output_hidden_states", "use_cache"),
    *("gradient_checkpointing", "matryoshka_layers", "matryoshka_dims", "is_matryoshka", "matryoshka_dimensions"),
    *("output_layer", "output_dim", "converted_from", "fit", "source_auto_map"),
}
# Encoder -> state of the weights -> digest, of the last call.
_fingerprints: WeakKeyDictionary[nn.Module, dict[tuple[object, ...], str]] = WeakKeyDictionary()


def encoder_parts(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    projection: nn.Module | None = None,
    *,
    without: tuple[str, ...] = (),
) -> dict[str, str]:
    """
    Digests of an encoder: `weights`, with the projection, `config`, with adapters, and `tokenizer`. The weights are
    hashed again after a change only. Modules of the encoder, and entries of its config, that `without` names do not
    count.
    """
    encoder = unwrap_encoder(model)
    weights = {**encoder.state_dict(), **({} if projection is None else projection.state_dict())}
    counted = {name: tensor for name, tensor in weights.items() if name.partition(".")[0] not in without}
    values = {name: value for name, value in config_values(encoder.config).items() if name not in without}
    state = tuple((name, *tensor_state(tensor)) for name, tensor in counted.items())
    known = _fingerprints.setdefault(encoder, {})
    if state not in known:
        known.clear()
        known[state] = weights_fingerprint(counted.items())
    return {
        "weights": known[state],
        "config": key_of({**values, "adapters": adapters_of(encoder)}),
        "tokenizer": key_of(tokenizer_values(tokenizer)),
    }


def tensor_state(tensor: torch.Tensor) -> tuple[int, ...]:
    """Numbers that change when a tensor changes: its writes and, per plain tensor, its place in memory and the sum of
    its bits, because `tensor.data` can be written without counting. A fraction of the time of a digest."""
    state = [0 if tensor.is_inference() else tensor._version]
    for part in plain_tensors(tensor):
        content = part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        words = len(content) // 8 * 8
        state += part.data_ptr(), int(content[:words].view(np.uint64).sum()), int(content[words:].sum())
    return tuple(state)


def config_values(config: PreTrainedConfig) -> dict[str, Any]:
    """The entries of a config that vectors depend on and that differ from the defaults of its class."""
    defaults = type(config).default_config_fields()
    values = _with_effect(config.to_dict())
    differing = {name: value for name, value in values.items() if value != defaults.get(name)}
    return {"model_type": config.model_type, **differing}


def _with_effect(values: object) -> Any:
    if not isinstance(values, Mapping):
        return values
    return {
        str(name): _with_effect(value)
        for name, value in values.items()
        if name not in WITHOUT_EFFECT and "drop" not in str(name)
    }


def adapters_of(encoder: nn.Module) -> list[list[object]]:
    """Per layer with adapters of peft: its name, the active adapters, whether they are off, and their scale."""
    if "peft" not in sys.modules:
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [
        [name, module.active_adapters, module.disable_adapters, getattr(module, "scaling", None)]
        for name, module in encoder.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]


def tokenizer_values(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """All that token ids and their places depend on. The longest text is an argument of each call."""
    sides = {name: getattr(tokenizer, name, None) for name in ("truncation_side", "padding_side")}
    return {"tokens": tokenizer_fingerprint(tokenizer), **sides}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | Tokenizer) -> str:
    """A digest of all that token ids depend on, without padding and truncation, which every call sets. Also of a
    [`tokenizers.Tokenizer`]; a slow tokenizer is known by the files that it saves."""
    if isinstance(tokenizer, PreTrainedTokenizerBase) and not tokenizer.is_fast:
        with tempfile.TemporaryDirectory() as folder:
            files = sorted(map(Path, tokenizer.save_pretrained(folder)))
            return fingerprint_of(text for file in files for text in (file.name, file.read_bytes().hex()))
    return _digest_of_tokenizer(getattr(tokenizer, "backend_tokenizer", tokenizer).to_str())


@lru_cache(maxsize=8)  # a vocabulary takes a quarter of a second
def _digest_of_tokenizer(content: str) -> str:
    parts = json.loads(content)
    return key_of({name: part for name, part in parts.items() if name not in ("padding", "truncation")})
