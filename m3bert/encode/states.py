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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.configuration_elastic import Elasticity, resolve_size
from ..modeling.parts_elastic import layer_list, view
from ..models.anatomy import Resumed, Tapped, anatomy_of, run_native
from ..models.conversion import OFFSET_POSITIONS
from ..models.settings import POOLINGS, Pooling
from ..utils.numerics import precise
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
        if pooling == "cls" and self.causal:
            raise ValueError(
                "pooling='cls' reads the first token, which attends to no other token in a causal model: use "
                "'lasttoken' or 'mean'."
            )
        state, mask = precise(self.layers[layer]), self.attention_mask
        if pooling == "mean":
            total = torch.bmm(mask.to(state.dtype)[:, None], state)[:, 0]  # einsum would multiply by transposed states
            vectors = total / mask.sum(dim=1, keepdim=True).clamp(min=1)
        else:
            positions = self.first_positions() if pooling == "cls" else self.last_positions()
            vectors = state[torch.arange(state.shape[0], device=state.device), positions]
        return self.projections[layer](vectors) if layer in self.projections else vectors

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
        layers = {key: projection(part) if depth_of(key) == layer else part for key, part in self.layers.items()}
        return replace(self, layers=layers)

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


def reads_table(config: EncoderConfig, layers: Iterable[StateKey]) -> bool:
    """Whether one of these depths reads the static table of an elastic model."""
    return not {*Elasticity.of(config).table}.isdisjoint(layers)


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


def longest_text(config: EncoderConfig, tokenizer: PreTrainedTokenizerBase, published: int | None = None) -> int:
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
        raise ValueError(
            f"layers={keys} must be within 0..{last}; 0 is the static table, or the input of the first layer."
        )
    spec = spec if exits else Elasticity(spec.depths)
    batch = Prepared.of(encoder, inputs)
    raw = raw_states(encoder, batch.arguments, [depth for depth in depths if depth > 0 or 0 not in spec.table], spec)
    states = with_exits(encoder, batch, keys, raw) if spec.exits else {key: raw[depth_of(key)] for key in keys}
    if batch.flattened is not None:
        states = {key: batch.flattened.padded(state) for key, state in states.items()}
    mask = batch.mask
    if mask is None:
        first_state = next(iter(states.values()))
        mask = torch.ones(first_state.shape[:2], dtype=torch.long, device=first_state.device)
    return NestedStates(states, mask, anatomy_of(encoder).causal, packed=DOCUMENTS in inputs)


@dataclass(frozen=True)
class Prepared:
    """A batch as an encoder reads it: the arguments of the encoder, the mask of real tokens if there is one, and, for
    flash attention, the texts flattened into one row."""

    inputs: Mapping[str, torch.Tensor]
    arguments: Mapping[str, Any]
    mask: torch.Tensor | None
    flattened: Flattened | None = None

    @classmethod
    def of(cls, encoder: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> Prepared:
        config, mask, first = encoder.config, inputs.get("attention_mask"), first_position(encoder.config)
        arguments = {name: value for name, value in inputs.items() if name != "static_states"}
        if DOCUMENTS in inputs:
            check_packable(config)
            mask = (inputs[DOCUMENTS] > 0).long()
        if is_flash(config._attn_implementation) and mask is not None:
            flattened = Flattened.of(arguments, first)
            return cls(inputs, flattened.inputs, mask, flattened)
        if DOCUMENTS in inputs:
            causal = anatomy_of(encoder).causal
            arguments = packed_arguments(config, arguments, first_position=first, causal=causal, dtype=encoder.dtype)
        return cls(inputs, arguments, mask)

    @property
    def shape(self) -> torch.Size:
        """Texts and tokens, as the encoder reads them."""
        return self.arguments["input_ids" if "input_ids" in self.arguments else "inputs_embeds"].shape[:2]

    def static_states(self, encoder: PreTrainedModel) -> torch.Tensor:
        """The static vectors of the texts, in a shape that broadcasts to the hidden states of their tokens."""
        row, given = self.flattened, self.inputs.get("static_states")
        if given is not None:
            return given if row is None else given.expand(*row.real.shape, -1)[row.real].unsqueeze(0)
        if "input_ids" not in self.inputs:
            raise ValueError("Layers that read the static table need input_ids, or static_states with inputs_embeds.")
        if row is None and DOCUMENTS not in self.inputs:
            return encoder.static_states(self.inputs["input_ids"], self.mask)
        row = row or Flattened.of(self.inputs, 0)
        static = encoder.static_states(row.inputs["input_ids"], cu_seq_lens=row.inputs["cu_seq_lens_q"])
        return row.padded(static) if self.flattened is None else static


def with_exits(
    encoder: PreTrainedModel, batch: Prepared, keys: Iterable[StateKey], raw: Mapping[int, torch.Tensor]
) -> dict[StateKey, torch.Tensor]:
    """The hidden states of an elastic encoder from those before the exits, which lack the static table's."""
    static = batch.static_states(encoder) if reads_table(encoder.config, keys) else None
    states: dict[StateKey, torch.Tensor] = {}
    for key in keys:
        if isinstance(key, StateOnly):
            states[key] = encoder.elastic.exit(key.depth)(raw[key.depth])
        elif key in raw:
            states[key] = encoder.exit_state(key, raw[key], static=static)
        else:
            assert static is not None  # only the table's depth is missing
            states[key] = static.expand(*batch.shape, -1)
    return states


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
