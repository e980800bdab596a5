"""m3BERT: a bidirectional encoder whose output can be any trained layer and any trained prefix of its dimensions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
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

from .configuration_m3bert import M3BertConfig, layers_of, plan_of


try:
    from transformers.utils.output_capturing import capture_outputs
except ImportError:  # its name in transformers 5.0 and 5.1
    from transformers.utils.generic import check_model_inputs as capture_outputs

# Whether a model is built to read a file. Its layers then have the names that they have there until they are read.
_READING: ContextVar[bool] = ContextVar("_READING", default=False)


def make_norm(config: M3BertConfig) -> nn.Module:
    norm_class = nn.RMSNorm if config.norm_type == "rmsnorm" else nn.LayerNorm
    return norm_class(config.hidden_size, eps=config.norm_eps)


class NestedLinear(nn.Linear):
    """A linear layer that also accepts a prefix of its input: for `d` dims it uses the first `d` weight columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight[:, : x.shape[-1]], self.bias)


class M3BertExit(nn.Linear):
    """
    The exit of a layer: an affine map from the layer's hidden state to the embedding space of the last layer. It
    starts as the identity. `d` output dims use the first `d` rows of the weight.
    """

    def __init__(self, config: M3BertConfig):
        super().__init__(config.hidden_size, config.hidden_size)

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        return nn.functional.linear(x, self.weight[:dim], self.bias[:dim])


class M3BertStaticExit(nn.Module):
    """
    The exit of a layer that reads the static table: an affine map `joint([x, static])` of the hidden state and the
    static vector of its text. `weight` and `bias` are the map of the hidden state alone, which native models
    have instead. It is no `nn.Linear`: peft would adapt, and merge, the map that is not read.
    """

    def __init__(self, config: M3BertConfig):
        super().__init__()
        width = config.hidden_size
        self.weight, self.bias = nn.Parameter(torch.eye(width)), nn.Parameter(torch.zeros(width))
        self.joint = nn.ParameterDict({"weight": torch.eye(width, 2 * width), "bias": torch.zeros(width)})

    def forward(self, x: torch.Tensor, dim: int | None = None, static: torch.Tensor | None = None) -> torch.Tensor:
        if static is None:
            return nn.functional.linear(x, self.weight[:dim], self.bias[:dim])
        # The static state is the same for all tokens of a text, so it is mapped once.
        of_state, of_static = self.joint["weight"][:dim].split(x.shape[-1], dim=1)
        return nn.functional.linear(x, of_state) + nn.functional.linear(static, of_static, self.joint["bias"][:dim])


class M3BertStitch(nn.Linear):
    """
    The stitch of a depth: an affine map from a token's hidden state, and its row of the static table beside it if the
    depth reads the table, to the hidden state that the last layers expect. It starts as the identity of the hidden
    state.
    """

    def __init__(self, config: M3BertConfig, reads_table: bool):
        super().__init__(config.hidden_size * (2 if reads_table else 1), config.hidden_size)

    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)
        nn.init.zeros_(self.bias)


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


