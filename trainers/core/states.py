"""
The only module that turns a backbone's outputs into nested states, prefixes and pooled embeddings.

The *state* of a layer is the layer's output; in a pre-norm backbone it also passes through the model's final norm, at
full width, and in an m3BERT through the exit of the layer, if it has one. States are truncated afterwards, so every
granularity is a prefix of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from modeling_m3bert.configuration_m3bert import plan_of
from modeling_m3bert.conversion_m3bert import CONVERTIBLE, position_offset
from modeling_m3bert.settings_m3bert import POOLINGS, Pooling

from .encoding.packed_rows import DOCUMENTS, Flattened, check_packable, flattened_documents, packed_arguments
from .granularity import EncoderConfig


@dataclass(frozen=True)
class BackboneSpec:
    """
    Facts about a model type that nested states depend on.

    Args:
        final_norm (`str`, *optional*): Name of the norm module after the last layer; `None` for a post-norm backbone.
        causal (`bool`, *optional*, defaults to `False`): Whether a token attends only to itself and earlier tokens,
            unless the config has `use_bidirectional_attention`.
        caches (`bool`, *optional*, defaults to `False`): Whether it keeps all keys and values for generating text
            unless it is told not to.
        first_position (`int`, *optional*, defaults to 0): Row of the position embeddings that the first token reads,
            where it does not depend on the config.
    """

    final_norm: str | None = None
    causal: bool = False
    caches: bool = False
    first_position: int = 0


BACKBONES = {
    "m3bert": BackboneSpec(final_norm="norm"),  # the identity in a post-norm m3BERT
    "modernbert": BackboneSpec(final_norm="final_norm"),
    "eurobert": BackboneSpec(final_norm="norm"),
    "qwen3": BackboneSpec(final_norm="norm", causal=True, caches=True),
    "gemma3_text": BackboneSpec(final_norm="norm", causal=True, caches=True),  # EmbeddingGemma is not causal
    "mpnet": BackboneSpec(first_position=2),
    **dict.fromkeys((*CONVERTIBLE, "deberta", "deberta-v2", "nomic_bert", "gte"), BackboneSpec()),
}
DECODER = "it is a decoder-only language model; of these, qwen3 and gemma3_text are known here"
ENCODER_DECODER = "it has two stacks of layers, an encoder and a decoder"
# Model types that are often asked for -> why they are not in BACKBONES.
REASONS = {
    **dict.fromkeys(("gpt2", "llama", "mistral", "qwen2", "gemma", "gemma2", "phi3"), DECODER),
    **dict.fromkeys(("t5", "mt5", "umt5", "bart", "mbart", "t5gemma", "m2m_100"), ENCODER_DECODER),
    **dict.fromkeys(
        ("gemma3", "embedding_gemma2"), "it also reads images, and its config nests that of the text model"
    ),
    "albert": "all its layers are one layer, so a smaller depth saves no memory",
    "funnel": "its deeper layers have fewer tokens than its first",
    "new": "its code is not part of transformers; the same model is there as gte, in checkpoints converted to it",
}


def check_pooling(pooling: str, config: EncoderConfig | None = None) -> None:
    """
    Check a pooling, and that the exits of a model were fitted with it.

    Args:
        pooling (`str`): Name of the pooling.
        config ([`~transformers.PreTrainedConfig`], *optional*): Config of the model; `None` checks the name only.

    Raises:
        ValueError: if the pooling is unknown, or is not that of the model's exits.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")
    fitted = (getattr(config, "exit_fit", None) or {}).get("pooling", pooling)
    if fitted != pooling:
        raise ValueError(
            f"The exits were fitted with pooling={fitted!r}, not {pooling!r}: use {fitted!r}, or fit again."
        )


