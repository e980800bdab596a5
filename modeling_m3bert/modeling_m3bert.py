"""m3BERT: a bidirectional encoder whose output can be any trained layer and any trained prefix of its dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from .configuration_m3bert import M3BertConfig
from .loading_elastic import Loading
from .modeling_elastic import ElasticMixin, with_size
from .parts_elastic import texts_of_tokens


try:
    from transformers.utils.output_capturing import capture_outputs
except ImportError:  # its name in transformers 5.0 and 5.1
    from transformers.utils.generic import check_model_inputs as capture_outputs


def make_norm(config: M3BertConfig) -> nn.Module:
    norm_class = nn.RMSNorm if config.norm_type == "rmsnorm" else nn.LayerNorm
    return norm_class(config.hidden_size, eps=config.norm_eps)


class NestedLinear(nn.Linear):
    """A linear layer that also accepts a prefix of its input: for `d` dims it uses the first `d` weight columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight[:, : x.shape[-1]], self.bias)


class M3BertRotaryEmbedding(nn.Module):
    """Cosines and sines of the rotary position embeddings (`position_embedding_type="rope"`)."""

    inv_freq: torch.Tensor

    def __init__(self, config: M3BertConfig):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        rope_init = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = rope_init(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(config: M3BertConfig, **kwargs: Any) -> tuple[torch.Tensor, float]:
        """Return the inverse frequencies `theta^(-2i/head_dim)`, shape `(head_dim / 2,)`, and a scale of 1."""
        head_dim = config.hidden_size // config.num_attention_heads
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return config.rope_parameters["rope_theta"] ** -exponent, 1.0

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(x.device, torch.float)
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x `(batch, heads, tokens, head_dim)` by the angles of cos and sin `(batch, tokens, head_dim)`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = nn.functional.softmax(scores, dim=-1, dtype=precise).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class M3BertAttention(nn.Module):
    """Bidirectional multi-head attention. The library's attention interface selects the implementation."""

    def __init__(self, config: M3BertConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = False
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch_and_tokens = hidden_states.shape[:-1]
        # The number of heads is -1 because each rank holds only some of them under tensor parallelism.
        split = (*batch_and_tokens, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(split).transpose(1, 2)
        key = self.k_proj(hidden_states).view(split).transpose(1, 2)
        value = self.v_proj(hidden_states).view(split).transpose(1, 2)
        if position_embeddings is not None:
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)

        attention: Callable = eager_attention_forward
        if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
            attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attention)
        elif self.config._attn_implementation != "eager":  # transformers 5.0
            attention = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(*batch_and_tokens, -1).contiguous()), weights


class M3BertMLP(nn.Module):
    """Feed-forward layer, gated (SwiGLU if the activation is SiLU) or not."""

    def __init__(self, config: M3BertConfig):
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.mlp_gated else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(x)))
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class M3BertLayer(GradientCheckpointingLayer):
    """
    Attention and feed-forward, each with a residual connection and a norm. Pre-norm normalises the input of the
    sublayer, post-norm the sum of residual and output.
    """

    def __init__(self, config: M3BertConfig, layer_idx: int):
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.self_attn = M3BertAttention(config, layer_idx)
        self.mlp = M3BertMLP(config)
        self.input_layernorm = make_norm(config)
        self.post_attention_layernorm = make_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states) if self.pre_norm else hidden_states,
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = hidden_states + self.dropout(attended)
        if not self.pre_norm:
            hidden_states = self.input_layernorm(hidden_states)

        transformed = self.mlp(self.post_attention_layernorm(hidden_states) if self.pre_norm else hidden_states)
        hidden_states = hidden_states + self.dropout(transformed)
        return hidden_states if self.pre_norm else self.post_attention_layernorm(hidden_states)


