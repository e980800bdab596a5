"""
Gradient caching: train on batches whose activations do not fit in memory (GradCache,
[2101.06983](https://huggingface.co/papers/2101.06983)).

A contrastive loss needs the embeddings of the whole batch, but not the activations of the encoder. Three steps:

1. Encode mini-batches without a graph and keep only their embeddings.
2. Compute the loss and the gradients of the embeddings.
3. Encode each mini-batch again with the same random state, and backpropagate its gradients into the encoder:

       stand_ins = a leaf per parameter, which shares its values but not its gradient and hooks
       for mini-batch, its random state, gradients of its embeddings:
           encode(mini-batch, stand_ins).backward(gradients)      # adds to stand_in.grad
       return each stand_in.grad as the gradient of its parameter

All mini-batches are one autograd function of the encoder's parameters. Activation checkpointing per mini-batch would
keep one graph per mini-batch, so memory would still grow with the batch. One backward pass per mini-batch would reduce
every gradient once per mini-batch under data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import get_device_states, set_device_states

from ...encode.states import Pooling, StateKey, nested_states, readable, unwrap_encoder


Rows = dict[str, torch.Tensor]


def cached_vectors(
    model: nn.Module, batches: Sequence[Rows], layers: Iterable[StateKey], pooling: Pooling
) -> dict[StateKey, torch.Tensor]:
    """
    Pooled hidden states of mini-batches, one text per row, at several layers: layer -> embeddings `(texts,
    hidden_size)`. Values and gradients equal encoding all texts at once, with the memory for the activations of one
    mini-batch, and one more forward pass. Every parameter's gradient hooks, such as for data parallelism, run once,
    with the sum over the mini-batches. Trainable parameters must be leaf tensors; sharded parameters (FSDP) are not.

    Raises:
        ValueError: as [`nested_states`], or if the encoder uses re-entrant activation checkpointing.
    """
    layers = readable(unwrap_encoder(model).config, layers)
    encoder = _PooledEncoder(model, layers, pooling)
    if len(batches) == 1 or not torch.is_grad_enabled():
        return dict(zip(layers, _concatenated(map(encoder, batches)), strict=True))
    # The graph of the first mini-batch shows which parameters are used; the others must not get a gradient.
    replay = _Replay(batches[0])
    with_graph = encoder(batches[0])
    leaves = {id(leaf) for leaf in _leaves(with_graph)}
    parameters = {name: parameter for name, parameter in encoder.named_parameters() if id(parameter) in leaves}
    first = tuple(output.detach() for output in with_graph)
    del with_graph
    if not parameters:
        outputs = _concatenated([first, *map(encoder, batches[1:])])
    else:
        outputs = _CachedEncode.apply(encoder, batches, parameters, first, replay, *parameters.values())
    return dict(zip(layers, outputs, strict=True))


class _PooledEncoder(nn.Module):
    """Pooled hidden states of a mini-batch, one tensor per layer, and their backward pass."""

    def __init__(self, model: nn.Module, layers: Sequence[StateKey], pooling: Pooling) -> None:
        super().__init__()
        self.model, self.layers, self.pooling = model, layers, pooling

    def forward(
        self, rows: Rows, replay: _Replay | None = None, grads: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, ...]:
        if replay is None:
            return self.pooled(rows)
        with torch.enable_grad(), replay.again():
            outputs = self.pooled(rows)
        torch.autograd.backward(outputs, grads)  # not under autocast, as in any training step
        return outputs

    def pooled(self, rows: Rows) -> tuple[torch.Tensor, ...]:
        states = nested_states(self.model, rows, self.layers)
        return tuple(states.pooled(layer, self.pooling) for layer in self.layers)


class _CachedEncode(torch.autograd.Function):
    """The pooled hidden states of all mini-batches as one function of the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        encoder: _PooledEncoder,
        batches: Sequence[Rows],
        parameters: dict[str, nn.Parameter],
        first: tuple[torch.Tensor, ...],
        replay: _Replay,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.encoder, ctx.batches, ctx.replays, ctx.parameters = encoder, batches, [replay], parameters
        outputs = [first]
        for rows in batches[1:]:
            ctx.replays.append(_Replay(rows))
            outputs.append(encoder(rows))
        return _concatenated(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sizes = [len(next(iter(rows.values()))) for rows in ctx.batches]
        parts = zip(*(grad.split(sizes) for grad in grads), strict=True)
        stand_ins = {name: parameter.detach().requires_grad_() for name, parameter in ctx.parameters.items()}
        for rows, replay, part in zip(ctx.batches, ctx.replays, parts, strict=True):
            functional_call(ctx.encoder, stand_ins, (rows, replay, part))
        return (*[None] * 5, *(stand_in.grad for stand_in in stand_ins.values()))


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
    """The leaf tensors of a graph, which accumulate gradients. ValueError if re-entrant checkpointing hides them."""
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
