"""m3BERT: a bidirectional encoder whose output can be any trained layer and any trained prefix of its dimensions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils.generic import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .configuration_m3bert import M3BertConfig


def make_norm(config: M3BertConfig) -> nn.Module:
    norm_class = nn.RMSNorm if config.norm_type == "rmsnorm" else nn.LayerNorm
    return norm_class(config.hidden_size, eps=config.norm_eps)


class NestedLinear(nn.Linear):
    """A linear layer that also accepts a prefix of its input: for `d` dims it uses the first `d` weight columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight[:, : x.shape[-1]], self.bias)


class M3BertExit(nn.Linear):
    """
    The exit of a layer: an affine map from the layer's state to the embedding space of the last layer. It starts as
    the identity. `d` output dims use the first `d` rows of the weight.
    """

    def __init__(self, config: M3BertConfig):
        super().__init__(config.hidden_size, config.hidden_size)

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        return nn.functional.linear(x, self.weight[:dim], self.bias[:dim])


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
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(
        query.dtype
    )
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

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
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


def _list_first(items: list[str], count: int = 3) -> str:
    more = [f"and {len(items) - count} more"] if len(items) > count else []
    return ", ".join(items[:count] + more)


class M3BertPreTrainedModel(PreTrainedModel):
    """Base class of the encoder and all heads: loading, saving and capabilities."""

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

    def __init__(self, config: M3BertConfig, *args: Any, **kwargs: Any):
        super().__init__(config.cut(), *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, M3BertExit):
            init.eye_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """
        Load a checkpoint as [`~transformers.PreTrainedModel.from_pretrained`] does, from safetensors only.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Hub id or folder.
            args: Passed to the base class.
            kwargs: Passed to the base class. Config arguments are accepted as usual: `output_layer` limits the layers
                that are built and read from the file, `output_dim` the dimensions that are returned.

        Returns:
            The model in evaluation mode; with `output_loading_info=True`, the model and the loading info.

        Raises:
            ValueError: if a granularity is not legal, the weights are unreadable, an encoder tensor is missing, or a
                tensor has another shape than the config specifies. With `ignore_mismatched_sizes=True` a tensor of
                another shape is newly initialised, with the library's warning, as a missing head always is.
        """
        return_info = kwargs.pop("output_loading_info", False)
        ignore_mismatched_sizes = kwargs.pop("ignore_mismatched_sizes", False)
        kwargs["use_safetensors"] = True
        chosen = {name: kwargs[name] for name in ("output_layer", "output_dim") if name in kwargs}
        if chosen and isinstance(kwargs.get("config"), PreTrainedConfig):
            # Given a config object, as from sentence-transformers, the library passes these to `__init__`. The config
            # class may come from another copy of this code, so the check is for the library's base class.
            config = copy.deepcopy(kwargs["config"])
            config.update(chosen)
            kwargs = {name: value for name, value in kwargs.items() if name not in chosen} | {"config": config}
        try:
            # The library's error for mismatched shapes names no tensor, so the check follows below.
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(f"The weights in {pretrained_model_name_or_path} cannot be read: {error}.") from error
        encoder = {
            name for name, _ in model.named_parameters() if model.base_model is model or name.startswith("model.")
        }
        missing = sorted(encoder & {*info["missing_keys"]})
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} is incomplete or of another architecture. Missing encoder tensors: "
                f"{_list_first(missing)}."
            )
        if info["mismatched_keys"] and not ignore_mismatched_sizes:
            mismatched = [
                f"{name} {tuple(stored)} instead of {tuple(expected)}"
                for name, stored, expected in sorted(info["mismatched_keys"])
            ]
            raise ValueError(
                f"{pretrained_model_name_or_path} has tensors whose shape differs from the config's: "
                f"{_list_first(mismatched)}. Pass ignore_mismatched_sizes=True to initialise them randomly."
            )
        return (model, info) if return_info else model


