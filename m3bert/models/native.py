"""
The way back: from m3BERT to the encoder of transformers with the same architecture, called *native*. Servers that know
BERT run it, and it needs no remote code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForTokenClassification, PreTrainedConfig, PreTrainedModel

from ..modeling.configuration_elastic import Elasticity, resolve_size
from ..modeling.configuration_m3bert import M3BertConfig
from ..modeling.modeling_m3bert import M3BertModel
from .conversion import (
    BERT_CONFIG,
    COMMON_CONFIG,
    CONVERTIBLE,
    DISTILBERT_CONFIG,
    DISTILBERT_EPS,
    OFFSET_POSITIONS,
    layer_tensors,
    position_offset,
)


# m3BERT class -> Auto class of the native model, and the name of the head in both. The other native heads have a dense
# layer between the encoder and what m3BERT's heads are.
NATIVE_CLASSES: dict[str, tuple[Any, str | None]] = {
    "M3BertModel": (AutoModel, None),
    "M3BertForTokenClassification": (AutoModelForTokenClassification, "classifier"),
}


def convert_to_native(model: PreTrainedModel, model_type: str | None = None) -> PreTrainedModel:
    """
    Convert an m3BERT to the native encoder with equal hidden states at every layer. [`convert_to_m3bert`] gives the
    same m3BERT again. To truncate a model, load it with `output_layer`.

    Token types are zeros, and so are the position embeddings of RoBERTa before the first position; its hidden states
    are equal only if padding is on the right. BERT's pooler, which m3BERT lacks, is `tanh` of the first token's hidden
    state. Hidden states have all dims, without an exit: [`output_map`] is the rest, which the head for token
    classification contains. No static table is read: the map of a layer that reads it is that of its hidden state.

    Args:
        model ([`M3BertModel`] or [`M3BertForTokenClassification`]): A post-norm m3BERT.
        model_type (`str`, *optional*): Model type of the result: `"bert"`, `"roberta"`, `"xlm-roberta"`,
            `"camembert"`, `"data2vec-text"`, `"electra"` or `"distilbert"`. Default: that of the encoder that the
            model was converted from, or else `"bert"`.

    Returns:
        [`~transformers.PreTrainedModel`]: a copy with the same dtype, device and mode (training or evaluation).

    Raises:
        ValueError: if the model has no native equivalent. The message gives the reason.
    """
    model_type = model_type or model.config.native_model_type or "bert"
    if (reason := _why_not_native(model, model_type)) is not None:
        raise ValueError(f"{type(model).__name__} has no native equivalent: {reason}.")
    auto_class, head = NATIVE_CLASSES[type(model).__name__]
    native = auto_class.from_config(native_config(model.config, model_type)).to(model.device, model.dtype)
    source, encoder = model.base_model, native.base_model
    with torch.no_grad():
        encoder.load_state_dict(native_weights(source.state_dict(), native.config) | identity_pooler(encoder))
        if head is not None:
            getattr(native, head).load_state_dict(native_head(getattr(model, head), source))
    return native.train(model.training)


def _why_not_native(model: PreTrainedModel, model_type: str) -> str | None:
    """Why no encoder of a native model type equals an m3BERT; `None` if one does."""
    name, config = type(model).__name__, model.config
    layer, table = config.resolve_granularity()[0], Elasticity.of(config).table
    reasons = {
        "native heads of its kind have another layer before the classifier. Load it with remote code, or export its "
        "encoder": name not in NATIVE_CLASSES,
        "its layer 0 is a static table. Export that instead: `m3bert export --format static`": layer == 0,
        "its head reads the static table. Export its encoder": name != "M3BertModel" and layer in table,
        f"model_type={model_type!r} is unknown; legal values: {', '.join(CONVERTIBLE)}": model_type not in CONVERTIBLE,
        f"DistilBERT's norm_eps is {DISTILBERT_EPS}, not {config.norm_eps}": (
            model_type == "distilbert" and config.norm_eps != DISTILBERT_EPS
        ),
        f"its config has no pad_token_id, after which the positions of {model_type} begin": (
            model_type in OFFSET_POSITIONS and config.pad_token_id is None
        ),
        "its weights are quantised": getattr(config, "quantization_config", None) is not None,
    }
    if (reason := next((reason for reason, applies in reasons.items() if applies), None)) is not None:
        return reason
    other = architecture_differs(config)
    return None if other is None else f"{other}. Export it to ONNX instead: `m3bert export`"


def architecture_differs(config: M3BertConfig) -> str | None:
    """Why no native encoder has this architecture; `None` if one has."""
    reasons = {
        "it is pre-norm, and BERT is post-norm": config.norm_position != "post",
        "its norm is RMSNorm, and BERT's is LayerNorm": config.norm_type != "layernorm",
        "its feed-forward layers are gated": config.mlp_gated,
        "its positions are rotary, and BERT's are absolute": config.position_embedding_type != "absolute",
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def native_config(config: M3BertConfig, model_type: str) -> PreTrainedConfig:
    """The config of the native encoder of an m3BERT. BERT has one dropout for embeddings and layers: that of the
    layers is taken."""
    names = DISTILBERT_CONFIG if model_type == "distilbert" else BERT_CONFIG
    values = {name: getattr(config, name) for name in COMMON_CONFIG}
    values |= {theirs: getattr(config, ours) for ours, theirs in names.items()}
    offset = (config.pad_token_id or 0) + 1 if model_type in OFFSET_POSITIONS else 0
    if model_type != "distilbert":
        values["type_vocab_size"] = 1 if offset else 2  # BERT's tokenizer gives the second text of a pair the type 1
    if model_type == "electra":
        values["embedding_size"] = config.hidden_size
    if config.is_matryoshka:  # servers accept a request for fewer dims only if the config lists them
        values |= {"is_matryoshka": True, "matryoshka_dimensions": config.matryoshka_dimensions}
    return AutoConfig.for_model(
        model_type,
        **values,
        max_position_embeddings=config.max_position_embeddings + offset,
        classifier_dropout=config.classifier_dropout,
        id2label=config.id2label,
        label2id=config.label2id,
        problem_type=config.problem_type,
        name_or_path=config.converted_from or config.name_or_path,  # what the result is converted from again
    )


def native_weights(source: dict[str, torch.Tensor], config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """State dict of a native encoder with this config, without a pooler, from that of an [`M3BertModel`]. Biases that
    m3BERT lacks are 0."""
    tokens, positions = source["embed_tokens.weight"], source["pos_embeddings.weight"]
    weights = {
        "embeddings.word_embeddings.weight": tokens,
        "embeddings.position_embeddings.weight": nn.functional.pad(positions, (0, 0, position_offset(config), 0)),
        "embeddings.LayerNorm.weight": source["input_norm.weight"],
        "embeddings.LayerNorm.bias": source["input_norm.bias"],
    }
    if config.model_type != "distilbert":
        types = tokens.new_zeros(config.type_vocab_size, config.hidden_size)
        weights["embeddings.token_type_embeddings.weight"] = types
    for ours, theirs in layer_tensors(config).items():
        kernel = source[ours.removesuffix("bias") + "weight"] if ours.endswith("bias") else None
        weights[theirs] = source[ours] if ours in source or kernel is None else kernel.new_zeros(len(kernel))
    return weights


def identity_pooler(encoder: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of the pooler of a native encoder, if it has one: the identity before its tanh."""
    pooler = getattr(encoder, "pooler", None)
    if pooler is None:
        return {}
    bias = pooler.dense.bias
    return {"pooler.dense.weight": torch.diag(torch.ones_like(bias)), "pooler.dense.bias": torch.zeros_like(bias)}


def output_map(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """
    Map from the hidden state of the last layer of an elastic encoder to its output: the exit, if the layer has one,
    and truncation to the output dim. Pooling by mean or by position commutes with it. The exit of a layer that reads
    the static table is the map of its hidden state alone.

    Returns:
        `tuple`: weight of shape `(dim, hidden_size)` and bias of shape `(dim,)`, or `None` in its place if there is no
        exit. `None` if the hidden states are returned as they are.
    """
    (layer, dim), width = resolve_size(model.config), model.config.hidden_size
    exit = model.elastic.exit(layer)
    if exit is not None:
        return exit.weight.detach()[:dim], exit.bias.detach()[:dim]
    return (torch.eye(dim, width).to(model.device, model.dtype), None) if dim < width else None


def native_head(head: nn.Linear, encoder: M3BertModel) -> dict[str, torch.Tensor]:
    """State dict of a native head, which reads the hidden state of all dims: m3BERT's head after [`output_map`]."""
    exit = output_map(encoder)
    if exit is None:
        return {"weight": head.weight, "bias": head.bias}
    weight, bias = exit
    kernel = head.weight[:, : len(weight)]
    return {"weight": kernel @ weight, "bias": head.bias if bias is None else head.bias + kernel @ bias}
