"""
Gradient caching: batches larger than what the encoder's activations have room for.

A contrastive loss needs the embeddings of the whole batch, but not the activations behind them. So mini-batches are
encoded one after the other and only their embeddings kept; when the loss has given the embeddings' gradients, each
mini-batch is encoded again, with the same random state, and its share goes on into the encoder
(GradCache, [2101.06983](https://huggingface.co/papers/2101.06983)). That is activation checkpointing with a mini-batch
as the segment, so the library's does it: the random state of the host and of the device is replayed, autocast is
kept, and under data parallelism each parameter is reduced once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .nested import PooledStates, Pooling, nested_states


def cached_states(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    layers: Iterable[int],
    pooling: Pooling,
    mini_batch_size: int,
) -> PooledStates:
    """
    Pooled states at several layers, encoded in mini-batches. The same values and gradients as encoding all texts at
    once, for the activations of one mini-batch and one more forward pass.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The encoder.
        inputs (`Mapping[str, torch.Tensor]`): What the tokenizer made, a text a row.
        layers (`Iterable[int]`): Layers to read.
        pooling (`str`): `"mean"` or `"anchor"`.
        mini_batch_size (`int`): Texts at a time.

    Returns:
        [`PooledStates`]

    Raises:
        ValueError: as [`nested_states`].
    """
    layers = sorted(set(layers))

    def encode(rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        states = nested_states(model, rows, layers)
        return tuple(states.pooled(layer, pooling) for layer in layers)

    pooled = []
    for start in range(0, len(next(iter(inputs.values()))), mini_batch_size):
        rows = _without_padding({name: value[start : start + mini_batch_size] for name, value in inputs.items()})
        # Without gradient there is nothing to encode again.
        again = torch.is_grad_enabled()
        pooled.append(checkpoint(encode, rows, use_reentrant=False) if again else encode(rows))
    return PooledStates(
        {layer: torch.cat(parts) for layer, parts in zip(layers, zip(*pooled, strict=True), strict=True)}, pooling
    )


def _without_padding(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows cut to the last token that is real in any of them; padding on the left stays, for the positions' sake."""
    mask = rows.get("attention_mask")
    if mask is None:
        return rows
    real = mask.any(dim=0).nonzero()
    longest = int(real[-1]) + 1 if len(real) else 1
    width = mask.shape[1]
    return {
        name: value[:, :longest] if value.ndim > 1 and value.shape[1] == width else value
        for name, value in rows.items()
    }
