"""What the ends of layers read and give, token by token, while some layers of an encoder run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import BatchEncoding

from ..encode.device import autocast
from ..encode.ranks import rank
from ..modeling.parts_elastic import layer_list, view
from ..models.anatomy import Resumed, Tapped, anatomy_of, run_native
from ..models.feed_forward import FeedForward, feed_forward_of
from .raw_states import RawStates
from .sums import HELD_OUT
from .tokenized_texts import TokenizedText


Groups = Sequence[Sequence[TokenizedText]]


class Rows(NamedTuple):
    """What passes the end of a layer ([`FeedForward`]), `(..., dims)` each: what the feed-forward network reads (x),
    its hidden units (g), the residual (y), and what the closing norm reads (z), which without one is the output."""

    x: torch.Tensor
    g: torch.Tensor
    y: torch.Tensor
    z: torch.Tensor

    def of(self, real: torch.Tensor) -> Rows:
        """The rows of the tokens that count, `(tokens, dims)`, in float32."""
        return Rows(*(tensor[real].float() for tensor in self))


class Reading(NamedTuple):
    """The rows of some layers by their places among those that run, counted from 1, and all hidden states: 0 is what
    the first of them reads."""

    rows: dict[int, Rows]
    states: dict[int, torch.Tensor]


class Batch(NamedTuple):
    """A batch of texts: the inputs of the encoder, which tokens count, and whether the texts are held out."""

    inputs: BatchEncoding
    real: torch.Tensor
    held_out: bool


class _Tap:
    """Keeps what passes the end of a layer."""

    def __init__(self, layer: nn.Module, ends: FeedForward, hooks: ExitStack) -> None:
        self.values: dict[str, torch.Tensor] = {}
        module = layer.get_submodule(ends.behind or ends.output)
        hooks.enter_context(module.register_forward_hook(lambda _, args, output: self.values.update(product=output)))
        reads = {"g": ends.output, "z": ends.norm, "x": None if ends.inner is None else ends.inner.names[0]}
        for key, name in reads.items():
            if name is not None:
                hook = layer.get_submodule(name).register_forward_pre_hook(
                    lambda _, args, key=key: self.values.update({key: args[0]})
                )
                hooks.enter_context(hook)

    def rows(self, output: torch.Tensor) -> Rows:
        """The rows of the last run, in which the layer had this output."""
        z, g = self.values.get("z", output), self.values["g"]
        return Rows(self.values.get("x", g), g, z - self.values["product"], z)


@dataclass(frozen=True)
class LayerReader:
    """
    Runs layers of an encoder that end in a feed-forward network.

    Args:
        raw ([`RawStates`]): The encoder.
        ends ([`FeedForward`]): The end of its layers.
        name (`str`): Name of its list of layers.
        layers (`nn.ModuleList`): The list.
    """

    raw: RawStates
    ends: FeedForward
    name: str
    layers: nn.ModuleList

    @classmethod
    def of(cls, raw: RawStates) -> LayerReader | None:
        """The reader of an encoder; `None` if its layers do not end in a matrix that can be refitted."""
        try:
            ends = feed_forward_of(raw.encoder)
        except ValueError:
            return None
        return cls(raw, ends, *layer_list(raw.encoder, raw.encoder.config.num_hidden_layers))

    def batches(self, texts: Groups, description: str | None) -> Iterator[Batch]:
        """Batches of groups of texts; about a tenth of the texts is held out. `description` is the text before the
        progress bar, and `None` shows no bar."""
        causal, quiet = anatomy_of(self.raw.encoder).causal, description is None or rank() > 0
        with tqdm(total=sum(map(len, texts)), desc=description, unit=" texts", disable=quiet, leave=False) as bar:
            for group in texts:
                for held_out in (True, False):
                    ids = [text.ids for text in group if _is_held_out(text.text) == held_out]
                    for _, inputs in self.raw.batches(ids) if ids else ():
                        real = inputs["attention_mask"].bool()
                        if causal:  # the first token is a sink of attention, whose norm is huge
                            real = real & (real.cumsum(1) > 1)
                        yield Batch(inputs, real, held_out)
                        bar.update(len(real))

    def read(
        self, layers: Sequence[int], modules: Iterable[nn.Module], places: Sequence[int], batch: Batch
    ) -> Reading:
        """
        Run some layers on a batch.

        Args:
            layers (`Sequence[int]`): Their numbers, counted from 1.
            modules (`Iterable[nn.Module]`): The modules that run in their place; more are ignored.
            places (`Sequence[int]`): The places among them, counted from 1, whose rows are read.
            batch ([`Batch`]): The texts.
        """
        states: dict[int, torch.Tensor] = {}
        running = [*modules][: len(layers)]
        tapped = [Tapped(module, place, states) for place, module in enumerate(running, start=1)]
        taps = {}
        with ExitStack() as hooks, autocast(self.raw.encoder.device, self.raw.compute_dtype):
            for place in places:
                part = running[place - 1]
                taps[place] = _Tap(part.layer if isinstance(part, Resumed) else part, self.ends, hooks)
            run_native(view(self.raw.encoder, layers, tapped), **batch.inputs)
        return Reading({place: tap.rows(states[place]) for place, tap in taps.items()}, states)


def _is_held_out(text: str) -> bool:
    return blake2b(text.encode(), digest_size=1).digest()[0] < HELD_OUT * 256