@dataclass(frozen=True)
class NestedStates:
    """
    The states of one batch of texts at the requested layers.

    Args:
        layers (`dict[int, torch.Tensor]`): Layer -> state of shape `(batch, tokens, hidden_size)`.
        attention_mask (`torch.Tensor` of shape `(batch, tokens)`): 1 for real tokens.
        causal (`bool`, *optional*, defaults to `False`): Whether the backbone is causal.
        state_only (`dict[int, torch.Tensor]`, *optional*): Layer that reads the static table -> what its state-only
            map makes of its state.
        projections (`dict[int, nn.Module]`, *optional*): Layer -> projection of its pooled embedding.
        packed (`bool`, *optional*, defaults to `False`): Whether the rows are packed, each with several texts.
    """

    layers: Mapping[int, torch.Tensor]
    attention_mask: torch.Tensor
    causal: bool = False
    state_only: Mapping[int, torch.Tensor] = field(default_factory=dict)
    projections: Mapping[int, nn.Module] = field(default_factory=dict)
    packed: bool = False

    def without_table(self) -> NestedStates:
        """The states of the state-only maps."""
        return replace(self, layers=self.state_only, state_only={})

    def projected(self, layer: int, projection: nn.Module) -> NestedStates:
        """The states, with a projection `(batch, hidden_size)` -> `(batch, dim)` of a layer's pooled embedding."""
        return replace(self, projections={layer: projection})

    def pooled(self, layer: int, pooling: Pooling = "mean") -> torch.Tensor:
        """
        One vector per text at full width; shorten it with [`truncate`]. The mean of an empty text is zero, not NaN.

        Args:
            layer (`int`): One of `layers`.
            pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens, `"cls"` (the first real
                token) or `"lasttoken"` (the last real token).

        Returns:
            `torch.Tensor` of shape `(batch, hidden_size)`, in float32 or wider.

        Raises:
            ValueError: if the pooling is unknown, or is `"cls"` for a causal backbone, whose first token attends to
                no other token, or if the rows are packed.
        """
        check_pooling(pooling)
        if self.packed:
            raise ValueError("A packed row holds several texts, which are not pooled: use one text per row.")
        vectors = self._pooled(layer, pooling)
        return self.projections[layer](vectors) if layer in self.projections else vectors

    def _pooled(self, layer: int, pooling: Pooling) -> torch.Tensor:
        state = self.layers[layer]
        # A mean over hundreds of tokens loses precision in float16 and bfloat16.
        state = state.to(torch.promote_types(state.dtype, torch.float32))
        mask = self.attention_mask
        if pooling == "mean":
            total = torch.bmm(mask.to(state.dtype)[:, None], state)[:, 0]  # einsum would multiply by transposed states
            return total / mask.sum(dim=1, keepdim=True).clamp(min=1)
        if pooling == "cls" and self.causal:
            raise ValueError(
                "pooling='cls' reads the first token, which attends to no other token in a causal model: use "
                "'lasttoken' or 'mean'."
            )
        positions = self.first_positions() if pooling == "cls" else self.last_positions()
        return state[torch.arange(state.shape[0], device=state.device), positions]

    def first_positions(self) -> torch.Tensor:
        """Position of the first real token of each text, `(batch,)`."""
        return self.attention_mask.to(torch.int8).argmax(dim=1)

    def last_positions(self) -> torch.Tensor:
        """Position of the last real token of each text, `(batch,)`."""
        real = self.attention_mask.to(torch.int8)
        return real.shape[1] - 1 - real.flip(1).argmax(dim=1)

    def anchor_token_positions(self) -> torch.Tensor:
        """Position of the token that attends to the whole text, `(batch,)`: the last real token in a causal backbone,
        the first real token in any other."""
        return self.last_positions() if self.causal else self.first_positions()


@dataclass(frozen=True)
class PooledStates:
    """
    The pooled embeddings of one batch of texts, for when the token states of [`NestedStates`] do not fit in memory.

    Args:
        layers (`dict[int, torch.Tensor]`): Layer -> pooled embeddings of shape `(batch, hidden_size)`.
        pooling (`str`): How the embeddings were pooled.
        state_only (`dict[int, torch.Tensor]`, *optional*): As in [`NestedStates`], pooled.
    """

    layers: Mapping[int, torch.Tensor]
    pooling: Pooling
    state_only: Mapping[int, torch.Tensor] = field(default_factory=dict)

    def without_table(self) -> PooledStates:
        """The embeddings of the state-only maps."""
        return replace(self, layers=self.state_only, state_only={})

    def projected(self, layer: int, projection: nn.Module) -> PooledStates:
        """Same as [`NestedStates.projected`]."""
        return replace(self, layers={**self.layers, layer: projection(self.layers[layer])})

    def pooled(self, layer: int, pooling: Pooling = "mean") -> torch.Tensor:
        """
        Same as [`NestedStates.pooled`].

        Raises:
            ValueError: if `pooling` is not the pooling of the embeddings.
        """
        if pooling != self.pooling:
            raise ValueError(f"These embeddings were pooled with {self.pooling!r}; {pooling!r} needs token states.")
        return self.layers[layer]


