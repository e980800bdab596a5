"""Exact conversion of BERT-family encoders: with post-norm, LayerNorm, GELU and biases, m3BERT is BERT."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from ..modeling.configuration_m3bert import M3BertConfig
from ..modeling.modeling_m3bert import M3BertModel, M3BertPreTrainedModel
from .settings import EmbeddingSettings, hub_id, safetensors_only


# Names in m3BERT -> names in the source model: modules of one layer, and entries of the config.
BERT_LAYER = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "input_layernorm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "post_attention_layernorm": "output.LayerNorm",
}
DISTILBERT_LAYER = {
    "self_attn.q_proj": "attention.q_lin",
    "self_attn.k_proj": "attention.k_lin",
    "self_attn.v_proj": "attention.v_lin",
    "self_attn.o_proj": "attention.out_lin",
    "input_layernorm": "sa_layer_norm",
    "mlp.up_proj": "ffn.lin1",
    "mlp.down_proj": "ffn.lin2",
    "post_attention_layernorm": "output_layer_norm",
}
COMMON_CONFIG = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "initializer_range", "bos_token_id",
    "pad_token_id", "eos_token_id", "tie_word_embeddings",
)  # fmt: skip
BERT_CONFIG = {
    "intermediate_size": "intermediate_size",
    "hidden_act": "hidden_act",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm_eps": "layer_norm_eps",
}
DISTILBERT_CONFIG = {
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout": "dropout",
    "attention_dropout": "attention_dropout",
}
DISTILBERT_EPS = 1e-12  # of its norms, hard-coded
# Model types whose first position is pad_token_id + 1.
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "data2vec-text")
CONVERTIBLE = ("bert", *OFFSET_POSITIONS, "electra", "distilbert")


def convert_to_m3bert(source: Any, *, encoder_only: bool = False, layers: Sequence[int] | None = None) -> M3BertModel:
    """
    Convert a BERT-family encoder to an elastic m3BERT whose hidden states are equal at every layer.

    The embedding of token type 0 is added to the token embeddings. RoBERTa's position embeddings lose the rows before
    the first position; since m3BERT counts positions from the first token, RoBERTa's hidden states are equal only if
    padding is on the right. Poolers and heads are dropped. No granularity is trained, so every one is legal. What
    makes an embedding model of the source ([`EmbeddingSettings`]) is written when the result is saved; save the
    source's tokenizer beside it.

    Args:
        source (`str`, [`~transformers.PreTrainedModel`] or [`~sentence_transformers.SentenceTransformer`]): BERT,
            RoBERTa, XLM-R, CamemBERT, Data2VecText, ELECTRA or DistilBERT: a folder, a Hub id, or a model with or
            without a head.
        encoder_only (`bool`, *optional*, defaults to `False`): Leave out what makes an embedding model of it.
        layers (`Sequence[int]`, *optional*): Make a student of these layers alone ([`take_layers`]). Default: all.

    Returns:
        [`M3BertModel`]: a copy with the same dtype, device and mode (training or evaluation).

    Raises:
        ValueError: if m3BERT cannot represent the encoder exactly, it was published with modules that
            [`EmbeddingSettings`] does not know, or it lacks one of the layers. The message gives the reason.
    """
    if isinstance(source, str | os.PathLike):
        source = AutoModel.from_pretrained(source, **safetensors_only(source))
    model, settings = source, None
    if not isinstance(source, PreTrainedModel):
        model = source.transformers_model
        settings = None if encoder_only else EmbeddingSettings.of_sentence_transformer(source)
    elif not encoder_only:
        settings = EmbeddingSettings.of(model.base_model)
    encoder = model.base_model
    refuse_unrepresentable(encoder.config)
    converted = M3BertModel(m3bert_config(encoder.config)).to(device=encoder.device, dtype=encoder.dtype)
    with torch.no_grad():
        converted.load_state_dict(m3bert_weights(encoder.state_dict(), encoder.config))
    if layers is not None:
        take_layers(converted, layers)
    if settings is not None:
        limit = converted.config.max_position_embeddings
        converted.embedding_settings = replace(settings, max_length=min(settings.max_length or limit, limit))
    return converted.train(model.training)


def take_layers(model: M3BertPreTrainedModel, layers: Sequence[int]) -> None:
    """
    Reduce an m3BERT, with or without a head, to a student of some of its layers, counted from 1 and ascending, which
    run one after another. The model is changed in place. It loses exits, paths, static table and `matryoshka_layers`,
    which belong to hidden states of the whole model. Raises a ValueError if the model lacks one of the layers.
    """
    encoder, config = model.base_model, model.config
    depth = config.num_hidden_layers
    if not layers or sorted(set(layers)) != [*layers] or not 1 <= layers[0] <= layers[-1] <= depth:
        raise ValueError(f"layers={[*layers]} must be ascending and within 1..{depth}.")
    encoder.drop_depths(config.legal_layers)
    config.elastic = None
    encoder.layers = nn.ModuleList(encoder.layers[layer - 1] for layer in layers)
    origin = config.source_layers or range(1, depth + 1)
    config.source_layers = [origin[layer - 1] for layer in layers]
    config.num_hidden_layers, config.matryoshka_layers, config.output_layer = len(layers), [], None


def refuse_unrepresentable(config: PretrainedConfig) -> None:
    """Raise a ValueError with the reason if m3BERT cannot represent an encoder with this config exactly."""
    positions = getattr(config, "position_embedding_type", None) or "absolute"
    reasons = {
        f"model type {config.model_type!r} is no BERT, or one with other embeddings or attention": (
            config.model_type not in CONVERTIBLE
        ),
        "it is a decoder (is_decoder=True), but m3BERT's attention is bidirectional": (
            getattr(config, "is_decoder", False)
        ),
        f"its positions are {positions!r}, not absolute": positions != "absolute",
        "its positions are fixed sinusoids": getattr(config, "sinusoidal_pos_embds", False),
        "its embeddings are projected to the hidden size of the layers": (
            getattr(config, "embedding_size", config.hidden_size) != config.hidden_size
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(
                f"{type(config).__name__} cannot be converted exactly: {reason}. Convertible: "
                f"{', '.join(CONVERTIBLE)}. `m3bert fit` makes any encoder elastic as it is."
            )


def m3bert_config(config: PretrainedConfig) -> M3BertConfig:
    """Return the m3BERT config of an encoder that [`refuse_unrepresentable`] accepts."""
    distilbert = config.model_type == "distilbert"
    names = DISTILBERT_CONFIG if distilbert else BERT_CONFIG
    values = {name: getattr(config, name) for name in COMMON_CONFIG}
    values |= {ours: getattr(config, theirs) for ours, theirs in names.items()}
    if distilbert:
        values["norm_eps"] = DISTILBERT_EPS
    return M3BertConfig(
        **values,
        embedding_dropout=values["hidden_dropout"],
        max_position_embeddings=config.max_position_embeddings - position_offset(config),
        mlp_gated=False,
        norm_type="layernorm",
        norm_position="post",
        attention_bias=True,
        mlp_bias=True,
        matryoshka_layers=[],
        matryoshka_dims=[],
        name_or_path=config.name_or_path,
        converted_from=hub_id(config.name_or_path),
        native_model_type=config.model_type,
    )


def m3bert_weights(source: dict[str, torch.Tensor], config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """State dict of an [`M3BertModel`] from that of an encoder with this config."""
    tokens = source["embeddings.word_embeddings.weight"]
    if "embeddings.token_type_embeddings.weight" in source:
        # BERT adds the token type before the position. Adding it to the token embeddings keeps this order, so the sums
        # are bit-identical. With tied embeddings all MLM logits shift by the same amount, which softmax ignores.
        tokens = tokens + source["embeddings.token_type_embeddings.weight"][0]
    weights = {
        "embed_tokens.weight": tokens,
        "pos_embeddings.weight": source["embeddings.position_embeddings.weight"][position_offset(config) :],
        "input_norm.weight": source["embeddings.LayerNorm.weight"],
        "input_norm.bias": source["embeddings.LayerNorm.bias"],
    }
    return weights | {ours: source[theirs] for ours, theirs in layer_tensors(config).items()}


def layer_tensors(config: PretrainedConfig) -> dict[str, str]:
    """Name of each tensor of the layers in m3BERT -> its name in a BERT-family encoder of this config."""
    distilbert = config.model_type == "distilbert"
    names, path = (DISTILBERT_LAYER, "transformer.layer") if distilbert else (BERT_LAYER, "encoder.layer")
    return {
        f"layers.{index}.{ours}.{kind}": f"{path}.{index}.{theirs}.{kind}"
        for index in range(config.num_hidden_layers)
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    }


def position_offset(config: PretrainedConfig) -> int:
    """Return the number of unused rows at the start of the position embeddings."""
    return config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
