"""Encode texts once for every granularity of a grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..nested import Pooling, nested_states


@torch.no_grad()
def encode_layers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    layers: Iterable[int],
    *,
    pooling: Pooling = "mean",
    batch_size: int = 64,
    max_length: int | None = None,
    description: str | None = None,
) -> dict[int, torch.Tensor]:
    """
    Pooled embeddings of texts at several layers, from one forward. Every dim of a grid is a prefix of them.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The encoder; runs in eval mode and is left in its own.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        texts (`Sequence[str]`): Texts; an empty one is encoded as an empty sequence.
        layers (`Iterable[int]`): Layers to read.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` or `"anchor"`.
        batch_size (`int`, *optional*, defaults to 64): Texts at a time, of similar length.
        max_length (`int`, *optional*): Longest text in tokens; `None` is the tokenizer's own limit.
        description (`str`, *optional*): Words before the progress bar; `None` shows no bar.

    Returns:
        `dict[int, torch.Tensor]`: layer -> embeddings of shape `(texts, hidden_size)`, on the CPU, not normalised.

    Raises:
        ValueError: if there is no text, or a layer is outside the model.
    """
    if not texts:
        raise ValueError("There is no text to encode.")
    layers = sorted(set(layers))
    device = next(model.parameters()).device
    # Texts of similar length share a batch, so that little of it is padding.
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
    embeddings: dict[int, torch.Tensor] = {}
    was_training = model.training
    model.eval()
    starts = range(0, len(texts), batch_size)
    for start in tqdm(starts, desc=description, disable=description is None, leave=False):
        rows = order[start : start + batch_size]
        limit: dict[str, Any] = {} if max_length is None else {"max_length": max_length}
        inputs = tokenizer(
            [texts[row] for row in rows],
            padding=True,
            truncation=True,
            return_token_type_ids=False,
            return_tensors="pt",
            **limit,
        ).to(device)
        states = nested_states(model, inputs, layers)
        for layer in layers:
            pooled = states.pooled(layer, pooling).cpu()
            if layer not in embeddings:
                embeddings[layer] = pooled.new_empty((len(texts), pooled.shape[1]))
            embeddings[layer][rows] = pooled
    model.train(was_training)
    return embeddings
