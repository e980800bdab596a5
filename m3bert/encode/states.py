"""
The only module that turns a backbone's outputs into nested hidden states, prefixes and pooled embeddings.

The *hidden state* of a depth is the output of its last layer; in a pre-norm backbone it also passes through the
model's final norm, with all dims, and in an elastic one through the exit of the depth, if it has one. Hidden states
are truncated afterwards, so every granularity is a prefix of one tensor.

A depth that reads the static table also has a *state-only* map, which does not, and which native exports have in place
of the exit. [`StateOnly`] is the key of its hidden state, where others have their depth.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..modeling.configuration_elastic import Elasticity, resolve_size
from ..modeling.parts_elastic import layer_list, view
from ..models.anatomy import Resumed, Tapped, anatomy_of, run_native
from ..models.conversion import OFFSET_POSITIONS
from ..models.settings import POOLINGS, Pooling
from .granularity import EncoderConfig
from .packed_rows import DOCUMENTS, Flattened, check_packable, packed_arguments


@dataclass(frozen=True)
class StateOnly:
    """The key of the hidden state of a depth that its state-only map gives."""

    depth: int


StateKey = int | StateOnly


def check_pooling(pooling: str, config: EncoderConfig | None = None) -> None:
    """Check the name of a pooling, and that the exits of a model of this config were fitted with it."""
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")
    fitted = (Elasticity.of(config).fit or {}).get("pooling", pooling)
    if fitted is None:
        raise ValueError("The model is for late interaction: it has a vector per token, and no pooling.")
    if fitted != pooling:
        raise ValueError(
            f"The exits were fitted with pooling={fitted!r}, not {pooling!r}: use {fitted!r}, or fit again."
        )


@dataclass(frozen=True)
class NestedStates:
    """
    The hidden states of one batch of texts at the requested layers.

    Args:
        layers (`dict[StateKey, torch.Tensor]`): Layer -> hidden state of shape `(batch, tokens, hidden_size)`.
        attention_mask (`torch.Tensor` of shape `(batch, tokens)`): 1 for real tokens.
        causal (`bool`, *optional*, defaults to `False`): Whether the backbone is causal.
        projections (`dict[int, nn.Module]`, *optional*): Layer -> projection of its pooled embedding.
        packed (`bool`, *optional*, defaults to `False`): Whether the rows are packed, each with several texts.
    """

    layers: Mapping[StateKey, torch.Tensor]
    attention_mask: torch.Tensor
    causal: bool = False
    projections: Mapping[StateKey, nn.Module] = field(default_factory=dict)
    packed: bool = False

    def projected(self, layer: int, projection: nn.Module) -> NestedStates:
        """The hidden states, with a projection of a layer's pooled embedding, with and without the static table."""
        return replace(self, projections={layer: projection, StateOnly(layer): projection})

    def pooled(self, layer: StateKey, pooling: Pooling = "mean") -> torch.Tensor:
        """
        One vector per text with all dims; shorten it with [`truncate`]. The mean of an empty text is zero, not NaN.

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

    def _pooled(self, layer: StateKey, pooling: Pooling) -> torch.Tensor:
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
    The pooled embeddings of one batch of texts, layer -> `(batch, hidden_size)`, for when the token hidden states of
    [`NestedStates`] do not fit in memory.
    """

    layers: Mapping[StateKey, torch.Tensor]
    pooling: Pooling

    def projected(self, layer: int, projection: nn.Module) -> PooledStates:
        """As [`NestedStates.projected`]."""
        both = {key: self.layers[key] for key in (layer, StateOnly(layer)) if key in self.layers}
        return replace(self, layers={**self.layers, **{key: projection(vectors) for key, vectors in both.items()}})

    def pooled(self, layer: StateKey, pooling: Pooling = "mean") -> torch.Tensor:
        """As [`NestedStates.pooled`]. ValueError if `pooling` is not the pooling of the embeddings."""
        if pooling != self.pooling:
            raise ValueError(
                f"These embeddings are pooled with {self.pooling!r}; {pooling!r} reads token hidden states."
            )
        return self.layers[layer]


TextStates = NestedStates | PooledStates


def truncate(vectors: torch.Tensor, dim: int, normalize: bool = False) -> torch.Tensor:
    """
    The first `dim` entries of `vectors` `(..., hidden_size)`, L2-normalised on request. Normalisation comes after
    truncation, so that dot products of normalised prefixes are their cosines.
    """
    sliced = vectors[..., :dim]
    return nn.functional.normalize(sliced, dim=-1) if normalize else sliced


def unwrap_encoder(model: PreTrainedModel) -> PreTrainedModel:
    """The encoder of a model, without its head and without the peft wrapper. Adapters inside it stay active."""
    if not isinstance(model, PreTrainedModel):
        model = model.get_base_model()
    return model.base_model


