"""
Paths in closed form: a depth that skips layers, in which the layers before gaps are refitted ([`m3bert.exits.refit`]).
A path ends in the source's last layers, so its output is in the source's space and needs no exit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from ..encode.device import autocast
from ..encode.ranks import rank
from ..encode.tokenized_texts import TokenizedText
from ..modeling.modeling_elastic import layer_list, replaced, view
from ..models.anatomy import FeedForward, Resumed, Tapped, anatomy_of, feed_forward_of, run_native
from .passes import RawStates
from .refit import Refit, Tensors
from .sums import PathFit


HELD_OUT = 0.1  # share of the texts that choose the penalty
SHORTLIST_SHARE, QUICK_SHARE = 8, 4  # one text of so many
Groups = Sequence[Sequence[TokenizedText]]


@dataclass
class _Path:
    """A path on the way: its modules, of which those in front of the first open gap are final."""

    layers: list[int]
    modules: list[nn.Module]
    open: list[int]
    tensors: Tensors = field(default_factory=dict)
    explained: list[float] = field(default_factory=list)
    borrowed: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, ...]:
        """Paths with the same key have the same refit: the layers up to the first one behind the gap."""
        return tuple(self.layers[: self.open[0] + 2])


def gaps_of(layers: Sequence[int]) -> list[int]:
    """The places of the layers in front of a gap."""
    return [place for place, layer in enumerate(layers[:-1]) if layers[place + 1] != layer + 1]


@torch.no_grad()
def fit_paths(
    raw: RawStates, texts: Groups, paths: Iterable[Sequence[int]], description: str | None = None
) -> list[tuple[PathFit, Tensors]]:
    """
    Refit the layers of paths (counted from 1; the last one is the source's) before their gaps, from the bottom, each
    with the input that it has in the path. The first gaps of all paths are served by the same passes over the texts.

    Args:
        raw ([`RawStates`]): The encoder.
        texts (`Sequence[Sequence[TokenizedText]]`): Groups of texts.
        paths (`Iterable[Sequence[int]]`): The layers of each path.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.

    Returns:
        `list[tuple[PathFit, dict[str, torch.Tensor]]]`: Each fit, and its refitted matrices by their names in the
        native model of these layers. Layers that cannot be refitted stay as they are.
    """
    name, own = layer_list(raw.encoder, raw.encoder.config.num_hidden_layers)
    ends = ends_of(raw.encoder)
    found = [
        _Path([*layers], [own[layer - 1] for layer in layers], [] if ends is None else gaps_of(layers))
        for layers in paths
    ]
    while ends is not None and (waiting := [path for path in found if path.open]):
        first = {path.key: path for path in reversed(waiting)}
        refits = {}
        for key, path in first.items():
            skipped = [own[number - 1] for number in range(key[-2] + 1, key[-1])]
            refits[key] = Refit(ends, path.modules[path.open[0]], {key[-1] - 1: skipped[-1]}, skipped)
        for share in (SHORTLIST_SHARE, 1):
            some = {key: first[key] for key, refit in refits.items() if share == 1 or refit.is_long}
            if some:
                _add(raw, [group[::share] for group in texts], some, refits, ends, description)
            for key in some:
                refits[key].sum_over_ranks()
                if share > 1:
                    refits[key].shorten()
        results = {key: refit.best() for key, refit in refits.items()}
        for path in waiting:
            tensors, explained, borrowed = results[path.key]
            place = path.open.pop(0)
            path.modules[place] = replaced(path.modules[place], tensors)
            path.tensors |= {f"{name}.{place}.{key}": tensor for key, tensor in tensors.items()}
            path.explained.append(explained)
            path.borrowed.append(borrowed)
    return [(PathFit(path.layers, path.borrowed, path.explained), path.tensors) for path in found]


def _add(
    raw: RawStates,
    texts: Groups,
    paths: Mapping[tuple[int, ...], _Path],
    refits: Mapping[tuple[int, ...], Refit],
    ends: FeedForward,
    description: str | None,
) -> None:
    """Add the tokens of texts to the refits of the first open gaps of some paths."""
    encoder, resumes = raw.encoder, anatomy_of(raw.encoder).resumes
    own = layer_list(encoder, encoder.config.num_hidden_layers)[1]
    wanted = sorted({key[-1] - 1 for key in paths})
    for held_out, inputs, real in _batches(raw, texts, description):
        read, states = _read(raw, range(1, wanted[-1] + 1), own, wanted, ends, inputs)
        for key, path in paths.items():
            place = path.open[0]
            start = next((at for at in range(place) if path.modules[at] is not own[at]), place) if resumes else 0
            modules = [*path.modules[start : place + 1]]
            if start:
                modules[0] = Resumed(modules[0], states[start])
            rows = _read(raw, path.layers[start : place + 1], modules, [place - start + 1], ends, inputs)[0]
            its = {name: rows[place - start + 1][name][real].float() for name in "xgy"}
            refits[key].add(**its, z={key[-1] - 1: read[key[-1] - 1]["z"][real].float()}, held_out=held_out)


@torch.no_grad()
def quick_refits(raw: RawStates, texts: Groups, last: int, description: str | None) -> dict[tuple[int, int], Tensors]:
    """
    Refits of the output matrix of each layer alone, from its input in the source, for all lists of layers at once.

    Args:
        raw ([`RawStates`]): The encoder.
        texts (`Sequence[Sequence[TokenizedText]]`): Groups of texts, of which a part is read.
        last (`int`): The layers below this one are refitted.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.

    Returns:
        `dict[tuple[int, int], dict[str, torch.Tensor]]`: Layer, and the next one -> the refit of the layer, by names
        in the layer. It is empty where layers cannot be refitted.
    """
    encoder, ends = raw.encoder, ends_of(raw.encoder)
    if ends is None:
        return {}
    own = layer_list(encoder, encoder.config.num_hidden_layers)[1]
    numbers = range(1, last)
    refits = {it: Refit(ends, own[it - 1], {target: own[target - 1] for target in range(it, last)}) for it in numbers}
    for _, inputs, real in _batches(raw, [group[::QUICK_SHARE] for group in texts], description):
        read, _ = _read(raw, numbers, own, numbers, ends, inputs)
        z = {number: rows["z"][real].float() for number, rows in read.items()}
        for number, refit in refits.items():
            refit.add(**{name: read[number][name][real].float() for name in "xgy"}, z=z, held_out=False)
    for refit in refits.values():
        refit.sum_over_ranks()
    return {(it, target + 1): refit.quick(target) for it, refit in refits.items() for target in range(it + 1, last)}


def with_refits(encoder: Any, layers: Sequence[int], refits: Mapping[tuple[int, int], Tensors]) -> Tensors:
    """The refits of the gaps of a path by their names in the native model of its layers."""
    name, _ = layer_list(encoder, encoder.config.num_hidden_layers)
    return {
        f"{name}.{place}.{key}": tensor
        for place in gaps_of(layers)
        for key, tensor in refits.get((layers[place], layers[place + 1]), {}).items()
    }


def ends_of(encoder: Any) -> FeedForward | None:
    """The end of an encoder's layers; `None` if they cannot be refitted."""
    try:
        return feed_forward_of(encoder)
    except ValueError:
        return None


def _batches(raw: RawStates, texts: Groups, description: str | None) -> Iterator[tuple[bool, Any, torch.Tensor]]:
    """Batches of texts: whether they are held out, inputs, and which tokens count."""
    causal = anatomy_of(raw.encoder).causal
    quiet = description is None or rank() > 0
    with tqdm(total=sum(map(len, texts)), desc=description, unit=" texts", disable=quiet, leave=False) as bar:
        for group in texts:
            held = [blake2b(its.text.encode(), digest_size=1).digest()[0] < HELD_OUT * 256 for its in group]
            for held_out in (True, False):
                ids = [its.ids for its, own in zip(group, held, strict=True) if own == held_out]
                for _, inputs in raw.batches(ids) if ids else ():
                    real = inputs["attention_mask"].bool()
                    if causal:  # the first token is a sink of attention, whose norm is huge
                        real = real & (real.cumsum(1) > 1)
                    yield held_out, inputs, real
                    bar.update(len(real))


def _read(
    raw: RawStates,
    layers: Sequence[int],
    modules: Iterable[nn.Module],
    places: Sequence[int],
    ends: FeedForward,
    inputs: Any,
) -> tuple[dict[int, Tensors], dict[int, torch.Tensor]]:
    """
    Run some layers. Returns for each of these places, counted from 1: what the feed-forward network reads (x), its
    hidden units (g), the residual (y) and what the closing norm reads (z), which without one is the output; and the
    hidden states after all places.
    """
    found: dict[int, Tensors] = {place: {} for place in places}
    states: dict[int, torch.Tensor] = {}
    handles: list[Any] = []
    modules = [*modules][: len(layers)]

    def hook(module: nn.Module, seen: Any) -> None:
        handles.append(module.register_forward_hook(lambda _, args, output: seen(args[0], output)))

    for place, its in found.items():
        layer = modules[place - 1]
        part = layer.layer if isinstance(layer, Resumed) else layer
        hook(part.get_submodule(ends.output), lambda x, o, its=its: its.update(g=x, o=o))
        if ends.inner is not None:
            hook(part.get_submodule(ends.inner.names[0]), lambda x, o, its=its: its.update(x=x))
        if ends.behind is not None:
            hook(part.get_submodule(ends.behind), lambda x, o, its=its: its.update(o=o))
        if ends.norm is not None:
            hook(part.get_submodule(ends.norm), lambda x, o, its=its: its.update(z=x))
    tapped = [Tapped(module, place, states) for place, module in enumerate(modules, start=1)]
    try:
        with autocast(raw.encoder.device, raw.compute_dtype):
            run_native(view(raw.encoder, layers, tapped), **inputs)
    finally:
        for handle in handles:
            handle.remove()
    for place, its in found.items():
        its.setdefault("z", states[place])
        its.setdefault("x", its["g"])
        its["y"] = its["z"] - its.pop("o")
    return found, states
