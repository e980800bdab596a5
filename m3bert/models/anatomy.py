"""
The parts of an encoder that depths need, found and proved by running it: the list of layers, the final norm, whether
attention is causal, and in each layer the output matrix of the feed-forward network.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations, product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from ..modeling.configuration_elastic import entries
from ..modeling.parts_elastic import layer_list, view


ANATOMY = "anatomy"  # its key in the config, under `elastic`
TOKENS = 8  # of the text that is run
_PROBED: WeakKeyDictionary[nn.Module, Anatomy] = WeakKeyDictionary()
Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]]  # module -> arguments, keywords, output


@dataclass(frozen=True)
class Anatomy:
    """
    The parts of an encoder that make its last hidden state.

    Args:
        final_norm (`str`, *optional*): Name of the norm after the last layer; `None` for a post-norm encoder.
        causal (`bool`): Whether a token attends only to itself and earlier tokens.
        resumes (`bool`): Whether a run can continue from the hidden state between two layers.
    """

    final_norm: str | None
    causal: bool
    resumes: bool


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


def anatomy_of(encoder: PreTrainedModel) -> Anatomy:
    """The anatomy of an encoder without a head: as its config has it since a fit, else probed once. Raises a
    ValueError if it has no list of layers, does not run on token ids alone, or does more than one norm after the last
    layer."""
    stored = entries(encoder.config).get(ANATOMY)
    if stored is not None and encoder.config.num_hidden_layers > 0:
        return Anatomy(**stored)
    if encoder not in _PROBED:
        _PROBED[encoder] = _probe(encoder)
    return _PROBED[encoder]


def store_anatomy(encoder: PreTrainedModel) -> None:
    """Write the anatomy of an elastic encoder into its config, so that it is not probed again."""
    encoder.config.elastic[ANATOMY] = asdict(anatomy_of(encoder))


def run_native(encoder: PreTrainedModel, *, hooks: bool = True, **arguments: Any) -> Any:
    """The native output of an encoder, or of a [`view`] of one, before any exit; on request without its own hooks."""
    if "use_cache" in inspect.signature(encoder.forward).parameters:
        arguments["use_cache"] = False
    if hasattr(encoder, "native_forward"):
        arguments["before_exit"] = True
    return (encoder if hooks else encoder.forward)(return_dict=True, **arguments)


def hidden_of(output: Any) -> torch.Tensor:
    """The hidden state that a layer returns, alone or as the first of several values."""
    return output[0] if isinstance(output, tuple) else output


@torch.compiler.disable  # values are compared, once per encoder
def _probe(encoder: PreTrainedModel) -> Anatomy:
    kind, depth = type(encoder).__name__, encoder.config.num_hidden_layers
    if depth == 0:
        return Anatomy(None, causal=False, resumes=True)
    name, layers = layer_list(encoder, depth)
    ids = probe_ids(encoder)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    try:
        with probing(encoder):
            calls, last = recorded(encoder, inputs)
            whole = run_native(view(encoder, range(1, depth + 1)), hooks=False, **inputs).last_hidden_state
            resumed = _resumed(encoder, layers, calls, name, inputs)
            changed = ids.clone()
            changed[:, -1] = ids[:, 0]
            others, _ = recorded(encoder, {**inputs, "input_ids": changed})
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        raise ValueError(f"{kind} does not run on token ids and a mask alone: {error}") from error
    if not _equal(whole, last):
        raise ValueError(f"{kind} cannot skip layers: a copy of it that shares all layers gives other vectors.")
    raw = hidden_of(calls[f"{name}.{depth - 1}"][2])
    final_norm = None if _equal(raw, last) else _module_between(calls, raw, last)
    if final_norm is None and not _equal(raw, last):
        raise ValueError(f"{kind} does more than one norm after its last layer, {name}.{depth - 1}.")
    causal = all(_equal(_before_last(output), _before_last(others[key][2])) for key, (_, _, output) in calls.items())
    return Anatomy(final_norm, causal, _equal(resumed, last))


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal tensors, NaN where the other one is."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def probe_ids(encoder: PreTrainedModel) -> torch.Tensor:
    """Token ids that are spread over the vocabulary, without those of padding, `(1, tokens)`."""
    config = encoder.config
    positions = (getattr(config, "max_position_embeddings", None) or TOKENS + 4) - 2  # the first two may be reserved
    ids = torch.linspace(0.3 * config.vocab_size, config.vocab_size - 1, max(2, min(TOKENS, positions))).long()
    return ids[None].to(next(encoder.parameters()).device)


@contextmanager
def probing(encoder: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode without gradients and autocast; the mode is restored."""
    training = encoder.training
    encoder.eval()
    try:
        with torch.no_grad(), torch.autocast(next(encoder.parameters()).device.type, enabled=False):
            yield
    finally:
        encoder.train(training)