def texts_of_tokens(boundaries: torch.Tensor, tokens: int) -> torch.Tensor:
    """Text of each of `tokens` tokens in a flattened row, `(tokens,)`, from the cumulative lengths of the texts."""
    index = torch.arange(tokens, device=boundaries.device)
    return torch.searchsorted(boundaries[1:].to(index.dtype).contiguous(), index, right=True)


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
    # How the states become embeddings, in the encoder of a converted embedding model.
    embedding_settings: Any = None

    def __init__(self, config: M3BertConfig, *args: Any, **kwargs: Any):
        super().__init__(config.cut(), *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, M3BertExit | M3BertStaticExit | M3BertStitch):
            for affine in (module, module.joint) if isinstance(module, M3BertStaticExit) else (module,):
                init.eye_(affine.weight)
                init.zeros_(affine.bias)
        else:
            super()._init_weights(module)

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        table = self.base_model.static_table
        old = None if table is None else table.weight.detach()
        resized = super()._resize_token_embeddings(*args, **kwargs)
        if table is None or old is None:
            return resized
        tokens = resized.weight.shape[0]
        rows = nn.functional.pad(old, (0, 0, 0, tokens - len(old)))  # a negative number cuts
        self.base_model.static_table = nn.Embedding.from_pretrained(rows, freeze=not table.weight.requires_grad)
        self.config.static_ignored_ids = [token for token in self.config.static_ignored_ids if token < tokens]
        return self.get_input_embeddings()

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        *args: Any,
        halve_table: bool = True,
        **kwargs: Any,
    ) -> None:
        """
        Save a model as [`~transformers.PreTrainedModel.save_pretrained`] does, and its static table in float16 unless
        `halve_table=False`, with which training resumes exactly. A converted embedding model also writes its pooling
        and prompts.
        """
        if halve_table and self.base_model.static_table is not None:
            state_dict = {
                name: tensor.half() if name.endswith("static_table.weight") else tensor
                for name, tensor in (self.state_dict() if state_dict is None else state_dict).items()
            }
        super().save_pretrained(save_directory, is_main_process, state_dict, *args, **kwargs)
        if self.embedding_settings is not None and is_main_process:
            self.embedding_settings.write(save_directory, width=self.config.resolve_granularity()[1])

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
            ValueError: if a granularity is not legal, the weights are unreadable, or an encoder tensor is missing.
            RuntimeError: if a tensor has another shape than the config specifies. With `ignore_mismatched_sizes=True`
                it is newly initialised, with the library's warning, as a missing head always is.
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
        reading = _READING.set(True)
        try:
            # The library's error for mismatched shapes names no tensor, so the check follows below.
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(f"The weights in {pretrained_model_name_or_path} cannot be read: {error}.") from error
        finally:
            _READING.reset(reading)
        if any(parameter.is_meta for parameter in model.parameters()):
            model.tie_weights()  # transformers 5.3 leaves this out in remote code
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
            raise RuntimeError(
                f"{pretrained_model_name_or_path} has tensors whose shape differs from the config's: "
                f"{_list_first(mismatched)}. Pass ignore_mismatched_sizes=True to initialise them randomly."
            )
        if model.config.num_hidden_layers in model.config.stitch_layers:
            model.base_model.layers = nn.ModuleList(model.base_model.layers)  # numbered in the order in which they run
        return (model, info) if return_info else model


