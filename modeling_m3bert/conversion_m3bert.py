"""Exact conversion of BERT-family encoders: with post-norm, LayerNorm, GeLU and biases, m3BERT *is* BERT."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
from transformers import PreTrainedModel

from .configuration_m3bert import M3BertConfig
from .modeling_m3bert import M3BertModel


# Sublayers of one layer: name in m3BERT -> name in the family.
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
# Families whose positions count from pad_token_id + 1.
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert", "data2vec-text")
CONVERTIBLE = ("bert", *OFFSET_POSITIONS, "electra", "distilbert")
REASONS = {
    "modernbert": "it alternates local and global attention, and its first layer has no attention norm",
    "mpnet": "its attention adds a relative position bias",
    "deberta": "its attention is disentangled into content and relative position",
    "deberta-v2": "its attention is disentangled into content and relative position",
    "albert": "its layers share their weights and its embeddings are factorised",
    "xlm-roberta-xl": "its pre-norm layers have biases in places that m3BERT's do not",
}


def convert_to_m3bert(model: PreTrainedModel) -> M3BertModel:
    """
    Turn a BERT-family encoder into an elastic m3BERT with equal states at every layer.

    Token type 0 folds into the token embeddings; RoBERTa's position offset becomes a slice of its position
    embeddings. Positions count from the first token, so RoBERTa's states are equal for text that is padded on the
    right. A pooler and a head are left out: they are not part of the encoder. The result has empty
    `matryoshka_layers` and `matryoshka_dims`: every granularity can be read and none was trained for it. The name of
    the source is kept in `config.name_or_path`.

    Args:
        model ([`~transformers.PreTrainedModel`]): BERT, RoBERTa, XLM-R, CamemBERT, Data2VecText, ELECTRA or
            DistilBERT, with or without a head.

    Returns:
        [`M3BertModel`]: a copy, in the same dtype, on the same device, in the same mode (train or eval).

    Raises:
        ValueError: if the encoder cannot be represented exactly; says why.
    """
    encoder = model.base_model
    refuse_unrepresentable(encoder.config)
    converted = M3BertModel(m3bert_config(encoder.config))
    with torch.no_grad():
        weights = m3bert_weights(encoder.state_dict(), encoder.config)
        converted = converted.to(device=encoder.device, dtype=encoder.dtype)
        converted.load_state_dict(weights)
    return converted.train(model.training)


def refuse_unrepresentable(config: Any) -> None:
    """Raise a ValueError with the reason if an encoder of this config has no exact m3BERT form."""
    values = {"position_embedding_type": "absolute", "is_decoder": False, **config.to_dict()}
    reason = None
    if config.model_type not in CONVERTIBLE:
        reason = REASONS.get(config.model_type, f"the family {config.model_type!r} is not known to be of BERT's form")
    elif values["is_decoder"]:
        reason = "it is a decoder (is_decoder=True), and m3BERT's attention is bidirectional"
    elif values["position_embedding_type"] not in (None, "absolute"):
        reason = f"its positions are {values['position_embedding_type']!r}, not absolute"
    elif values.get("sinusoidal_pos_embds"):
        reason = "its positions are fixed sinusoids"
    elif values.get("embedding_size", config.hidden_size) != config.hidden_size:
        reason = "its embeddings are projected to the width of the layers"
    if reason is not None:
        raise ValueError(
            f"{type(config).__name__} cannot be converted exactly: {reason}. Convertible: {', '.join(CONVERTIBLE)}. "
            "It can still be trained as it is: trainers/ takes any encoder."
        )


def m3bert_config(config: Any) -> M3BertConfig:
    """The m3BERT config of an encoder that [`refuse_unrepresentable`] let pass."""
    if config.model_type == "distilbert":
        family = {
            "intermediate_size": config.hidden_dim,
            "hidden_act": config.activation,
            "norm_eps": 1e-12,  # fixed in DistilBERT's code
            "embedding_dropout": config.dropout,
            "hidden_dropout": config.dropout,
            "attention_dropout": config.attention_dropout,
        }
    else:
        family = {
            "intermediate_size": config.intermediate_size,
            "hidden_act": config.hidden_act,
            "norm_eps": config.layer_norm_eps,
            "embedding_dropout": config.hidden_dropout_prob,
            "hidden_dropout": config.hidden_dropout_prob,
            "attention_dropout": config.attention_probs_dropout_prob,
        }
    return M3BertConfig(
        **family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings - position_offset(config),
        initializer_range=config.initializer_range,
        mlp_gated=False,
        norm_type="layernorm",
        norm_position="post",
        attention_bias=True,
        mlp_bias=True,
        matryoshka_layers=[],
        matryoshka_dims=[],
        bos_token_id=config.bos_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        tie_word_embeddings=config.tie_word_embeddings,
        name_or_path=config.name_or_path,
        converted_from=hub_id(config.name_or_path),
    )


def m3bert_weights(source: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """The tensors of an m3BERT, from those of an encoder (`source`, without the prefix of a head)."""
    distilbert = config.model_type == "distilbert"
    layer_names, layer_path = (DISTILBERT_LAYER, "transformer.layer") if distilbert else (BERT_LAYER, "encoder.layer")
    tokens = source["embeddings.word_embeddings.weight"]
    if "embeddings.token_type_embeddings.weight" in source:
        # BERT adds the type to the token before the position. Folding it into the tokens keeps that order, and with it
        # the last bit; a tied MLM head sees all its logits move by the same amount, which a softmax does not.
        tokens = tokens + source["embeddings.token_type_embeddings.weight"][0]
    weights = {
        "embed_tokens.weight": tokens,
        "pos_embeddings.weight": source["embeddings.position_embeddings.weight"][position_offset(config) :],
        "input_norm.weight": source["embeddings.LayerNorm.weight"],
        "input_norm.bias": source["embeddings.LayerNorm.bias"],
    }
    for index in range(config.num_hidden_layers):
        for name, family_name in layer_names.items():
            for kind in ("weight", "bias"):
                weights[f"layers.{index}.{name}.{kind}"] = source[f"{layer_path}.{index}.{family_name}.{kind}"]
    return weights


def hub_id(name: str | None) -> str | None:
    """A name that a model was loaded by, if it is an id on the Hub: a folder of this machine tells nobody anything."""
    if not name or os.path.exists(name) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    return name


def position_offset(config: Any) -> int:
    """Rows of the position table before the first position."""
    return config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
