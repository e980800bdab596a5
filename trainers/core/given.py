"""What a trainer is given: models by name or in memory, configs and datasets, checked before any work is done."""

from __future__ import annotations

import os
from typing import Any

from datasets import IterableDataset
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from modeling_m3bert import EmbeddingSettings
from modeling_m3bert.auto_m3bert import load_model
from modeling_m3bert.settings_m3bert import safetensors_only

from .streams.stream import Stream


SPLITS = {"train", "validation", "valid", "dev", "test"}  # usual names of the splits of one data set


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
        ValueError: if the model is none of these, or there is no tokenizer.
    """
    if isinstance(model, str | os.PathLike):
        model = os.fspath(model)
        tokenizer = tokenizer if tokenizer is not None else AutoTokenizer.from_pretrained(model)
        model = load_model(model, auto_class, **safetensors_only(model))
    elif isinstance(encoder := getattr(model, "transformers_model", None), PreTrainedModel):
        encoder.embedding_settings = EmbeddingSettings.of_sentence_transformer(model)
        tokenizer, model = tokenizer if tokenizer is not None else model.tokenizer, encoder
    elif not isinstance(model, PreTrainedModel) and not hasattr(model, "get_base_model"):
        raise ValueError(
            f"model is a {type(model).__name__}: pass a folder, a Hub id, a model of transformers or peft, or a "
            "SentenceTransformer."
        )
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


def check_given(
    trainer: Any, args: Any, config_class: type, train_dataset: Any, eval_dataset: Any, *, several: bool = False
) -> None:
    """
    Check the config and the datasets of a trainer. `several` says whether the training data may be a `dict` of data
    sets.

    Raises:
        ValueError: if the config is not one of this library, a dataset is not of the library datasets, or a `dict` has
            the splits of one data set. The message says what to pass.
    """
    if not isinstance(args, config_class):
        theirs = next(kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trainers."))
        raise ValueError(
            f"args is a {type(args).__name__}: {theirs} takes a {theirs.removesuffix('Trainer')}Config, which has the "
            "same fields and more."
        )
    trained: list[Any] = [train_dataset]
    if several and isinstance(train_dataset, dict) and train_dataset and not SPLITS & train_dataset.keys():
        trained = [*train_dataset.values()]
        if streams := [name for name, each in train_dataset.items() if isinstance(each, IterableDataset | Stream)]:
            raise ValueError(f"The data set {streams[0]!r} is a stream, which cannot be one of several data sets.")
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    for name, dataset in [
        *(("train_dataset", each) for each in trained),
        *(("eval_dataset", each) for each in evaluated),
    ]:
        if isinstance(dataset, dict):
            parts = ", ".join(map(repr, dataset)) or "of which it has none"
            raise ValueError(f"{name} is a {type(dataset).__name__}: pass one of its splits, {parts}.")
        if dataset is not None and not hasattr(dataset, "column_names"):
            raise ValueError(
                f"{name} is a {type(dataset).__name__}: pass a Dataset of the library datasets, such as "
                "Dataset.from_list(rows)."
            )