TextStates = NestedStates | PooledStates
Reading = tuple[int, bool]  # a layer, and whether it is read by its state-only map


def truncate(vectors: torch.Tensor, dim: int, normalize: bool = False) -> torch.Tensor:
    """
    The first `dim` entries of `vectors` `(..., hidden_size)`, L2-normalised on request. Normalisation comes after
    truncation, so that dot products of normalised prefixes are their cosines.
    """
    sliced = vectors[..., :dim]
    return nn.functional.normalize(sliced, dim=-1) if normalize else sliced


def unwrap_encoder(model: Any) -> PreTrainedModel:
    """The encoder of a model, without its head and without the peft wrapper. Adapters inside it stay active."""
    if not isinstance(model, PreTrainedModel):
        model = model.get_base_model()
    return model.base_model


def transformer_layers(model: Any) -> list[nn.Module]:
    """The transformer layers of a model: the list of its encoder with `num_hidden_layers` modules. Empty if there is
    no such list."""
    encoder = unwrap_encoder(model)
    depth = encoder.config.num_hidden_layers
    lists = (module for module in encoder.modules() if isinstance(module, nn.ModuleList) and len(module) == depth)
    return list(next(lists, ()))


def backbone_spec(config: EncoderConfig) -> BackboneSpec:
    """
    The [`BackboneSpec`] of a config.

    Raises:
        ValueError: if the model type is unknown, or its code is not that of transformers. A wrong guess of the final
            norm would change all states.
    """
    name = config.model_type
    if name not in BACKBONES:
        reason = f": {REASONS[name]}" if name in REASONS else ""
        raise ValueError(f"model_type={name!r} is not supported{reason}; legal values: {', '.join(BACKBONES)}.")
    known = CONFIG_MAPPING[name] if name in CONFIG_MAPPING else None
    if known is not None and name != "m3bert" and not isinstance(config, known):
        raise ValueError(
            f"{config.name_or_path or name} brings its own code for model_type={name!r}, whose states are not known "
            "here: load it without trust_remote_code, or a checkpoint that transformers reads without it."
        )
    spec = BACKBONES[name]
    bidirectional = spec.causal and getattr(config, "use_bidirectional_attention", False)
    return replace(spec, causal=False) if bidirectional else spec


def width_of(config: Any) -> int:
    """Dims of the states that a model of this config returns by default."""
    return config.resolve_granularity()[1] if config.model_type == "m3bert" else config.hidden_size


def shared_layers(config: EncoderConfig) -> list[int]:
    """
    Layers whose states are in one space, ascending: the last layer and those with an exit into its space. Vectors of
    two of them can be compared. Without exits, only the last layer.
    """
    return sorted({*getattr(config, "exit_layers", ()), config.num_hidden_layers})


def reads_table(config: EncoderConfig, layers: Iterable[int] | None = None) -> bool:
    """Whether one of these layers, by default any, or the last layer reads the static table of an m3BERT."""
    static = {*getattr(config, "static_layers", ())}
    return bool(static) if layers is None else not static.isdisjoint([*layers, config.num_hidden_layers])


def state_only_layers(config: EncoderConfig, layers: Iterable[int]) -> list[int]:
    """Those of these layers whose exit has a state-only map beside the one that reads the static table, for native
    exports. Stitched depths have no native export."""
    stitched = getattr(config, "stitch_layers", ())
    static = getattr(config, "static_layers", ())
    return [layer for layer in layers if layer > 0 and layer in static and layer not in stitched]


def readings(model: Any, layers: Sequence[int], state_only: bool) -> list[Reading]:
    """The layers, and on request those that have a state-only map once more."""
    alone = state_only_layers(unwrap_encoder(model).config, layers) if state_only else []
    return [(layer, False) for layer in layers] + [(layer, True) for layer in alone]