def transformer_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer layers of a model's encoder."""
    encoder = unwrap_encoder(model)
    depth = encoder.config.num_hidden_layers
    return list(layer_list(encoder, depth)[1]) if depth else []


def width_of(config: EncoderConfig) -> int:
    """Dims of the hidden states that a model of this config returns by default."""
    return resolve_size(config)[1]


def shared_layers(config: EncoderConfig) -> list[int]:
    """
    Depths whose hidden states are in one space, ascending: the last layer and those with an exit into its space.
    Vectors of two of them can be compared. Without exits, only the last layer.
    """
    return sorted({*Elasticity.of(config).aligned, config.num_hidden_layers})


def reads_table(config: EncoderConfig, layers: Iterable[StateKey] | None = None) -> bool:
    """Whether one of these depths, by default any, reads the static table of an elastic model."""
    table = {*Elasticity.of(config).table}
    return bool(table) if layers is None else not table.isdisjoint(layers)


def readable(config: EncoderConfig, layers: Iterable[StateKey]) -> list[StateKey]:
    """The keys among these that a model of this config has: no state-only maps without the static table."""
    table = Elasticity.of(config).table
    keys = {key for key in layers if isinstance(key, int) or key.depth in table}
    return sorted(keys, key=lambda key: (isinstance(key, int), depth_of(key)))


def depth_of(key: StateKey) -> int:
    """The depth of a key."""
    return key if isinstance(key, int) else key.depth


def max_positions(config: EncoderConfig) -> int:
    """The longest text, in tokens, that a backbone of this config reads."""
    return (getattr(config, "max_position_embeddings", None) or sys.maxsize) - first_position(config)


def first_position(config: EncoderConfig) -> int:
    """Row of the position embeddings that the first token of a text reads."""
    return (config.pad_token_id or 0) + 1 if config.model_type in (*OFFSET_POSITIONS, "mpnet") else 0


def longest_text(config: EncoderConfig, tokenizer: Any, published: int | None = None) -> int:
    """The longest text, in tokens, that an encoder embeds without truncation, within the limit it was published
    with."""
    limit = min(max_positions(config), tokenizer.model_max_length)
    return limit if published is None else min(published, limit)


def is_flash(attention: str) -> bool:
    """Whether an attention is a flash attention: in half precision, and with boundaries of texts in place of a
    mask."""
    return "flash" in attention


def nested_states(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], layers: Iterable[StateKey], exits: bool = True
) -> NestedStates:
    """
    Run a backbone once and return its hidden states at several depths. With flash attention, the texts are flattened
    into one row without padding. Beside this one run, each path runs its layers from the first that is not as in the
    model.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): Any encoder of transformers that [`anatomy_of`]
            accepts, with or without a head.
        inputs (`Mapping[str, torch.Tensor]`): Output of the tokenizer: `input_ids`, `attention_mask`, ... Packed rows
            have `document_ids` in place of the mask: 1, 2, ... for the documents of a row, 0 for padding. If it has
            `static_states` of shape `(batch, 1, hidden_size)`, depths that read the static table read these.
        layers (`Iterable[StateKey]`): Depths to read, in 0..N. 0 is the static table, or without one the input of the
            first layer. [`StateOnly`] of a depth is its state-only map, and left out if there is none.
        exits (`bool`, *optional*, defaults to `True`): Apply the exits.

    Returns:
        [`NestedStates`]

    Raises:
        ValueError: if a depth is outside the model, or the model cannot be read, or not with packed rows.
    """
    encoder = unwrap_encoder(model)
    spec, keys = Elasticity.of(encoder.config), readable(encoder.config, layers)
    depths, last = sorted({*map(depth_of, keys)}), encoder.config.num_hidden_layers
    if not depths or depths[0] < 0 or depths[-1] > last:
        raise ValueError(f"layers={keys} must be within 0..{last}; 0 is the embedding layer.")
    spec = spec if exits else Elasticity(spec.depths)
    arguments, mask, flattened, static = _arguments_of(encoder, inputs)
    if static is None and exits and reads_table(encoder.config, depths):
        static = static_states(encoder, inputs, flattened)
    raw = raw_states(encoder, arguments, [depth for depth in depths if depth > 0 or 0 not in spec.table], spec)
    states = {key: raw[depth_of(key)] for key in keys if depth_of(key) in raw}
    if spec.exits:
        tokens = arguments.get("input_ids")
        tokens = arguments["inputs_embeds"][..., 0] if tokens is None else tokens
        for key in keys:
            if isinstance(key, StateOnly):
                states[key] = encoder.elastic.exit(key.depth)(raw[key.depth])
            else:
                states[key] = encoder.exit_state(key, raw.get(key, tokens[..., None]), static=static)
    if flattened is not None:
        states = {key: flattened.padded(state) for key, state in states.items()}
    if mask is None:
        first_state = next(iter(states.values()))
        mask = torch.ones(first_state.shape[:2], dtype=torch.long, device=first_state.device)
    return NestedStates(states, mask, anatomy_of(encoder).causal, packed=DOCUMENTS in inputs)


