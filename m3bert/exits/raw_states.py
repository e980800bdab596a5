"""The hidden states of an encoder whose depths are fitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ..encode.device import autocast
from ..encode.padded_batches import TOKENS_PER_TEXT, PassCost, in_row_order, padded_chunks
from ..encode.states import Pooling, StateKey, nested_states


Key = TypeVar("Key", int, StateKey)


@dataclass(frozen=True)
class RawStates:
    """The hidden states of an encoder before any exit. The options are those of [`fit_exits`]."""

    encoder: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pooling: Pooling
    batch_size: int
    compute_dtype: torch.dtype | None = None

    def batches(self, ids: list[list[int]]) -> Iterator[tuple[list[int], BatchEncoding]]:
        """Indices and inputs of texts, which are given by their token ids, in batches of similar length."""
        device = self.encoder.device
        cost = PassCost.on(device).limited(self.batch_size * TOKENS_PER_TEXT)
        for chunk, inputs in padded_chunks(self.tokenizer, ids, cost):
            yield chunk, inputs.to(device)

    def pooled(self, ids: list[list[int]], layers: Sequence[Key], *, exits: bool = False) -> dict[Key, torch.Tensor]:
        """Layer -> pooled hidden states of texts `(texts, width)`, which are given by their token ids: before the
        exits, or after them."""
        if not ids:  # a rank without queries
            like = torch.promote_types(self.encoder.dtype, torch.float32)
            empty = torch.zeros(0, self.encoder.config.hidden_size, dtype=like, device=self.encoder.device)
            return dict.fromkeys(layers, empty)
        chunks: list[list[int]] = []
        vectors: dict[Key, list[torch.Tensor]] = {layer: [] for layer in layers}
        for chunk, inputs in self.batches(ids):
            with autocast(self.encoder.device, self.compute_dtype):
                states = nested_states(self.encoder, inputs, layers, exits=exits)
            chunks.append(chunk)
            for layer in layers:
                vectors[layer].append(states.pooled(layer, self.pooling))
        return {layer: in_row_order(parts, chunks) for layer, parts in vectors.items()}