class M3BertModel(M3BertPreTrainedModel):
    """
    The encoder. It is built with `config.output_layer` layers and returns hidden states of the requested granularity.
    Truncated to layer 0, in a checkpoint whose layer 0 is the static table, it is this table and nothing else.
    """

    # Loading the encoder from a checkpoint with a head should not report the head's weights.
    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^classifier\.", r"^qa_outputs\."]

    def __init__(self, config: M3BertConfig):
        super().__init__(config)
        config = self.config
        if not config.is_static:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
            if config.position_embedding_type == "absolute":
                self.pos_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
            else:
                self.rotary_emb = M3BertRotaryEmbedding(config)
            self.input_norm = make_norm(config)
        self.dropout = nn.Dropout(config.embedding_dropout)
        stored = config.__dict__.pop("_stored_layers", None)  # only a stitched cut has gaps
        numbers = stored if stored is not None and _READING.get() else [*range(config.num_hidden_layers)]
        self.layers = nn.ModuleList()
        for index, number in enumerate(numbers):
            self.layers.add_module(str(number), M3BertLayer(config, index))
        has_norm = config.norm_position == "pre" and not config.is_static
        self.norm = make_norm(config) if has_norm else nn.Identity()
        self.exits, self.stitches = self.make_exits(), self.make_stitches()
        self.static_table = nn.Embedding(config.vocab_size, config.hidden_size) if config.static_layers else None
        if config.is_static:
            self._input_embed_layer = "static_table"  # the library's getter and setter of the embeddings read it
        self.gradient_checkpointing = False
        if config.output_layer is not None:
            # The caller limited the depth, so loading should not report what this depth lacks and the checkpoint has.
            parts = {"layers": numbers, "exits": config.exit_layers, "stitches": config.stitch_layers}
            left_out = [rf"^(model\.)?{part}\.(?!({'|'.join(map(str, built))})\.)" for part, built in parts.items()]
            if not config.static_layers:
                left_out.append(r"^(model\.)?static_table\.")
            if config.is_static:
                left_out.append(r"^(model\.)?(embed_tokens|pos_embeddings|input_norm|norm)\.")
            self._keys_to_ignore_on_load_unexpected = [*self._keys_to_ignore_on_load_unexpected, *left_out]
        self.post_init()

    def make_exits(self) -> nn.ModuleDict:
        """New exits for the layers of the config. Layer 0 needs none if it is the static table."""
        static = self.config.static_layers
        with_exit = [layer for layer in self.config.exit_layers if layer or 0 not in static]
        return nn.ModuleDict(
            {str(layer): (M3BertStaticExit if layer in static else M3BertExit)(self.config) for layer in with_exit}
        )

    def make_stitches(self) -> nn.ModuleDict:
        """New stitches for the stitched depths of the config."""
        config = self.config
        return nn.ModuleDict(
            {str(depth): M3BertStitch(config, depth in config.static_layers) for depth in config.stitch_layers}
        )

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
        static_states: torch.Tensor | None = None,
        static_rows: torch.Tensor | None = None,
        nested_layers: Sequence[int] | None = None,
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
            output_layer (`int`, *optional*): Output layer, the number of layers that run: the first ones, or for a
                stitched depth those of [`layers_of`]. Defaults to the config's.
            output_dim (`int`, *optional*): Number of dimensions to return. Defaults to the config's.
            static_states (`torch.Tensor` of shape `(batch, 1 or tokens, hidden_size)`, *optional*): Result of
                [`~M3BertModel.static_states`], for an output layer that reads the static table. By default, it is
                computed from `input_ids`.
            static_rows (`torch.Tensor` of shape `(batch, tokens, hidden_size)`, *optional*): Each token's row of the
                static table, for a stitched depth that reads it. By default, they are looked up by `input_ids`.
            nested_layers (`list[int]`, *optional*): Depths to run at once, some of them stitched, in place of
                `output_layer` and whether they are legal or not. The first layers run once, up to the deepest that one
                of them needs; then each stitched depth runs its last layers, in ascending order. The output is that of
                the last. [`plan_of`] says where in `hidden_states` the others are.
            kwargs: `output_hidden_states`, `output_attentions` (with eager attention) and `return_dict`. Flattened
                input (several texts in one row, without padding) needs `cu_seq_lens_q`, `cu_seq_lens_k`,
                `max_length_q` and `max_length_k`, as returned by [`~transformers.DataCollatorWithFlattening`].

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`]: `last_hidden_state` of shape `(batch, tokens,
            output_dim)`, after the exit of the output layer if it has one. In `hidden_states`, entry 0 is the input
            of the first layer that runs, the embeddings after `input_norm` (stitched, if only last layers run), and
            entry l the raw output of the l-th layer that runs, each with all dims and before any exit; the last entry
            is normalised. Layer 0 as a static table runs nothing else and has no hidden states.

        Raises:
            ValueError: if the granularity is not legal, the input is longer than `max_position_embeddings`, both or
                neither of `input_ids` and `inputs_embeds` are given, a token type is not 0, or the output layer reads
                the static table and there are neither `input_ids` nor `static_states` (and `static_rows`, if it is
                stitched).
        """
        depth, dim = self.config.resolve_granularity(None if nested_layers else output_layer, output_dim)
        first_layers, stitched = plan_of(nested_layers or [depth], self.config)
        if nested_layers:
            depth = stitched[-1] if stitched else first_layers
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds.")
        if token_type_ids is not None and not torch.compiler.is_compiling() and token_type_ids.any():
            raise ValueError("m3BERT has no token types: token_type_ids must be all zeros or omitted.")
        if depth in self.config.static_layers and static_states is None:
            if input_ids is None:
                raise ValueError(
                    f"Layer {depth} reads the static table by token ids: pass input_ids, or static_states beside "
                    "inputs_embeds."
                )
            static_states = self.static_states(
                input_ids, attention_mask, kwargs.get("cu_seq_lens_q"), dim if depth == 0 else None
            )
        if depth == 0 and static_states is not None and 0 in self.config.static_layers:
            texts, tokens = (inputs_embeds[..., 0] if input_ids is None else input_ids).shape  # type: ignore[index]
            return BaseModelOutput(last_hidden_state=static_states[..., :dim].expand(texts, tokens, -1))
        if static_rows is None and not {*stitched}.isdisjoint(self.config.static_layers):
            if input_ids is None or self.static_table is None:
                raise ValueError(
                    f"The stitched depths {stitched} read the static table by token ids: pass input_ids, or "
                    "static_rows beside inputs_embeds."
                )
            static_rows = self.static_table(input_ids)
        outputs = self.run_layers(
            first_layers,
            stitched,
            static_rows,
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        outputs.last_hidden_state = self.exit_state(depth, outputs.last_hidden_state, dim, static_states)
        return outputs

    def static_states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cu_seq_lens: torch.Tensor | None = None,
        dim: int | None = None,
    ) -> torch.Tensor:
        """
        The static vector of each text: the mean of the static table's rows over the text's tokens, without padding and
        `config.static_ignored_ids`. It is zero for a text without other tokens.

        Args:
            input_ids (`torch.LongTensor` of shape `(batch, tokens)`): Token ids.
            attention_mask (`torch.Tensor` of shape `(batch, tokens)`, *optional*): 1 for real tokens, 0 for padding.
            cu_seq_lens (`torch.Tensor` of shape `(texts + 1,)`, *optional*): Cumulative lengths of the texts in a
                flattened row.
            dim (`int`, *optional*): Number of dimensions to compute. `None` means all.

        Returns:
            `torch.Tensor` of shape `(batch, 1, dim)`; `(1, tokens, dim)` for a flattened row, where each token has the
            static vector of its text.

        Raises:
            ValueError: if the model has no static table, or the mask has another shape than the token ids.
        """
        if self.static_table is None:
            raise ValueError("The model has no static table: no layer of config.static_layers is built.")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"The static table reads a mask of shape {tuple(input_ids.shape)}, as the token ids, not "
                f"{tuple(attention_mask.shape)}: pass static_states instead."
            )
        rows = nn.functional.embedding(input_ids, self.static_table.weight[:, :dim])
        # A mean over hundreds of tokens loses precision in float16 and bfloat16.
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        counted = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if self.config.static_ignored_ids:
            ignored = input_ids.unsqueeze(-1) == input_ids.new_tensor(self.config.static_ignored_ids)
            counted = counted.bool() & ~ignored.any(dim=-1)
        counted = counted.to(rows.dtype)
        if cu_seq_lens is None:
            means = torch.bmm(counted.unsqueeze(1), rows) / counted.sum(dim=1).clamp(min=1)[:, None, None]
        else:
            text, counted = texts_of_tokens(cu_seq_lens, input_ids.shape[1]), counted[0].unsqueeze(-1)
            per_text = rows.new_zeros(len(cu_seq_lens), 1)  # the last entry is for tokens after the last text
            numbers = per_text.index_add(0, text, counted).clamp(min=1)
            totals = per_text.repeat(1, rows.shape[-1]).index_add(0, text, counted * rows[0])
            means = (totals / numbers)[text].unsqueeze(0)
        return means.to(self.static_table.weight.dtype)

    def exit_state(
        self, layer: int, state: torch.Tensor, dim: int | None = None, static: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Apply the exit of a layer and truncate the result. A layer without an exit is only truncated.

        Args:
            layer (`int`): Layer of the hidden state.
            state (`torch.Tensor` of shape `(..., hidden_size)`): Output of the layer, normalised in a pre-norm model.
            dim (`int`, *optional*): Number of dimensions to compute. `None` means all.
            static (`torch.Tensor`, *optional*): The static vectors of the texts, in a shape that broadcasts to
                `state`. Layers that do not read the static table ignore it.

        Returns:
            `torch.Tensor` of shape `(..., dim)`.

        Raises:
            ValueError: if the layer reads the static table and there is no `static`.
        """
        reads_table = layer in self.config.static_layers
        if reads_table:
            if static is None:
                raise ValueError(f"Layer {layer} reads the static table: pass static, from static_states(...).")
            if layer == 0:
                return static[..., :dim].expand(*state.shape[:-1], -1)
        for name, layer_exit in self.exits.items():
            if int(name) == layer:  # torch.compile cannot make a name out of a layer that varies between calls
                return layer_exit(state, dim, static) if reads_table else layer_exit(state, dim)
        return state[..., :dim]

    def set_exits(
        self,
        exits: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        *,
        joints: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
        static_table: torch.Tensor | None = None,
        static_ignored_ids: Iterable[int] = (),
        stitches: Mapping[int, tuple[int, torch.Tensor, torch.Tensor]] | None = None,
    ) -> None:
        """
        Replace all exits of the model, its static table and its stitches.

        Args:
            exits (`Mapping[int, tuple[torch.Tensor, torch.Tensor]]`): Layer -> weight `(hidden_size, hidden_size)` and
                bias `(hidden_size,)`, which map a hidden state x to `weight @ x + bias`.
            joints (`Mapping[int, tuple[torch.Tensor, torch.Tensor]]`, *optional*): Layer above 0 with an exit ->
                weight `(hidden_size, 2 * hidden_size)` and bias of the map of hidden state and static vector that is
                its exit instead.
            static_table (`torch.Tensor` of shape `(vocab_size, hidden_size)`, *optional*): The table. It is the exit
                of layer 0 unless `exits` has one.
            static_ignored_ids (`Iterable[int]`, *optional*): Token ids that the static vectors leave out.
            stitches (`Mapping[int, tuple[int, torch.Tensor, torch.Tensor]]`, *optional*): Depth with an exit -> its
                number of last layers, and weight `(hidden_size, inputs)` and bias `(hidden_size,)` of its stitch. The
                inputs are the `hidden_size` of the hidden state, or if `joints` has the depth `2 * hidden_size`: the
                hidden state, and the token's row of the table.

        Raises:
            ValueError: if a layer is outside the model, the table has another shape, or maps and table do not go
                together.
        """
        joints, stitches = joints or {}, stitches or {}
        table_layers = [] if static_table is None or 0 in exits else [0]
        self._check_static(exits, joints, static_table)
        tops = {depth: top for depth, (top, _, _) in stitches.items()}
        declared = [*exits, *table_layers], [*table_layers, *joints], static_ignored_ids, tops
        config = copy.deepcopy(self.config)
        config.declare_exits(*declared)
        config.validate_architecture()
        like = self.get_input_embeddings().weight
        self.config.declare_exits(*declared)
        self.exits, self.stitches = self.make_exits(), self.make_stitches()
        for depth, (_, weight, bias) in stitches.items():
            self.stitches[str(depth)].load_state_dict({"weight": weight, "bias": bias})
        self.stitches.to(device=like.device, dtype=like.dtype)
        for layer, (weight, bias) in exits.items():
            joint = zip(("joint.weight", "joint.bias"), joints.get(layer, ()), strict=False)
            self.exits[str(layer)].load_state_dict({"weight": weight, "bias": bias, **dict(joint)})
        self.exits.to(device=like.device, dtype=like.dtype)
        self.static_table = None
        if static_table is not None:
            rows = static_table.detach().to(device=like.device, dtype=like.dtype, copy=True)
            self.static_table = nn.Embedding.from_pretrained(rows, freeze=False)

    def _check_static(self, exits: Iterable[int], joints: Iterable[int], static_table: torch.Tensor | None) -> None:
        """Refuse a static table, or maps that read one, that do not fit the model."""
        if not {*joints} <= {*exits} - {0}:
            raise ValueError(f"joints={sorted(joints)} must be layers above 0 with an exit: {sorted({*exits} - {0})}.")
        if static_table is None:
            if [*joints]:
                raise ValueError("joints read the static table: pass static_table.")
            if self.config.is_static:
                raise ValueError("This model is a static table alone: pass static_table.")
            return
        if 0 in exits and not [*joints]:
            raise ValueError("No layer reads static_table: pass joints, or no exit of layer 0.")
        shape = (self.config.vocab_size, self.config.hidden_size)
        if tuple(static_table.shape) != shape:
            raise ValueError(f"static_table has shape {tuple(static_table.shape)} instead of {shape}.")

    def drop_exits(self, layers: Iterable[int]) -> None:
        """Remove the exits of some layers with their stitches, and the static table if no other layer reads it."""
        config, dropped = self.config, {*layers}
        kept, static = (
            [layer for layer in each if layer not in dropped] for each in (config.exit_layers, config.static_layers)
        )
        stitches = {depth: top for depth, top in config.stitches.items() if depth not in dropped}
        config.declare_exits(kept, static, config.static_ignored_ids, stitches)
        self.exits, self.stitches = (
            nn.ModuleDict({name: module for name, module in modules.items() if int(name) in kept})
            for modules in (self.exits, self.stitches)
        )
        self.static_table = self.static_table if static else None

    @capture_outputs
    def run_layers(
        self,
        first_layers: int,
        stitched: Sequence[int],
        static_rows: torch.Tensor | None,
        input_ids: torch.LongTensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.LongTensor | None,
        inputs_embeds: torch.Tensor | None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """
        Run the first layers, and then the last layers of each stitched depth; the other arguments are those of
        `forward`.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutput`]: the hidden state of the last of these layers,
            normalised, as `last_hidden_state` of shape `(batch, tokens, hidden_size)`.
        """
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        hidden_states, position_embeddings = self.embed(inputs_embeds, position_ids)
        mask = self.make_attention_mask(hidden_states, attention_mask, kwargs.get("cu_seq_lens_q"))
        kwargs |= {"attention_mask": mask, "position_embeddings": position_embeddings}
        bottoms = {depth: depth - self.config.stitches[depth] for depth in stitched}
        kept = {0: hidden_states} if 0 in bottoms.values() else {}
        for number, layer in enumerate(self.layers[:first_layers], start=1):
            hidden_states = layer(hidden_states, **kwargs)
            if number in bottoms.values():
                kept[number] = hidden_states
        for depth, bottom in bottoms.items():
            hidden_states = self.stitch_state(depth, kept[bottom], static_rows)
            for index in layers_of(depth, self.config)[bottom:]:
                hidden_states = self.layers[index](hidden_states, **kwargs)
        if first_layers or stitched:  # the embeddings are normalised already
            hidden_states = self.norm(hidden_states)
        return BaseModelOutput(last_hidden_state=hidden_states)

    def stitch_state(self, depth: int, state: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """
        Apply the stitch of a depth.

        Args:
            depth (`int`): A stitched depth.
            state (`torch.Tensor` of shape `(batch, tokens, hidden_size)`): Raw output of its last bottom layer.
            rows (`torch.Tensor` of the same shape, *optional*): Each token's row of the static table.
        """
        if rows is not None and depth in self.config.static_layers:
            state = torch.cat([state, rows], dim=-1)
        for name, stitch in self.stitches.items():
            if int(name) == depth:  # torch.compile cannot make a name out of a depth that varies between calls
                return stitch(state)
        raise ValueError(f"Depth {depth} is not stitched.")

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
            text = texts_of_tokens(boundaries, hidden_states.shape[1])

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
        self.refuse_table()
        self.post_init()

    def refuse_table(self, output_layer: int | None = None) -> None:
        """Raise a ValueError if the output layer is the static table, which has no hidden states of tokens."""
        if self.config.resolve_granularity(output_layer)[0] == 0 and 0 in self.config.static_layers:
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

        Raises:
            ValueError: as [`M3BertModel`], or if layer 0, a static table, is to predict tokens.
        """
        self.refuse_table(output_layer)
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
        Pool the hidden states into one vector per text and classify it.

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