class M3BertModel(M3BertPreTrainedModel):
    """The encoder. It is built with `config.output_layer` layers and returns states of the requested granularity."""

    # Loading the encoder from a checkpoint with a head should not report the head's weights.
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^classifier\.", r"^qa_outputs\."]

    def __init__(self, config: M3BertConfig):
        super().__init__(config)
        config = self.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        if config.position_embedding_type == "absolute":
            self.pos_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        else:
            self.rotary_emb = M3BertRotaryEmbedding(config)
        self.input_norm = make_norm(config)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList([M3BertLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = make_norm(config) if config.norm_position == "pre" else nn.Identity()
        self.exits = nn.ModuleDict({str(layer): M3BertExit(config) for layer in config.exit_layers})
        self.gradient_checkpointing = False
        if config.output_layer is not None:
            # The caller limited the depth, so loading should not report deeper layers and other exits in the
            # checkpoint.
            parts = {"layers": range(config.num_hidden_layers), "exits": config.exit_layers}
            left_out = [rf"^(model\.)?{part}\.(?!({'|'.join(map(str, built))})\.)" for part, built in parts.items()]
            self._keys_to_ignore_on_load_unexpected = [*self._keys_to_ignore_on_load_unexpected, *left_out]
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        output_layer: int | None = None,
        output_dim: int | None = None,
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
            output_layer (`int`, *optional*): Output layer; deeper layers do not run. Defaults to the config's.
            output_dim (`int`, *optional*): Number of dimensions to return. Defaults to the config's.
            kwargs: `output_hidden_states`, `output_attentions` (with eager attention) and `return_dict`. Flattened
                input (several texts in one row, without padding) needs `cu_seq_lens_q`, `cu_seq_lens_k`,
                `max_length_q` and `max_length_k`, as returned by [`~transformers.DataCollatorWithFlattening`].

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`]: `last_hidden_state` of shape `(batch, tokens,
            output_dim)`, after the exit of the output layer if it has one. In `hidden_states`, entry 0 is the
            embeddings after `input_norm` and entry l the raw output of layer l, all at full width and before any
            exit; the last entry is normalised.

        Raises:
            ValueError: if the granularity is not legal, the input is longer than `max_position_embeddings`, both or
                neither of `input_ids` and `inputs_embeds` are given, or a token type is not 0.
        """
        depth, dim = self.config.resolve_granularity(output_layer, output_dim)
        outputs = self.run_layers(
            depth, input_ids, attention_mask, position_ids, inputs_embeds, token_type_ids, return_dict=True, **kwargs
        )
        outputs.last_hidden_state = self.exit_state(depth, outputs.last_hidden_state, dim)
        return outputs

    def exit_state(self, layer: int, state: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        """
        Apply the exit of a layer and truncate the result. A layer without an exit is only truncated.

        Args:
            layer (`int`): Layer of the state.
            state (`torch.Tensor` of shape `(..., hidden_size)`): Output of the layer, normalised in a pre-norm model.
            dim (`int`, *optional*): Number of dimensions to compute. `None` means all.

        Returns:
            `torch.Tensor` of shape `(..., dim)`.
        """
        for name, layer_exit in self.exits.items():
            if int(name) == layer:  # torch.compile cannot make a name out of a layer that varies between calls
                return layer_exit(state, dim)
        return state[..., :dim]

    def set_exits(self, exits: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """
        Replace all exits of the model.

        Args:
            exits (`Mapping[int, tuple[torch.Tensor, torch.Tensor]]`): Layer -> weight `(hidden_size, hidden_size)` and
                bias `(hidden_size,)`, which map a state x to `weight @ x + bias`.

        Raises:
            ValueError: if a layer is outside the model.
        """
        config = copy.deepcopy(self.config)
        config.declare_exits(exits)
        config.validate_architecture()
        like = self.embed_tokens.weight
        self.config.declare_exits(exits)
        self.exits = nn.ModuleDict({str(layer): M3BertExit(self.config) for layer in self.config.exit_layers})
        for layer, (weight, bias) in exits.items():
            self.exits[str(layer)].load_state_dict({"weight": weight, "bias": bias})
        self.exits.to(device=like.device, dtype=like.dtype)

    def drop_exits(self, layers: Iterable[int]) -> None:
        """Remove the exits of some layers."""
        for layer in layers:
            del self.exits[str(layer)]
        self.config.declare_exits(map(int, self.exits))

    @capture_outputs
    def run_layers(
        self,
        depth: int,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.LongTensor | None,
        inputs_embeds: torch.Tensor | None,
        token_type_ids: torch.LongTensor | None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """
        Run the first `depth` layers; the arguments are those of `forward`.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`]: the raw state of the last of these layers as
            `last_hidden_state`, of shape `(batch, tokens, hidden_size)`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
        if token_type_ids is not None and not torch.compiler.is_compiling() and token_type_ids.any():
            raise ValueError("m3BERT has no token types: token_type_ids must be all zeros or omitted.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        hidden_states, position_embeddings = self.embed(inputs_embeds, position_ids)
        mask = self.make_attention_mask(hidden_states, attention_mask, kwargs.get("cu_seq_lens_q"))
        for layer in self.layers[:depth]:
            hidden_states = layer(
                hidden_states, attention_mask=mask, position_embeddings=position_embeddings, **kwargs
            )
        # The embeddings are normalised already.
        return BaseModelOutput(last_hidden_state=self.norm(hidden_states) if depth else hidden_states)

    def embed(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """
        Add absolute positions to the token embeddings and normalise them.

        Args:
            inputs_embeds (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Token embeddings.
            position_ids (`torch.Tensor` of shape `(batch, tokens)`, *optional*): Positions.

        Returns:
            `tuple`: the input of the first layer, and the RoPE cosines and sines (`None` with absolute positions).

        Raises:
            ValueError: if positions are absolute and the input is longer than `max_position_embeddings`.
        """
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
        """
        Build the mask in the form that the attention implementation needs.

        Args:
            hidden_states (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Input of the first layer.
            attention_mask (`torch.Tensor` of shape `(batch, tokens)`, *optional*): 1 for real tokens, 0 for padding.
            boundaries (`torch.Tensor` of shape `(texts + 1,)`, *optional*): Cumulative lengths of the texts in a
                flattened row. Tokens attend only within their own text.

        Returns:
            The mask, or `None` if the implementation needs none.
        """
        same_text = None
        if boundaries is not None and "flash" not in self.config._attn_implementation:
            index = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            text = torch.searchsorted(boundaries[1:].contiguous(), index, right=True)

            def same_text(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                return text[query] == text[key]

        return create_bidirectional_mask(self.config, hidden_states, attention_mask, and_mask_function=same_text)


class M3BertForMaskedLM(M3BertPreTrainedModel):
    """
    m3BERT with a masked-LM head. The logits of granularity (l, d) are `state_l[:d] @ W[:d, :] + b`; all granularities
    share W and b (m3BERT, section 2.1).
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: M3BertConfig):
        super().__init__(config)
        self.model = M3BertModel(self.config)
        self.lm_head = NestedLinear(self.config.hidden_size, self.config.vocab_size)
        self.post_init()

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
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        output_layer: int | None = None,
        output_dim: int | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        r"""
        Takes the arguments of [`M3BertModel`] and `labels` of shape `(batch, tokens)`: the token ids to predict, -100
        elsewhere.

        Returns:
            [`~transformers.modeling_outputs.MaskedLMOutput`]: logits of shape `(batch, tokens, vocab_size)`. Given
            labels and `config.sparse_prediction`, their shape is `(labelled tokens, vocab_size)`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            output_layer=output_layer,
            output_dim=output_dim,
            return_dict=True,
            **kwargs,
        )
        states = outputs.last_hidden_state
        if self.config.sparse_prediction and labels is not None:
            labelled = labels != -100
            states, labels = states[labelled], labels[labelled]  # type: ignore[assignment]  # still integers
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class M3BertClassifier(M3BertPreTrainedModel):
    """Base class of the classification heads: encoder, dropout and a [`NestedLinear`] classifier."""

    def __init__(self, config: M3BertConfig, num_outputs: int):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = M3BertModel(self.config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = NestedLinear(config.hidden_size, num_outputs)
        self.post_init()

    def classify_texts(self, states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """
        Pool the states into one vector per text and classify it.

        Args:
            states (`torch.Tensor` of shape `(batch, tokens, dim)`): Output of the encoder.
            attention_mask (`torch.Tensor` of shape `(batch, tokens)`, *optional*): 1 for real tokens, 0 for padding;
                without it, all tokens are real.

        Returns:
            `torch.Tensor` of shape `(batch, num_outputs)`: logits.
        """
        if self.config.classifier_pooling == "cls":
            pooled = states[:, 0]
        elif attention_mask is None:
            pooled = states.mean(dim=1)
        else:
            weights = attention_mask.to(states.dtype).unsqueeze(-1)
            pooled = (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        return self.classifier(self.dropout(pooled))


class M3BertForSequenceClassification(M3BertClassifier):
    """m3BERT with a classifier of texts."""

    def __init__(self, config: M3BertConfig):
        super().__init__(config, config.num_labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        output_layer: int | None = None,
        output_dim: int | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        r"""
        Takes the arguments of [`M3BertModel`] and `labels`: classes of shape `(batch,)`, or floats of shape `(batch,)`
        for regression and `(batch, num_labels)` for multi-label classification.

        Returns:
            [`~transformers.modeling_outputs.SequenceClassifierOutput`]: logits of shape `(batch, num_labels)`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            output_layer=output_layer,
            output_dim=output_dim,
            return_dict=True,
            **kwargs,
        )
        logits = self.classify_texts(outputs.last_hidden_state, attention_mask)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config, **kwargs)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class M3BertForTokenClassification(M3BertClassifier):
    """m3BERT with a classifier of tokens."""

    def __init__(self, config: M3BertConfig):
        super().__init__(config, config.num_labels)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        output_layer: int | None = None,
        output_dim: int | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        r"""
        Takes the arguments of [`M3BertModel`] and `labels` of shape `(batch, tokens)`: classes, or -100 for tokens
        that the loss ignores.

        Returns:
            [`~transformers.modeling_outputs.TokenClassifierOutput`]: logits of shape `(batch, tokens, num_labels)`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            output_layer=output_layer,
            output_dim=output_dim,
            return_dict=True,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = self.loss_function(logits, labels, self.config, **kwargs) if labels is not None else None
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class M3BertForQuestionAnswering(M3BertPreTrainedModel):
    """m3BERT with a head that scores each token as the start and the end of an answer."""

    def __init__(self, config: M3BertConfig):
        super().__init__(config)
        self.model = M3BertModel(self.config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.qa_outputs = NestedLinear(config.hidden_size, 2)  # peft trains and saves modules of this name
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        output_layer: int | None = None,
        output_dim: int | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        r"""
        Takes the arguments of [`M3BertModel`] and `start_positions` and `end_positions` of shape `(batch,)`: the first
        and the last token of the answer.

        Returns:
            [`~transformers.modeling_outputs.QuestionAnsweringModelOutput`]: start and end logits of shape `(batch,
            tokens)`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            output_layer=output_layer,
            output_dim=output_dim,
            return_dict=True,
            **kwargs,
        )
        start_logits, end_logits = self.qa_outputs(self.dropout(outputs.last_hidden_state)).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions, **kwargs)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class M3BertForMultipleChoice(M3BertClassifier):
    """m3BERT with a head that scores the texts to choose from."""

    def __init__(self, config: M3BertConfig):
        super().__init__(config, 1)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        output_layer: int | None = None,
        output_dim: int | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        r"""
        Takes the arguments of [`M3BertModel`], with shape `(batch, choices, ...)` instead of `(batch, ...)`, and
        `labels` of shape `(batch,)`: the index of the correct choice.

        Returns:
            [`~transformers.modeling_outputs.MultipleChoiceModelOutput`]: logits of shape `(batch, choices)`.
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "token_type_ids": token_type_ids,
        }
        given = {name: value for name, value in inputs.items() if value is not None}
        flat = {name: value.flatten(0, 1) for name, value in given.items()}
        outputs = self.model(**flat, output_layer=output_layer, output_dim=output_dim, return_dict=True, **kwargs)
        scores = self.classify_texts(outputs.last_hidden_state, flat.get("attention_mask"))
        logits = scores.view(next(iter(given.values())).shape[:2])
        loss = nn.functional.cross_entropy(logits, labels) if labels is not None else None
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


M3BertModel.register_for_auto_class("AutoModel")
M3BertForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
M3BertForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
M3BertForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
M3BertForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")
M3BertForMultipleChoice.register_for_auto_class("AutoModelForMultipleChoice")

__all__ = [
    "M3BertForMaskedLM",
    "M3BertForMultipleChoice",
    "M3BertForQuestionAnswering",
    "M3BertForSequenceClassification",
    "M3BertForTokenClassification",
    "M3BertModel",
    "M3BertPreTrainedModel",
]
