"""
The only place that turns a backbone's outputs into nested states, prefixes and pooled embeddings.

A *state* of layer l is, for a pre-norm backbone, the layer's output passed through the model's final norm at full
width; for a post-norm one, the layer's output. Slicing comes after, so every granularity is a plain prefix of one
tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel


Pooling = Literal["mean", "anchor"]
POOLINGS = ("mean", "anchor")


@dataclass(frozen=True)
class Family:
    """How a family of backbones ends: the name of its final norm (`None` for post-norm), and which token has seen
    all."""

    final_norm: str | None = None
    causal: bool = False


FAMILIES = {
    "m3bert": Family(final_norm="norm"),  # an identity in a post-norm m3BERT
    "modernbert": Family(final_norm="final_norm"),
    "eurobert": Family(final_norm="norm"),
    "qwen3": Family(final_norm="norm", causal=True),
    **dict.fromkeys(
        (
            "bert",
            "roberta",
            "xlm-roberta",
            "camembert",
            "data2vec-text",
            "electra",
            "distilbert",
            "mpnet",
        ),
        Family(),
    ),
}


@dataclass(frozen=True)
class NestedStates:
    """
    The states of one batch of texts at the layers that were asked for.

    Args:
        layers (`dict[int, torch.Tensor]`): Layer -> state of shape `(batch, tokens, hidden_size)`.
        attention_mask (`torch.Tensor` of shape `(batch, tokens)`): 1 for real tokens.
        causal (`bool`): Whether the anchor is the last real token (causal backbones) or the first one.
    """

    layers: Mapping[int, torch.Tensor]
    attention_mask: torch.Tensor
    causal: bool = False

    def pooled(self, layer: int, pooling: Pooling = "mean") -> torch.Tensor:
        """
        One vector a text at full width, to be sliced with [`prefix`]. An empty text gives zeros, never NaN.

        Args:
            layer (`int`): One of `layers`.
            pooling (`str`): `"mean"` over real tokens, or `"anchor"`.

        Returns:
            `torch.Tensor` of shape `(batch, hidden_size)`, in float32 at least.

        Raises:
            ValueError: if the pooling is unknown.
        """
        state = self.layers[layer]
        # A mean over hundreds of tokens loses digits in half precision.
        state = state.to(torch.promote_types(state.dtype, torch.float32))
        mask = self.attention_mask
        if pooling == "mean":
            total = torch.einsum("btd,bt->bd", state, mask.to(state.dtype))
            return total / mask.sum(dim=1, keepdim=True).clamp(min=1)
        if pooling == "anchor":
            return state[torch.arange(state.shape[0], device=state.device), self.anchor_positions()]
        raise ValueError(f"pooling={pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")

    def anchor_positions(self) -> torch.Tensor:
        """Position of each text's anchor, `(batch,)`: its first real token, or its last for causal backbones."""
        real = self.attention_mask.to(torch.int8)
        if self.causal:
            return real.shape[1] - 1 - real.flip(1).argmax(dim=1)
        return real.argmax(dim=1)


@dataclass(frozen=True)
class PooledStates:
    """
    The pooled embeddings of one batch of texts, without the token states behind them: what is left of
    [`NestedStates`] where those have no room.

    Args:
        layers (`dict[int, torch.Tensor]`): Layer -> pooled embeddings of shape `(batch, hidden_size)`.
        pooling (`str`): How they were pooled.
    """

    layers: Mapping[int, torch.Tensor]
    pooling: Pooling

    def pooled(self, layer: int, pooling: Pooling = "mean") -> torch.Tensor:
        """
        As [`NestedStates.pooled`].

        Raises:
            ValueError: if the embeddings were pooled otherwise.
        """
        if pooling != self.pooling:
            raise ValueError(f"These embeddings were pooled with {self.pooling!r}; {pooling!r} needs token states.")
        return self.layers[layer]


@dataclass(frozen=True)
class ProjectedStates:
    """
    States whose embedding is a projection of the last layer's pooled one.

    Args:
        states ([`NestedStates`] or [`PooledStates`]): Of the backbone.
        projection (`nn.Module`): From `(batch, hidden_size)` to `(batch, dim)`.
        depth (`int`): The layer whose pooled embedding is projected; others stay as they are.
    """

    states: TextStates
    projection: nn.Module
    depth: int

    @property
    def layers(self) -> Mapping[int, torch.Tensor]:
        return self.states.layers

    def pooled(self, layer: int, pooling: Pooling = "mean") -> torch.Tensor:
        """As [`NestedStates.pooled`], projected at the last layer."""
        vectors = self.states.pooled(layer, pooling)
        return self.projection(vectors) if layer == self.depth else vectors


TextStates = NestedStates | PooledStates | ProjectedStates


def prefix(vectors: torch.Tensor, dim: int, normalize: bool = False) -> torch.Tensor:
    """
    The first `dim` entries of `vectors` `(..., hidden_size)`, then L2-normalised if asked: in this order, so that the
    cosine of two prefixes is their own and not a part of the full vectors'.
    """
    sliced = vectors[..., :dim]
    return nn.functional.normalize(sliced, dim=-1) if normalize else sliced


def unwrap_encoder(model: nn.Module) -> PreTrainedModel:
    """The bare encoder of a model that may have a head and peft adapters (which stay active inside of it)."""
    if not isinstance(model, PreTrainedModel):
        model = model.get_base_model()
    return model.base_model


def family_of(config: Any) -> Family:
    """
    How backbones of this config end.

    Raises:
        ValueError: for an unknown model type; guessing where the final norm is would change every number after it.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(f"Nested states of {config.model_type!r} are not known; known: {', '.join(FAMILIES)}.")
    return FAMILIES[config.model_type]


def nested_states(model: nn.Module, inputs: Mapping[str, torch.Tensor], layers: Iterable[int]) -> NestedStates:
    """
    Run a backbone once and take its states at several layers.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): Any known family, with or without a head.
        inputs (`Mapping[str, torch.Tensor]`): What the tokenizer made: `input_ids`, `attention_mask`, ...
        layers (`Iterable[int]`): Layers to read, in 0..depth; 0 is the embedding layer, whose state is its output.

    Returns:
        [`NestedStates`]

    Raises:
        ValueError: if a layer is outside the model or its family is unknown.
    """
    encoder, layers = unwrap_encoder(model), sorted(set(layers))
    family, depth = family_of(encoder.config), encoder.config.num_hidden_layers
    if not layers or layers[0] < 0 or layers[-1] > depth:
        raise ValueError(f"layers={layers} must be within 0..{depth}; 0 is the embedding layer.")

    early_exit = {}
    if encoder.config.model_type == "m3bert":
        if layers[-1] in encoder.config.legal_layers:
            depth = early_exit["output_layer"] = layers[-1]
        early_exit["output_dim"] = encoder.config.hidden_size
    outputs = encoder(**inputs, **early_exit, output_hidden_states=layers, return_dict=True)

    norm = encoder.get_submodule(family.final_norm) if family.final_norm is not None else nn.Identity()
    # The library hands out the last hidden state behind the final norm, all others before it.
    states = {layer: outputs.hidden_states[layer] for layer in layers if layer < depth}
    states = {layer: norm(state) if layer else state for layer, state in states.items()}
    if layers[-1] == depth:
        states[depth] = outputs.last_hidden_state
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones(
            outputs.last_hidden_state.shape[:2], dtype=torch.long, device=outputs.last_hidden_state.device
        )
    return NestedStates(states, mask, family.causal)
