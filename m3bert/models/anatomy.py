"""
The parts of an encoder that depths need, found by running it: the final norm, whether attention is causal, and whether
a run can continue between two layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

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
    if not equal(whole, last):
        raise ValueError(f"{kind} cannot skip layers: a copy of it that shares all layers gives other vectors.")
    raw = hidden_of(calls[f"{name}.{depth - 1}"][2])
    final_norm = None if equal(raw, last) else _module_between(calls, raw, last)
    if final_norm is None and not equal(raw, last):
        raise ValueError(f"{kind} does more than one norm after its last layer, {name}.{depth - 1}.")
    causal = all(equal(_before_last(output), _before_last(others[key][2])) for key, (_, _, output) in calls.items())
    return Anatomy(final_norm, causal, equal(resumed, last))


def equal(one: Any, other: Any) -> bool:
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
    readers = (name for name, (args, _, _) in calls.items() if args and equal(args[0], before))
    return next((name for name in readers if equal(calls[name][2], after)), None)


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