def pooled_reading(states: TextStates, reading: Reading, pooling: Pooling) -> torch.Tensor:
    """The embeddings of a reading, `(texts, hidden_size)`."""
    layer, alone = reading
    return (states.without_table() if alone else states).pooled(layer, pooling)


def max_positions(config: EncoderConfig) -> int:
    """The longest text, in tokens, that a backbone of this config reads."""
    return config.max_position_embeddings - first_position(config)


def first_position(config: EncoderConfig) -> int:
    """Row of the position embeddings that the first token of a text reads."""
    return max(position_offset(config), backbone_spec(config).first_position)


def longest_text(config: EncoderConfig, tokenizer: Any, published: int | None = None) -> int:
    """
    The longest text, in tokens, that an encoder embeds without truncation.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Config of the encoder.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer; without a limit, it has a huge one.
        published (`int`, *optional*): A smaller limit that it was published with.
    """
    limit = min(max_positions(config), tokenizer.model_max_length)
    return limit if published is None else min(published, limit)


def nested_states(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], layers: Iterable[int], state_only: bool = False
) -> NestedStates:
    """
    Run a backbone once and return its states at several layers. With flash attention, the texts are flattened into one
    row without padding. Beside this one run, each stitched depth runs its last layers.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): A model of a supported type, with or without a head.
        inputs (`Mapping[str, torch.Tensor]`): Output of the tokenizer: `input_ids`, `attention_mask`, ... Packed rows
            have `document_ids` in place of the mask: 1, 2, ... for the documents of a row, 0 for padding. If it has
            `static_states` of shape `(batch, 1, hidden_size)`, layers that read the static table read these; without
            `input_ids`, stitched ones also need `static_rows` of shape `(batch, tokens, hidden_size)`.
        layers (`Iterable[int]`): Layers to read, in 0..depth. 0 is the embedding layer; its state is its output,
            without the final norm.
        state_only (`bool`, *optional*, defaults to `False`): Also apply the state-only maps of these layers.

    Returns:
        [`NestedStates`]

    Raises:
        ValueError: if a layer is outside the model, or the model type is not supported, or not for packed rows.
    """
    encoder, layers = unwrap_encoder(model), sorted(set(layers))
    depth = encoder.config.num_hidden_layers
    if not layers or layers[0] < 0 or layers[-1] > depth:
        raise ValueError(f"layers={layers} must be within 0..{depth}; 0 is the embedding layer.")
    run = _run_of(encoder, inputs, layers)
    # transformers returns all hidden states, or those that are named. Stitched depths are not named by their number.
    outputs = encoder(**run.arguments, output_hidden_states=bool(run.places) or layers, return_dict=True)
    states, alone = _collected(encoder, outputs, run, layers, state_only)
    if run.flattened is not None:
        states = {layer: run.flattened.padded(state) for layer, state in states.items()}
        alone = {layer: run.flattened.padded(state) for layer, state in alone.items()}
    last = outputs.last_hidden_state
    mask = torch.ones(last.shape[:2], dtype=torch.long, device=last.device) if run.mask is None else run.mask
    return NestedStates(states, mask, backbone_spec(encoder.config).causal, alone, packed=DOCUMENTS in inputs)


@dataclass(frozen=True)
class _Run:
    """
    How one run of an encoder gives the states of several layers.

    Args:
        arguments (`dict[str, Any]`): Arguments of the encoder.
        mask (`torch.Tensor`, *optional*): 1 for real tokens, `(batch, tokens)`.
        flattened ([`Flattened`], *optional*): The texts in one row, if the encoder reads them so.
        static (`torch.Tensor`, *optional*): Static states, in a shape that broadcasts to the token states.
        last (`int`): The layer whose state is the last hidden state.
        places (`dict[int, int]`): Stitched depth -> where its state is in the hidden states.
    """

    arguments: dict[str, Any]
    mask: torch.Tensor | None
    flattened: Flattened | None
    static: torch.Tensor | None
    last: int
    places: Mapping[int, int]


