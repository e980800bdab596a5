"""
The only module that turns a backbone's outputs into nested states, prefixes and pooled embeddings.

The *state* of a depth is the output of its last layer; in a pre-norm backbone it also passes through the model's final
norm, at full width, and in an elastic one through the exit of the depth, if it has one. States are truncated
afterwards, so every granularity is a prefix of one tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from modeling_m3bert.anatomy_m3bert import Resumed, Tapped, anatomy_of, run_native
from modeling_m3bert.conversion_m3bert import OFFSET_POSITIONS
from modeling_m3bert.modeling_elastic import Elasticity, layer_list, resolve_size, view
from modeling_m3bert.settings_m3bert import POOLINGS, Pooling

from .encoding.packed_rows import DOCUMENTS, Flattened, check_packable, flattened_documents, packed_arguments
from .granularity import EncoderConfig


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
    fitted = (Elasticity.of(config).fit or {}).get("pooling", pooling)
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
    """
    The transformer layers of a model's encoder.

    Raises:
        ValueError: if it has no list of them.
    """
    encoder = unwrap_encoder(model)
    depth = encoder.config.num_hidden_layers
    return list(layer_list(encoder, depth)[1]) if depth else []


def width_of(config: Any) -> int:
    """Dims of the states that a model of this config returns by default."""
    return resolve_size(config)[1]


def shared_layers(config: EncoderConfig) -> list[int]:
    """
    Depths whose states are in one space, ascending: the last layer and those with an exit into its space. Vectors of
    two of them can be compared. Without exits, only the last layer.
    """
    return sorted({*Elasticity.of(config).exits, config.num_hidden_layers})


def reads_table(config: EncoderConfig, layers: Iterable[int] | None = None) -> bool:
    """Whether one of these depths, by default any, reads the static table of an elastic model."""
    table = {*Elasticity.of(config).table}
    return bool(table) if layers is None else not table.isdisjoint(layers)


def state_only_layers(config: EncoderConfig, layers: Iterable[int]) -> list[int]:
    """Those of these depths whose exit has a state-only map beside the one that reads the static table, for native
    exports."""
    table = Elasticity.of(config).table
    return [layer for layer in layers if layer > 0 and layer in table]


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
    return (getattr(config, "max_position_embeddings", None) or sys.maxsize) - first_position(config)


def first_position(config: EncoderConfig) -> int:
    """Row of the position embeddings that the first token of a text reads."""
    return (config.pad_token_id or 0) + 1 if config.model_type in (*OFFSET_POSITIONS, "mpnet") else 0


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
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    layers: Iterable[int],
    state_only: bool = False,
    exits: bool = True,
) -> NestedStates:
    """
    Run a backbone once and return its states at several depths. With flash attention, the texts are flattened into one
    row without padding. Beside this one run, each path runs its layers from the first that is not as in the model.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): Any encoder of transformers that [`anatomy_of`]
            accepts, with or without a head.
        inputs (`Mapping[str, torch.Tensor]`): Output of the tokenizer: `input_ids`, `attention_mask`, ... Packed rows
            have `document_ids` in place of the mask: 1, 2, ... for the documents of a row, 0 for padding. If it has
            `static_states` of shape `(batch, 1, hidden_size)`, depths that read the static table read these.
        layers (`Iterable[int]`): Depths to read, in 0..N. 0 is the static table, or without one the input of the first
            layer.
        state_only (`bool`, *optional*, defaults to `False`): Also apply the state-only maps of these depths.
        exits (`bool`, *optional*, defaults to `True`): Apply the exits.

    Returns:
        [`NestedStates`]

    Raises:
        ValueError: if a depth is outside the model, or the model cannot be read, or not with packed rows.
    """
    encoder, layers = unwrap_encoder(model), sorted(set(layers))
    depth = encoder.config.num_hidden_layers
    if not layers or layers[0] < 0 or layers[-1] > depth:
        raise ValueError(f"layers={layers} must be within 0..{depth}; 0 is the embedding layer.")
    spec = Elasticity.of(encoder.config)
    if not exits:
        spec = Elasticity(spec.depths)
    run = _run_of(encoder, inputs, spec, layers)
    run_layers = [layer for layer in layers if layer > 0 or 0 not in spec.table]
    raw = raw_states(encoder, run.arguments, run_layers, spec) if run_layers else {}
    alone: dict[int, torch.Tensor] = {}
    if state_only:
        alone = {
            layer: encoder.elastic.exits[str(layer)](raw[layer]) for layer in layers if layer in spec.table and layer
        }
    states = dict(raw)
    if spec.exits:
        like = next(iter(raw.values())) if raw else run.like_tokens
        states = {layer: encoder.exit_state(layer, raw.get(layer, like), static=run.static) for layer in layers}
    if run.flattened is not None:
        states = {layer: run.flattened.padded(state) for layer, state in states.items()}
        alone = {layer: run.flattened.padded(state) for layer, state in alone.items()}
    mask = run.mask
    if mask is None:
        first = next(iter(states.values()))
        mask = torch.ones(first.shape[:2], dtype=torch.long, device=first.device)
    return NestedStates(states, mask, anatomy_of(encoder).causal, alone, packed=DOCUMENTS in inputs)


def raw_states(
    encoder: Any, arguments: Mapping[str, Any], depths: Sequence[int], spec: Elasticity
) -> dict[int, torch.Tensor]:
    """
    The hidden states of several depths before any exit, after the final norm; depth 0 is the input of the first layer.

    Args:
        encoder ([`~transformers.PreTrainedModel`]): An encoder.
        arguments (`dict`): Its arguments.
        depths (`Sequence[int]`): Depths.
        spec ([`Elasticity`]): Which layers they run.
    """
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
    encoder: Any, arguments: Mapping[str, Any], deepest: int
) -> tuple[int, Mapping[int, torch.Tensor], torch.Tensor]:
    """The number of layers that run, at least `deepest`; the output of each and, as 0, the input of the first; and the
    hidden state after all of them."""
    if torch.compiler.is_compiling() or getattr(encoder, "_compiled_call_impl", None) is not None:
        # A view would be compiled again at each call.
        hidden = encoder(**arguments, output_hidden_states=True, return_dict=True).hidden_states
        return encoder.config.num_hidden_layers, dict(enumerate(hidden)), hidden[-1]
    outputs: dict[int, torch.Tensor] = {}
    own = layer_list(encoder, encoder.config.num_hidden_layers)[1]
    tapped = [Tapped(own[number - 1], number, outputs) for number in range(1, deepest + 1)]
    last = run_native(view(encoder, range(1, deepest + 1), tapped), **arguments).last_hidden_state
    return deepest, outputs, last


@dataclass(frozen=True)
class _Run:
    """
    One run of an encoder.

    Args:
        arguments (`dict[str, Any]`): Arguments of the encoder.
        mask (`torch.Tensor`, *optional*): 1 for real tokens, `(batch, tokens)`.
        flattened ([`Flattened`], *optional*): The texts in one row, if the encoder reads them so.
        static (`torch.Tensor`, *optional*): Static states, in a shape that broadcasts to the token states.
    """

    arguments: dict[str, Any]
    mask: torch.Tensor | None
    flattened: Flattened | None
    static: torch.Tensor | None

    @property
    def like_tokens(self) -> torch.Tensor:
        """A tensor `(batch, tokens, 1)`, where no layer runs."""
        tokens = self.arguments.get("input_ids")
        return (self.arguments["inputs_embeds"][..., 0] if tokens is None else tokens)[..., None]


def _run_of(encoder: Any, inputs: Mapping[str, torch.Tensor], spec: Elasticity, layers: Sequence[int]) -> _Run:
    """How an encoder reads a batch. Arguments as of [`nested_states`]."""
    config = encoder.config
    first = first_position(config)
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
        causal = anatomy_of(encoder).causal
        arguments = packed_arguments(config, inputs, first_position=first, causal=causal, dtype=encoder.dtype)
    if not {*spec.table}.isdisjoint(layers):
        if static is None:
            static = static_states(encoder, inputs, flattened, first)
        elif flattened is not None:
            static = static.expand(-1, flattened.real.shape[1], -1)[flattened.real].unsqueeze(0)
    return _Run(arguments, mask, flattened, static)


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
