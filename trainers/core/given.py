"""The backbone of a trainer, by name or in memory."""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...modeling import EmbeddingSettings
from ...modeling.auto_m3bert import load_model
from ...modeling.settings_m3bert import safetensors_only


def backbone_of(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, auto_class: Any, peft_config: Any = None
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """
    The backbone that a trainer is to train, and its tokenizer.

    Args:
        model (`str`, [`~transformers.PreTrainedModel`], peft model or [`~sentence_transformers.SentenceTransformer`]):
            Folder or Hub id, or a model in memory. Of a SentenceTransformer, the encoder is trained, with the settings
            that the SentenceTransformer has.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*): Its tokenizer. Default: that of the folder,
            Hub id or SentenceTransformer.
        auto_class (`type`): What loads a folder or Hub id, such as [`~transformers.AutoModel`].
        peft_config ([`~peft.PeftConfig`], *optional*): Train a new adapter of this kind instead of the whole model.

    Raises:
        ValueError: if there is no tokenizer, or `peft_config` is passed for a model that has an adapter.
    """
    if isinstance(model, str | os.PathLike):
        model = os.fspath(model)
        tokenizer = tokenizer if tokenizer is not None else AutoTokenizer.from_pretrained(model)
        model = load_model(model, auto_class, **safetensors_only(model))
    elif isinstance(encoder := getattr(model, "transformers_model", None), PreTrainedModel):
        encoder.embedding_settings = EmbeddingSettings.of_sentence_transformer(model)
        tokenizer, model = tokenizer if tokenizer is not None else model.tokenizer, encoder
    if tokenizer is None and (name := getattr(model.config, "name_or_path", None)):
        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer is None:
        raise ValueError("The model has no name to find its tokenizer by: pass processing_class.")
    if peft_config is None:
        return model, tokenizer
    if not isinstance(model, PreTrainedModel):
        raise ValueError("peft_config makes a new adapter, but the model has one: pass one of them.")
    from peft import get_peft_model

    return get_peft_model(model, peft_config), tokenizer
