"""The model to train: a checkpoint, some of its layers, or a new m3BERT; with or without an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from ..encode.granularity import is_elastic
from ..modeling.configuration_elastic import Elasticity, legal_layers
from ..modeling.files_elastic import Source
from ..models.auto import load_config, load_model
from ..models.conversion import convert_to_m3bert, take_layers
from ..models.repository import loading_from
from ..models.settings import load_tokenizer
from ..trainers.core.composition import mapping_of
from ..utils.help_texts import option
from .convert import for_m3bert, layers_from


@dataclass
class BackboneArguments:
    """Which model to train."""

    model_name_or_path: str | None = option(None, "Folder or Hub id. Default: a new m3BERT.", aliases=["--model"])
    tokenizer_name: str | None = option(None, "Folder or Hub id of the tokenizer. Default: the model's.")
    model_config: dict | str | None = option(None, "Values for its config, as JSON or YAML: {attention_dropout: 0.1}.")
    student_layers: str | None = option(
        None,
        "Train a student of the model's first N layers, or of chosen ones: 1,4,6, counted from 1. A model without a "
        "depth of these layers is converted to m3BERT.",
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model.")
    attn_implementation: str | None = option(None, "eager, sdpa, flash_attention_2, ... Default: sdpa.")
    peft: str | None = option(None, "Train an adapter instead of the whole model; legal value: lora.")
    lora_r: int = option(16, "Rank of the LoRA adapter.")
    lora_alpha: int = option(32, "Alpha of the LoRA adapter: its output is multiplied with alpha / rank.")
    lora_dropout: float = option(0.0, "Dropout on the input of the LoRA adapter.")
    lora_target_modules: list[str] | None = option(None, "Names of the modules to adapt. Default: every linear layer.")
    merge_adapter: bool = option(False, "Merge the adapter into the model and save the whole model.")
    overwrite: bool = option(False, "Replace the model and the checkpoints that output_dir holds.")


def load_backbone(
    options: BackboneArguments, auto_class: type[AutoModel]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model to train and its tokenizer."""
    name = options.model_name_or_path
    tokenizer_name = options.tokenizer_name or name
    if tokenizer_name is None:
        raise ValueError("A new m3BERT needs --tokenizer_name.")
    trust = {"trust_remote_code": options.trust_remote_code}
    with loading_from(tokenizer_name):
        tokenizer = load_tokenizer(Source.at(tokenizer_name, trust), None)
    values = mapping_of("--model_config", options.model_config)
    if name is None:
        if options.student_layers is not None or options.peft is not None:
            raise ValueError("--student_layers and --peft need a trained model: pass --model_name_or_path.")
        special = {each: getattr(tokenizer, each) for each in ("pad_token_id", "bos_token_id", "eos_token_id")}
        config = AutoConfig.for_model("m3bert", **{"vocab_size": len(tokenizer), **special, **values})
        model = auto_class.from_config(config)
    else:
        with loading_from(name):
            source = Source.at(name, trust)
            known = load_config(name, **source.options)
        if unknown := [each for each in values if not hasattr(known, each)]:
            raise ValueError(
                f"--model_config has values that the config of {known.model_type} lacks: {', '.join(unknown)}."
            )
        loading = {**source.options, **values}
        if options.student_layers is None:
            model = load_model(name, auto_class, **loading)
        else:
            model = student_of(name, options.student_layers, auto_class, loading)
            tokenizer = for_m3bert(tokenizer, model)
    if options.attn_implementation is not None:
        model.set_attn_implementation(options.attn_implementation)
    return with_adapter(model, options), tokenizer


def student_of(name: str, layers: str, auto_class: Any, loading: dict[str, Any]) -> Any:
    """A student of some layers of a model. A depth of an elastic model with these layers is loaded, with its
    exit. Other layers are taken from an m3BERT, to which any other encoder is converted."""
    config = load_config(name, **Source.at(name, loading).options)
    chosen = layers_from(layers, config.num_hidden_layers, name)
    depth = len(chosen)
    if is_elastic(config) and depth in legal_layers(config) and Elasticity.of(config).layers_of(depth) == chosen:
        return load_model(name, auto_class, **loading, output_layer=depth)
    model = load_model(name, auto_class, **loading)
    if config.model_type == "m3bert":
        take_layers(model, chosen)
        return model
    if auto_class is not AutoModel:
        raise ValueError("--student_layers cannot convert a model with a head: use an m3BERT, or train embeddings.")
    return convert_to_m3bert(model, layers=chosen)


def with_adapter(model: PreTrainedModel, options: BackboneArguments) -> Any:
    if options.peft is None:
        return model
    if options.peft != "lora":
        raise ValueError(f"--peft {options.peft} is unknown; legal values: lora.")
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=options.lora_target_modules or "all-linear",
    )
    return get_peft_model(model, config)