class M3BertPreTrainedModel(PreTrainedModel):
    """Base class of the encoder and all heads: capabilities, and the settings of embedding models."""

    config: M3BertConfig
    config_class = M3BertConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["M3BertLayer"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": M3BertLayer, "attentions": M3BertAttention}
    # How the states become embeddings, in the encoder of a converted embedding model.
    embedding_settings: Any = None

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """As in the library. A converted embedding model also writes its pooling and prompts."""
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if self.embedding_settings is not None and is_main_process:
            self.embedding_settings.write(save_directory, width=self.config.resolve_granularity()[1])


class M3BertEncoder(M3BertPreTrainedModel):
    """The encoder that [`M3BertModel`] makes elastic: embeddings, layers, and the final norm of a pre-norm model."""

    # Loading the encoder from a checkpoint with a head should not report the head's weights.
    _keys_to_ignore_on_load_unexpected: set[str] | list[str] | None = [r"^lm_head\.", r"^classifier\."]

    def __init__(self, config: M3BertConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        if config.position_embedding_type == "absolute":
            self.pos_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        else:
            self.rotary_emb = M3BertRotaryEmbedding(config)
        self.input_norm = make_norm(config)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(M3BertLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = make_norm(config) if config.norm_position == "pre" else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        r"""
        Args:
            input_ids (`torch.LongTensor` of shape `(batch, tokens)`, *optional*): Token ids.
            attention_mask (`torch.Tensor` of shape `(batch, tokens)`, *optional*): 1 for real tokens, 0 for padding.
            position_ids (`torch.LongTensor` of shape `(batch, tokens)`, *optional*): Positions, counted from 0.
            inputs_embeds (`torch.Tensor` of shape `(batch, tokens, hidden_size)`, *optional*): Token embeddings,
                instead of `input_ids`.
            token_type_ids (`torch.LongTensor` of shape `(batch, tokens)`, *optional*): All zeros, as BERT's tokenizer
                returns for a single text. m3BERT has no token types.
            output_layer (`int`, *optional*): Output layer, the number of layers that run: the first ones, or those of
                a path. Defaults to the config's.
            output_dim (`int`, *optional*): Number of dimensions to return. Defaults to the config's.
            static_states (`torch.Tensor` of shape `(batch, 1 or tokens, hidden_size)`, *optional*): Result of
                [`~M3BertModel.static_states`], for an output layer that reads the static table. By default, it is
                computed from `input_ids`.
            kwargs: `output_hidden_states`, `output_attentions` (with eager attention) and `return_dict`. Flattened
                input (several texts in one row, without padding) needs `cu_seq_lens_q`, `cu_seq_lens_k`,
                `max_length_q` and `max_length_k`, as returned by [`~transformers.DataCollatorWithFlattening`].

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`]: `last_hidden_state` of shape `(batch, tokens,
            output_dim)`, after the exit of the output layer if it has one. In `hidden_states`, entry 0 is the input
            of the first layer, and entry l the raw output of the l-th layer that runs, each with all dims and before
            any exit; the last entry is normalised. Layer 0 runs no layer and has no hidden states.

        Raises:
            ValueError: if the granularity is not legal, the input is longer than `max_position_embeddings`, both or
                neither of `input_ids` and `inputs_embeds` are given, a token type is not 0, or the output layer reads
                the static table and there are neither `input_ids` nor `static_states`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
        if token_type_ids is not None and not torch.compiler.is_compiling() and token_type_ids.any():
            raise ValueError("m3BERT has no token types: token_type_ids must be all zeros or omitted.")
        inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states, position_embeddings = self.embed(inputs_embeds, position_ids)
        mask = self.make_attention_mask(hidden_states, attention_mask, kwargs.get("cu_seq_lens_q"))
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, attention_mask=mask, position_embeddings=position_embeddings, **kwargs
            )
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states))

    def embed(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """The input of the first layer, from token embeddings `(batch, tokens, hidden_size)` and positions `(batch,
        tokens)`, and the RoPE cosines and sines (`None` with absolute positions)."""
        tokens, absolute = inputs_embeds.shape[1], self.config.position_embedding_type == "absolute"
        if position_ids is None:
            if absolute and tokens > self.config.max_position_embeddings:
                raise ValueError(
                    f"The input has {tokens} tokens but the model has {self.config.max_position_embeddings} "
                    "positions: truncate it (tokenizer(..., truncation=True))."
                )
            position_ids = torch.arange(tokens, device=inputs_embeds.device).unsqueeze(0)
        if absolute:
            return self.dropout(self.input_norm(inputs_embeds + self.pos_embeddings(position_ids))), None
        return self.dropout(self.input_norm(inputs_embeds)), self.rotary_emb(inputs_embeds, position_ids)

    def make_attention_mask(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, boundaries: torch.Tensor | None
    ) -> Any:
        """The mask in the form that the attention implementation needs. `boundaries` are the cumulative lengths of the
        texts in a flattened row, whose tokens attend only within their own text."""
        same_text = None
        if boundaries is not None and "flash" not in self.config._attn_implementation:
            text = texts_of_tokens(boundaries, hidden_states.shape[1])

            def same_text(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                return text[query] == text[key]

        return create_bidirectional_mask(self.config, hidden_states, attention_mask, and_mask_function=same_text)


class M3BertModel(ElasticMixin, M3BertEncoder):
    """
    The elastic encoder. It is built with the layers of `config.output_layer` and returns hidden states of the
    requested granularity. Loaded at layer 0, it is the static table and nothing else.
    """

    forward = with_size(M3BertEncoder.forward)


class M3BertHead(ElasticMixin, M3BertPreTrainedModel):
    """Base class of the heads, which read the encoder's hidden state of the requested size."""

    def __init__(self, config: M3BertConfig, *, loading: Loading | None = None):
        super(ElasticMixin, self).__init__(config)  # the encoder is what is elastic
        self.model = M3BertModel(config, loading=loading)
        self.config = self.model.config  # with the layers of `output_layer`


class M3BertForMaskedLM(M3BertHead):
    """
    m3BERT with a masked-LM head. The logits of granularity (l, d) are `state_l[:d] @ W[:d, :] + b`; all granularities
    share W and b (m3BERT, section 2.1).
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: M3BertConfig, *, loading: Loading | None = None):
        super().__init__(config, loading=loading)
        self.lm_head = NestedLinear(self.config.hidden_size, self.config.vocab_size)
        self.refuse_table()
        self.post_init()

    def refuse_table(self, output_layer: int | None = None) -> None:
        """Raise a ValueError if the output layer is the static table, which has no hidden states of tokens."""
        if self.config.resolve_granularity(output_layer)[0] == 0:
            raise ValueError("Layer 0 is a static table here, which predicts no tokens: use an output_layer above 0.")

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.lm_head = new_embeddings

    def _get_resized_lm_head(self, old_lm_head: nn.Linear, *args: Any, **kwargs: Any) -> nn.Linear:
        resized = super()._get_resized_lm_head(old_lm_head, *args, **kwargs)
        if resized is not old_lm_head:
            # The library builds a plain `nn.Linear`, which does not accept a prefix of its input.
            resized.requires_grad_(old_lm_head.weight.requires_grad)
            old_lm_head.weight, old_lm_head.bias = resized.weight, resized.bias
            old_lm_head.out_features = resized.out_features
        return old_lm_head

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        output_layer: int | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        r"""
        Takes the arguments of [`M3BertModel`] and `labels` of shape `(batch, tokens)`: the token ids to predict, -100
        elsewhere.

        Returns:
            [`~transformers.modeling_outputs.MaskedLMOutput`]: logits of shape `(batch, tokens, vocab_size)`. Given
            labels and `config.sparse_prediction`, their shape is `(labelled tokens, vocab_size)`.

        Raises:
            ValueError: as [`M3BertModel`], or if layer 0, a static table, is to predict tokens.
        """
        self.refuse_table(output_layer)
        outputs = self.model(input_ids, attention_mask, output_layer=output_layer, return_dict=True, **kwargs)
        states = outputs.last_hidden_state
        if self.config.sparse_prediction and labels is not None:
            labelled = labels != -100
            states, labels = states[labelled], labels[labelled]
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class M3BertClassifier(M3BertHead):
    """Base class of the classification heads: encoder, dropout and a [`NestedLinear`] classifier."""

    def __init__(self, config: M3BertConfig, *, loading: Loading | None = None):
        super().__init__(config, loading=loading)
        self.num_labels = config.num_labels
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = NestedLinear(config.hidden_size, config.num_labels)
        self.post_init()

    def classify_texts(self, states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Logits `(batch, num_labels)` of the pooled hidden states `(batch, tokens, dim)` of each text. Without a
        mask, all tokens are real."""
        if self.config.classifier_pooling == "cls":
            first = 0 if attention_mask is None else attention_mask.to(torch.int8).argmax(dim=1)  # padding may be left
            pooled = states[torch.arange(len(states), device=states.device), first]
        elif attention_mask is None:
            pooled = states.mean(dim=1)
        else:
            weights = attention_mask.to(states.dtype).unsqueeze(-1)
            pooled = (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        return self.classifier(self.dropout(pooled))


class M3BertForSequenceClassification(M3BertClassifier):
    """m3BERT with a classifier of texts."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        r"""
        Takes the arguments of [`M3BertModel`] and `labels`: classes of shape `(batch,)`, or floats of shape `(batch,)`
        for regression and `(batch, num_labels)` for multi-label classification.

        Returns:
            [`~transformers.modeling_outputs.SequenceClassifierOutput`]: logits of shape `(batch, num_labels)`.
        """
        outputs = self.model(input_ids, attention_mask, return_dict=True, **kwargs)
        logits = self.classify_texts(outputs.last_hidden_state, attention_mask)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class M3BertForTokenClassification(M3BertClassifier):
    """m3BERT with a classifier of tokens."""

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        r"""
        Takes the arguments of [`M3BertModel`] and `labels` of shape `(batch, tokens)`: classes, or -100 for tokens
        that the loss ignores.

        Returns:
            [`~transformers.modeling_outputs.TokenClassifierOutput`]: logits of shape `(batch, tokens, num_labels)`.
        """
        outputs = self.model(input_ids, attention_mask, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = self.loss_function(logits, labels, self.config, **kwargs) if labels is not None else None
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


M3BertModel.register_for_auto_class("AutoModel")
M3BertForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
M3BertForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
M3BertForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
