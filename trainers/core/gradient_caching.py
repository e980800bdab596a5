"""
Gradient caching: train on batches whose activations do not fit in memory (GradCache,
[2101.06983](https://huggingface.co/papers/2101.06983)).

A contrastive loss needs the embeddings of the whole batch, but not the activations of the encoder. Three steps:

1. Encode mini-batches without a graph and keep only their embeddings.
2. Compute the loss and the gradients of the embeddings.
3. Encode each mini-batch again with the same random state, and backpropagate its gradients into the encoder.

All mini-batches are one autograd function of the encoder's parameters. Activation checkpointing per mini-batch would
keep one graph per mini-batch, so memory would still grow with the batch. One backward pass per mini-batch would reduce
every gradient once per mini-batch under data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from .states import PooledStates, Pooling, nested_states


Rows = dict[str, torch.Tensor]
Encode = Callable[[Rows], tuple[torch.Tensor, ...]]


def cached_states(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    layers: Iterable[int],
    pooling: Pooling,
    mini_batch_size: int,
) -> PooledStates:
    """
    Pooled states at several layers, encoded in mini-batches. Values and gradients are those of encoding all texts at
    once. The memory is that of the activations of one mini-batch; the cost is one more forward pass.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The encoder. Its trainable parameters must be leaf
            tensors; sharded parameters (FSDP) are not.
        inputs (`Mapping[str, torch.Tensor]`): Output of the tokenizer, one text per row.
        layers (`Iterable[int]`): Layers to read.
        pooling (`str`): `"mean"`, `"cls"` or `"lasttoken"`.
        mini_batch_size (`int`): Number of texts to encode at a time.

    Returns:
        [`PooledStates`]

    Raises:
        ValueError: as [`nested_states`], or if the encoder uses re-entrant activation checkpointing.
    """
    layers = sorted(set(layers))

    def encode(rows: Rows) -> tuple[torch.Tensor, ...]:
        states = nested_states(model, rows, layers)
        return tuple(states.pooled(layer, pooling) for layer in layers)

    batches = []
    for start in range(0, len(next(iter(inputs.values()))), mini_batch_size):
        rows = {name: value[start : start + mini_batch_size] for name, value in inputs.items()}
        batches.append(_without_padding(rows))
    return PooledStates(dict(zip(layers, _encode_all(encode, batches), strict=True)), pooling)


def _encode_all(encode: Encode, batches: list[Rows]) -> tuple[torch.Tensor, ...]:
    if not torch.is_grad_enabled():
        return _concatenated(encode(rows) for rows in batches)
    # The graph of the first mini-batch shows which parameters are used; the others must not get a gradient.
    replay = _Replay(batches[0])
    with_graph = encode(batches[0])
    parameters = _leaves(with_graph)
    first = tuple(output.detach() for output in with_graph)
    del with_graph
    if not parameters:
        return _concatenated([first, *(encode(rows) for rows in batches[1:])])
    return _CachedEncode.apply(encode, batches, parameters, first, replay, *parameters)


class _CachedEncode(torch.autograd.Function):
    """The pooled states of all mini-batches as one function of the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        encode: Encode,
        batches: list[Rows],
        parameters: list[torch.Tensor],
        first: tuple[torch.Tensor, ...],
        replay: _Replay,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.encode, ctx.batches, ctx.parameters, ctx.replays = encode, batches, parameters, [replay]
        outputs = [first]
        for rows in batches[1:]:
            ctx.replays.append(_Replay(rows))
            outputs.append(encode(rows))
        return _concatenated(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        totals: list[torch.Tensor | None] = [None] * len(ctx.parameters)
        start = 0
        for rows, replay in zip(ctx.batches, ctx.replays, strict=True):
            with torch.enable_grad(), replay.again():
                outputs = ctx.encode(rows)
            stop = start + len(outputs[0])
            shares = torch.autograd.grad(
                outputs, ctx.parameters, [grad[start:stop] for grad in grads], allow_unused=True
            )
            start = stop
            for index, share in enumerate(shares):
                total = totals[index]
                if total is None:
                    totals[index] = share
                elif share is not None:
                    total += share
        return (*[None] * 5, *totals)


class _Replay:
    """Records the current random state and autocast setting, and restores them in [`again`]."""

    def __init__(self, rows: Rows) -> None:
        self.host = torch.get_rng_state()
        self.devices, self.states = get_device_states(rows)
        self.device_type = next(iter(rows.values())).device.type
        self.autocast: dict[str, Any] = {
            "enabled": torch.is_autocast_enabled(self.device_type),
            "dtype": torch.get_autocast_dtype(self.device_type),
        }

    @contextmanager
    def again(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=self.devices), torch.autocast(self.device_type, **self.autocast):
            torch.set_rng_state(self.host)
            if self.devices:
                set_device_states(self.devices, self.states, device_type=self.device_type)
            yield


def _leaves(outputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """
    The leaf tensors of a graph, which accumulate gradients.

    Raises:
        ValueError: if re-entrant activation checkpointing hides the leaves.
    """
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, leaves = set(waiting), []
    while waiting:
        node = waiting.pop()
        if type(node).__name__ == "CheckpointFunctionBackward":
            raise ValueError(
                "Gradient caching needs activation checkpointing that is not re-entrant: "
                "gradient_checkpointing_kwargs={'use_reentrant': False}."
            )
        if hasattr(node, "variable"):  # only AccumulateGrad nodes have it
            leaves.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return leaves


def _concatenated(outputs: Iterable[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


def _without_padding(rows: Rows) -> Rows:
    """Rows without the columns on the right that are padding in every row. Padding on the left stays, because it
    determines positions."""
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