def _run_of(encoder: Any, inputs: Mapping[str, torch.Tensor], layers: list[int]) -> _Run:
    """The run that gives the states of ascending layers. Arguments as of [`nested_states`]."""
    config, spec = encoder.config, backbone_spec(encoder.config)
    last, first = config.num_hidden_layers, first_position(config)
    options: dict[str, Any] = {"use_cache": False} if spec.caches else {}
    places: dict[int, int] = {}
    if config.model_type == "m3bert":
        places = stitched_places(config, layers)
        if places:
            options["nested_layers"], last = layers, max(places)
        elif layers[-1] in config.legal_layers:
            last = options["output_layer"] = layers[-1]
        options["output_dim"] = config.hidden_size
    packed, mask, static = DOCUMENTS in inputs, inputs.get("attention_mask"), inputs.get("static_states")
    inputs = {name: value for name, value in inputs.items() if name != "static_states"}
    if packed:
        check_packable(config)
        mask = (inputs[DOCUMENTS] > 0).long()
    flattened, arguments = None, dict(inputs)
    if "flash" in config._attn_implementation and mask is not None:
        flattened = flattened_documents(inputs, first) if packed else Flattened.of(inputs, first)
        arguments = flattened.inputs
    elif packed:
        arguments = packed_arguments(config, inputs, first_position=first, causal=spec.causal, dtype=encoder.dtype)
    if reads_table(config, layers):
        if static is None:
            static = static_states(encoder, inputs, flattened, first)
        elif flattened is not None:
            static = static.expand(-1, flattened.real.shape[1], -1)[flattened.real].unsqueeze(0)
        options["static_states"] = static
    return _Run(arguments | options, mask, flattened, static, last, places)


def _collected(
    encoder: Any, outputs: Any, run: _Run, layers: Sequence[int], state_only: bool
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Layer -> its state, and on request layer -> what its state-only map makes of it."""
    final_norm = backbone_spec(encoder.config).final_norm
    norm = encoder.get_submodule(final_norm) if final_norm is not None else nn.Identity()
    # transformers applies the final norm to the last hidden state only.
    read = [layer for layer in layers if state_only or layer != run.last]
    hidden = {layer: outputs.hidden_states[run.places.get(layer, layer)] for layer in read}
    raw = {layer: norm(state) if 0 < layer != run.last else state for layer, state in hidden.items()}
    alone: dict[int, torch.Tensor] = {}
    if state_only:  # the last of the hidden states is normalised, and without the exit
        alone = {layer: encoder.exits[str(layer)](raw[layer]) for layer in state_only_layers(encoder.config, layers)}
    states = {layer: state for layer, state in raw.items() if layer != run.last}
    if encoder.config.model_type == "m3bert":
        states = {layer: encoder.exit_state(layer, state, static=run.static) for layer, state in states.items()}
    if run.last in layers:
        states[run.last] = outputs.last_hidden_state
    return {layer: states[layer] for layer in layers}, alone


def stitched_places(config: Any, layers: Iterable[int]) -> dict[int, int]:
    """Stitched depth among some layers -> where its state is in the hidden states of a run of all of them."""
    first_layers, stitched = plan_of(layers, config)
    ends = accumulate((config.stitches[depth] for depth in stitched), initial=first_layers)
    return dict(zip(stitched, list(ends)[1:], strict=True))


def static_states(
    encoder: Any, inputs: Mapping[str, torch.Tensor], flattened: Flattened | None, first_position: int
) -> torch.Tensor:
    """
    The static states of a batch, in a shape that broadcasts to its token states.

    Args:
        encoder ([`M3BertModel`]): An encoder with a static table.
        inputs (`Mapping[str, torch.Tensor]`): As for [`nested_states`].
        flattened ([`Flattened`], *optional*): The same texts in one row, if the encoder reads them so.
        first_position (`int`): Row of the position embeddings that the first token reads.
    """
    if "input_ids" not in inputs:
        raise ValueError("Layers that read the static table need input_ids, or static_states beside inputs_embeds.")
    if flattened is None and DOCUMENTS not in inputs:
        return encoder.static_states(inputs["input_ids"], inputs.get("attention_mask"))
    row = flattened or flattened_documents(inputs, first_position)
    static = encoder.static_states(row.inputs["input_ids"], cu_seq_lens=row.inputs["cu_seq_lens_q"])
    return static if flattened is not None else row.padded(static)