def recorded(encoder: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> tuple[Calls, torch.Tensor]:
    """The last call of every module of an encoder, and its last hidden state."""
    calls: Calls = {}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[name] = args, kwargs, output

    with ExitStack() as hooks:
        for name, module in encoder.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(record, name), with_kwargs=True))
        return calls, run_native(encoder, hooks=False, **inputs).last_hidden_state


def _module_between(calls: Calls, before: torch.Tensor, after: torch.Tensor) -> str | None:
    """Name of the module that makes one tensor of another."""
    readers = (name for name, (args, _, _) in calls.items() if args and _equal(args[0], before))
    return next((name for name in readers if _equal(calls[name][2], after)), None)


def _before_last(output: Any) -> torch.Tensor:
    """The part of a module's output that belongs to all tokens but the last."""
    state = hidden_of(output)
    per_token = isinstance(state, torch.Tensor) and state.dim() == 3 and len(state) == 1
    return state[:, :-1] if per_token else torch.empty(0)


def _resumed(encoder: PreTrainedModel, layers: nn.ModuleList, calls: Calls, name: str, inputs: Any) -> torch.Tensor:
    """The last hidden state of a run of the layers after the first, which starts from the output of the first."""
    depth = len(layers)
    if depth == 1:
        return run_native(encoder, hooks=False, **inputs).last_hidden_state
    after = hidden_of(calls[f"{name}.0"][2])
    tail = view(encoder, range(2, depth + 1), [Resumed(layers[1], after), *layers[2:]])
    return run_native(tail, hooks=False, **inputs).last_hidden_state


class _Around(nn.Module):
    """A layer in a wrapper, through which its attributes are found."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


class Resumed(_Around):
    """A layer that reads a given hidden state in place of its input."""

    def __init__(self, layer: nn.Module, state: torch.Tensor) -> None:
        super().__init__(layer)
        self.state = state

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's."""
        return self.layer(self.state, *args, **kwargs)


class Tapped(_Around):
    """A layer that writes its output into `states`, by its number, and its input by the number before: some encoders
    change the hidden state between two layers."""

    def __init__(self, layer: nn.Module, number: int, states: dict[int, torch.Tensor]) -> None:
        super().__init__(layer)
        self.number, self.states = number, states

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's."""
        self.states[self.number - 1] = hidden_states
        output = self.layer(hidden_states, *args, **kwargs)
        self.states[self.number] = hidden_of(output)
        return output


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
    norms = [name for name, (_, _, output) in inside.items() if _equal(output, result)]
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
    readers = [name for name, (args, _, _) in inside.items() if args and _equal(args[0], state)]
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
        if not _equal(inside[names[0]][0][0], inside[names[-1]][0][0]):
            continue
        for activation, swapped in product(named, (False, True)):
            inner = Inner(names, activation, swapped)
            parts = inner.parts(made, count)
            if all(part.shape == hidden.shape for part in parts):
                if torch.allclose(inner.units(parts), hidden, rtol=1e-3, atol=1e-5):
                    return inner
    return None