def _arguments_of(
    encoder: PreTrainedModel, inputs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], torch.Tensor | None, Flattened | None, torch.Tensor | None]:
    """The arguments of the encoder, the mask of real tokens, the flattened texts if any, and given static vectors."""
    config, arguments, mask = encoder.config, dict(inputs), inputs.get("attention_mask")
    static, first, packed = arguments.pop("static_states", None), first_position(config), DOCUMENTS in inputs
    if packed:
        check_packable(config)
        mask = (inputs[DOCUMENTS] > 0).long()
    if is_flash(config._attn_implementation) and mask is not None:
        flattened = Flattened.of(arguments, first)
        if static is not None:
            static = static.expand(-1, flattened.real.shape[1], -1)[flattened.real].unsqueeze(0)
        return flattened.inputs, mask, flattened, static
    if packed:
        causal = anatomy_of(encoder).causal
        arguments = packed_arguments(config, arguments, first_position=first, causal=causal, dtype=encoder.dtype)
    return arguments, mask, None, static


def raw_states(
    encoder: PreTrainedModel, arguments: Mapping[str, Any], depths: Sequence[int], spec: Elasticity
) -> dict[int, torch.Tensor]:
    """The hidden states of depths before any exit, after the final norm; depth 0 is the input of the first layer."""
    anatomy = anatomy_of(encoder)
    norm = encoder.get_submodule(anatomy.final_norm) if anatomy.final_norm is not None else nn.Identity()
    paths = [depth for depth in depths if spec.is_path(depth)]
    starts = {depth: spec.shared_prefix(depth) if anatomy.resumes else 0 for depth in paths}
    prefixes = [depth for depth in depths if depth not in paths]
    read = [*prefixes, *(start for start in starts.values() if start)]
    states: dict[int, torch.Tensor] = {}
    if read:
        deepest, outputs, last = _prefixes(encoder, arguments, max(1, *read))
        states = {depth: norm(outputs[depth]) if 0 < depth < deepest else outputs[0] for depth in prefixes}
        if deepest in prefixes:
            states[deepest] = last
    for depth, start in starts.items():
        modules = encoder.layers_at(depth)[start:]
        if start:
            modules[0] = Resumed(modules[0], outputs[start])
        states[depth] = run_native(
            view(encoder, spec.layers_of(depth)[start:], modules), **arguments
        ).last_hidden_state
    return {depth: states[depth] for depth in depths}


def _prefixes(
    encoder: PreTrainedModel, arguments: Mapping[str, Any], deepest: int
) -> tuple[int, Mapping[int, torch.Tensor], torch.Tensor]:
    """The number of layers that run, at least `deepest`; their outputs, with the input as 0; and the last hidden
    state."""
    if torch.compiler.is_compiling() or getattr(encoder, "_compiled_call_impl", None) is not None:
        # A view would be compiled again at each call.
        hidden = encoder(**arguments, output_hidden_states=True, return_dict=True).hidden_states
        return encoder.config.num_hidden_layers, dict(enumerate(hidden)), hidden[-1]
    outputs: dict[int, torch.Tensor] = {}
    layers = layer_list(encoder, encoder.config.num_hidden_layers)[1]
    tapped = [Tapped(layers[number - 1], number, outputs) for number in range(1, deepest + 1)]
    last = run_native(view(encoder, range(1, deepest + 1), tapped), **arguments).last_hidden_state
    return deepest, outputs, last


def static_states(
    encoder: PreTrainedModel, inputs: Mapping[str, torch.Tensor], flattened: Flattened | None
) -> torch.Tensor:
    """The static hidden states of a batch, in a shape that broadcasts to those of its tokens, also `flattened`."""
    if "input_ids" not in inputs:
        raise ValueError("Layers that read the static table need input_ids, or static_states beside inputs_embeds.")
    if flattened is None and DOCUMENTS not in inputs:
        return encoder.static_states(inputs["input_ids"], inputs.get("attention_mask"))
    row = flattened or Flattened.of(inputs, 0)
    static = encoder.static_states(row.inputs["input_ids"], cu_seq_lens=row.inputs["cu_seq_lens_q"])
    return static if flattened is not None else row.padded(static)
