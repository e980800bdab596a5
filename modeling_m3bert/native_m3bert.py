"""
The way back: from m3BERT to the encoder of transformers with the same architecture, called *native*. Servers that know
BERT run it, and it needs no remote code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from .configuration_m3bert import M3BertConfig
from .conversion_m3bert import CONVERTIBLE, OFFSET_POSITIONS, layer_tensors, position_offset
from .modeling_elastic import Elasticity
from .modeling_m3bert import M3BertModel


# m3BERT class -> Auto class of the native model, and the name of the head in both.
NATIVE_CLASSES: dict[str, tuple[Any, str | None]] = {
    "M3BertModel": (AutoModel, None),
    "M3BertForTokenClassification": (AutoModelForTokenClassification, "classifier"),
    "M3BertForQuestionAnswering": (AutoModelForQuestionAnswering, "qa_outputs"),
}
# m3BERT class -> why no native class has its head.
OTHER_HEADS = {
    "M3BertForMaskedLM": "native masked-LM heads have a dense layer and a LayerNorm before the decoder",
    "M3BertForSequenceClassification": "native text classifiers have a dense layer and a tanh before the classifier",
    "M3BertForMultipleChoice": "native multiple-choice heads have a dense layer and a tanh before the classifier",
}
DISTILBERT_EPS = 1e-12  # hard-coded in DistilBERT


def convert_to_native(model: PreTrainedModel, model_type: str | None = None) -> PreTrainedModel:
    """
    Convert an m3BERT to the native encoder with equal hidden states at every layer. [`convert_to_m3bert`] gives the
    same m3BERT again. To truncate a model, load it with `output_layer`.

    Token types are zeros. The position embeddings of RoBERTa get zeros for the rows before the first position; its
    hidden states are equal only if padding is on the right. BERT's pooler, which m3BERT lacks, is `tanh` of the first
    token's hidden state, so that loading reports no missing weights. A native encoder returns hidden states of all
    dims, without an exit: [`output_map`] is the rest. Heads are kept for token classification and question answering,
    and contain that map. A native encoder reads no static table: the map of a layer that does is that of its hidden
    state alone.

    Args:
        model ([`M3BertModel`], [`M3BertForTokenClassification`] or [`M3BertForQuestionAnswering`]): A post-norm
            m3BERT.
        model_type (`str`, *optional*): Model type of the result: `"bert"`, `"roberta"`, `"xlm-roberta"`,
            `"camembert"`, `"data2vec-text"`, `"electra"` or `"distilbert"`. Default: that of the encoder that the
            model was converted from, or else `"bert"`.

    Returns:
        [`~transformers.PreTrainedModel`]: a copy with the same dtype, device and mode (training or evaluation).

    Raises:
        ValueError: if the model has no native equivalent. The message gives the reason.
    """
    model_type = model_type or model.config.native_model_type or "bert"
    refuse_without_native(model, model_type)
    auto_class, head = NATIVE_CLASSES[type(model).__name__]
    native = auto_class.from_config(native_config(model.config, model_type))
    native = native.to(device=model.device, dtype=model.dtype)
    source, encoder = model.base_model, native.base_model
    with torch.no_grad():
        encoder.load_state_dict(native_weights(source.state_dict(), native.config) | identity_pooler(encoder))
        if head is not None:
            getattr(native, head).load_state_dict(native_head(getattr(model, head), source))
    return native.train(model.training)


def refuse_without_native(model: PreTrainedModel, model_type: str = "bert") -> None:
    """Raise a ValueError with the reason if no encoder of a native model type equals an m3BERT."""
    name = type(model).__name__
    if name in OTHER_HEADS:
        raise ValueError(
            f"{name} has no native equivalent: {OTHER_HEADS[name]}. Load it with remote code, or export its encoder."
        )
    layer = model.config.resolve_granularity()[0]
    if layer in Elasticity.of(model.config).table:
        if layer == 0:
            raise ValueError(
                f"{name} has no native equivalent: its layer 0 is a static table. Export that instead: "
                "`m3bert export --format static`."
            )
        if name != "M3BertModel":
            raise ValueError(
                f"{name} has no native equivalent: its head reads the static table. Load it with remote code, or "
                "export its encoder."
            )
    if model_type not in CONVERTIBLE:
        raise ValueError(f"model_type={model_type!r} is unknown; legal values: {', '.join(CONVERTIBLE)}.")
    reason = without_native(model.config)
    if reason is None and model_type == "distilbert" and model.config.norm_eps != DISTILBERT_EPS:
        reason = f"DistilBERT's norm_eps is {DISTILBERT_EPS}, not {model.config.norm_eps}"
    if reason is None and model_type in OFFSET_POSITIONS and model.config.pad_token_id is None:
        reason = f"its config has no pad_token_id, after which the positions of {model_type} begin"
    if reason is None and getattr(model.config, "quantization_config", None) is not None:
        reason = "its weights are quantised"
    if reason is not None:
        raise ValueError(f"{name} has no native equivalent: {reason}. Export it to ONNX instead: `m3bert export`.")


def without_native(config: M3BertConfig) -> str | None:
    """Why no native encoder has this architecture; `None` if one has."""
    if config.norm_position != "post":
        return "it is pre-norm, and BERT is post-norm"
    if config.norm_type != "layernorm":
        return "its norm is RMSNorm, and BERT's is LayerNorm"
    if config.mlp_gated:
        return "its feed-forward layers are gated"
    if config.position_embedding_type != "absolute":
        return "its positions are rotary, and BERT's are absolute"
    return None


def native_config(config: M3BertConfig, model_type: str) -> PreTrainedConfig:
    """
    The config of the native encoder of an m3BERT that [`refuse_without_native`] accepts. BERT has one dropout for
    embeddings and layers: that of the layers is taken.

    Args:
        config ([`M3BertConfig`]): Config of the m3BERT.
        model_type (`str`): Model type of the native encoder.
    """
    sizes: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
    }
    if model_type == "distilbert":
        sizes = {
            "dim": config.hidden_size,
            "n_layers": config.num_hidden_layers,
            "n_heads": config.num_attention_heads,
            "hidden_dim": config.intermediate_size,
            "activation": config.hidden_act,
            "dropout": config.hidden_dropout,
            "attention_dropout": config.attention_dropout,
        }
    else:
        sizes |= {
            "intermediate_size": config.intermediate_size,
            "hidden_act": config.hidden_act,
            "hidden_dropout_prob": config.hidden_dropout,
            "attention_probs_dropout_prob": config.attention_dropout,
            "layer_norm_eps": config.norm_eps,
            # BERT's tokenizer gives the second text of a pair the type 1.
            "type_vocab_size": 1 if model_type in OFFSET_POSITIONS else 2,
        }
    if model_type == "electra":
        sizes["embedding_size"] = config.hidden_size
    offset = (config.pad_token_id or 0) + 1 if model_type in OFFSET_POSITIONS else 0
    # Servers accept a request for fewer dims only if the config lists them.
    served = (
        {"is_matryoshka": True, "matryoshka_dimensions": config.matryoshka_dimensions} if config.is_matryoshka else {}
    )
    return AutoConfig.for_model(
        model_type,
        **sizes,
        **served,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings + offset,
        initializer_range=config.initializer_range,
        classifier_dropout=config.classifier_dropout,
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        tie_word_embeddings=config.tie_word_embeddings,
        id2label=config.id2label,
        label2id=config.label2id,
        problem_type=config.problem_type,
        name_or_path=config.converted_from or config.name_or_path,  # what the result is converted from again
    )


def native_weights(source: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """
    Map the tensors of an m3BERT to those of a native encoder.

    Args:
        source (`dict[str, torch.Tensor]`): State dict of an [`M3BertModel`].
        config ([`~transformers.PreTrainedConfig`]): Config of the native encoder.

    Returns:
        `dict[str, torch.Tensor]`: state dict of the native encoder, without a pooler. Biases that m3BERT lacks
        are 0.
    """
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


def output_map(model: M3BertModel) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """
    What an m3BERT does to the hidden state of its last layer: the exit, if the layer has one, and truncation to the
    output dim. Pooling by mean or by position commutes with it. The exit of a layer that reads the static table is the
    map of its hidden state alone.

    Args:
        model ([`M3BertModel`]): The encoder.

    Returns:
        `tuple`: weight of shape `(dim, hidden_size)` and bias of shape `(dim,)`, or `None` in its place if there is no
        exit. `None` if the hidden states are returned as they are.
    """
    layer, dim = model.config.resolve_granularity()
    width, like = model.config.hidden_size, model.embed_tokens.weight
    if str(layer) in model.elastic.exits:
        tensors = model.elastic.exits[str(layer)].state_dict()
        return tensors["weight"][:dim], tensors["bias"][:dim]
    if dim < width:
        return torch.eye(dim, width, dtype=like.dtype, device=like.device), None
    return None


def native_head(head: nn.Linear, encoder: M3BertModel) -> dict[str, torch.Tensor]:
    """State dict of a native head, which reads the hidden state of all dims: m3BERT's head after [`output_map`]."""
    found = output_map(encoder)
    if found is None:
        return {"weight": head.weight, "bias": head.bias}
    weight, bias = found
    kernel = head.weight[:, : len(weight)]
    return {"weight": kernel @ weight, "bias": head.bias if bias is None else head.bias + kernel @ bias}
