"""
The feed-forward network at the end of an encoder's layers, found by running it: its output matrix, the norms around
it, and how its hidden units are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ..modeling.parts_elastic import layer_list
from .anatomy import Calls, equal, hidden_of, probe_ids, probing, recorded


@dataclass(frozen=True)
class Inner:
    """
    The hidden units of a feed-forward network: `activation(a)`, or with a gate `activation(a) * b`, where a and b are
    linear in what the network reads. `names` are the linear layers of a, or of a and b, or the one that makes both; b
    comes first in it if they are `swapped`.
    """

    names: tuple[str, ...]
    activation: str
    swapped: bool = False

    def parts(self, made: Sequence[torch.Tensor], count: int, dim: int = -1) -> list[torch.Tensor]:
        """a, and b if there is a gate, of what the linear layers make; or the rows of their weights or biases that
        make them, along another dim. `count` is the number of hidden units."""
        if len(made) == 1 and made[0].shape[dim] == 2 * count:
            made = made[0].chunk(2, dim=dim)
        return [*reversed(made)] if self.swapped else [*made]

    def joined(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The inverse of [`Inner.parts`], for rows of weights or biases."""
        parts = [*reversed(parts)] if self.swapped else [*parts]
        return parts if len(parts) == len(self.names) else [torch.cat(parts)]

    def units(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The hidden units."""
        active = ACT2FN[self.activation](parts[0])
        return active if len(parts) == 1 else active * parts[1]


@dataclass(frozen=True)
class FeedForward:
    """
    The end of a layer: its output is `y + W g`, or a norm of it, where W is the output matrix of the feed-forward
    network, g what it reads and y the residual. Where a norm is `behind` W, its output is `y + norm(W g)`. `norm` is
    the closing norm of a post-norm layer, and `inner` how g is made, if it is known. Modules are named in the layer.
    """

    output: str
    norm: str | None
    behind: str | None = None
    inner: Inner | None = None


def feed_forward_of(encoder: PreTrainedModel) -> FeedForward:
    """The end of an encoder's layers, proved on each of them: a change of the output of W arrives unchanged in the
    layer's output, or in front of its closing norm. Raises a ValueError if there is no such matrix, or not the same in
    all layers."""
    name, layers = layer_list(encoder, encoder.config.num_hidden_layers)
    ids = probe_ids(encoder)
    with probing(encoder):
        calls, _ = recorded(encoder, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        ends = {_end_of(layer, f"{name}.{number}", calls, encoder.config) for number, layer in enumerate(layers)}
    end = ends.pop()
    if end is None or ends:
        raise ValueError(
            f"The layers of {type(encoder).__name__} do not end in a matrix that is added to a residual, so a path "
            "cannot be refitted there. Prefixes, and paths of layers as they are, work."
        )
    return end


def _end_of(layer: nn.Module, path: str, calls: Calls, config: PretrainedConfig) -> FeedForward | None:
    args, kwargs, result = calls[path]
    result = hidden_of(result)
    called = [name for name in calls if name.startswith(f"{path}.")]  # in the order in which they returned
    inside = {name.removeprefix(f"{path}."): calls[name] for name in called}
    linear = [name for name in inside if isinstance(layer.get_submodule(name), nn.Linear)]
    norms = [name for name, (_, _, output) in inside.items() if equal(output, result)]
    norm = norms[0] if norms and isinstance(inside[norms[0]][0][0], torch.Tensor) else None
    before = inside[norm][0][0] if norm is not None else result
    shift = torch.randn_like(result) * result.std()
    for output in reversed(linear):
        for behind in (None, *_norms_of(layer, inside, inside[output][2])):
            if inside[output][2].shape != result.shape:
                continue
            end = _rerun(layer, args, kwargs, behind or output, shift, norm)
            if torch.allclose((end - before).float(), shift.float(), rtol=1e-2, atol=1e-3 * float(shift.std())):
                return FeedForward(output, norm, behind, _inner_of(inside, linear, inside[output][0][0], config))
    return None


def _norms_of(layer: nn.Module, inside: Calls, state: torch.Tensor) -> list[str]:
    """Names of the modules that read this hidden state, whatever its scale."""
    readers = [name for name, (args, _, _) in inside.items() if args and equal(args[0], state)]
    modules = {name: layer.get_submodule(name) for name in readers}
    return [
        name
        for name, module in modules.items()
        if getattr(module, "weight", None) is not None
        and module.weight.shape == state.shape[-1:]
        and torch.allclose(module(100 * state), module(10 * state), rtol=1e-2)
    ]


def _rerun(
    layer: nn.Module, args: Any, kwargs: Any, output: str, shift: torch.Tensor, norm: str | None
) -> torch.Tensor:
    """The output of a layer, or the input of its closing norm, when something is added to the output of a matrix."""
    read: list[torch.Tensor] = []
    with layer.get_submodule(output).register_forward_hook(lambda module, inputs, result: result + shift):
        if norm is None:
            return hidden_of(layer(*args, **kwargs))
        with layer.get_submodule(norm).register_forward_pre_hook(lambda module, inputs: read.append(inputs[0])):
            layer(*args, **kwargs)
    return read[-1]


def _inner_of(inside: Calls, linear: Sequence[str], hidden: torch.Tensor, config: PretrainedConfig) -> Inner | None:
    """How the hidden units are made, by the activations that the config names; `None` if in another way."""
    named = sorted({value for value in config.to_dict().values() if isinstance(value, str) and value in ACT2FN})
    count = hidden.shape[-1]
    fits = [name for name in linear if inside[name][2].shape[-1] in (count, 2 * count)]
    for names in (*((name,) for name in fits), *permutations(fits, 2)):
        made = [inside[name][2] for name in names]
        if not equal(inside[names[0]][0][0], inside[names[-1]][0][0]):
            continue
        for activation, swapped in product(named, (False, True)):
            inner = Inner(names, activation, swapped)
            parts = inner.parts(made, count)
            if all(part.shape == hidden.shape for part in parts):
                if torch.allclose(inner.units(parts), hidden, rtol=1e-3, atol=1e-5):
                    return inner
    return None
