"""
Paths in closed form: a depth that skips layers, in which the layers before gaps are refitted ([`m3bert.exits.refit`]).
A path ends in the source's last layers, so its output is in the source's space and needs no exit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..modeling.parts_elastic import replaced
from ..models.anatomy import Resumed, anatomy_of
from .layer_lists import gaps_of
from .layer_rows import Batch, Groups, LayerReader, Reading
from .raw_states import RawStates
from .record import PathFit, RefittedPath
from .refit import Refit, Refitted, Tensors


SHORTLIST_SHARE = 8  # one text of so many


@dataclass
class OpenPath:
    """A partly refitted path: its modules, which are final before the first open gap."""

    layers: list[int]
    modules: list[nn.Module]
    gaps: list[int]
    tensors: Tensors = field(default_factory=dict)
    explained: list[float | None] = field(default_factory=list)
    borrowed: list[int] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, ...]:
        """Paths with the same key have the same refit: the layers up to the first one behind the gap."""
        return tuple(self.layers[: self.gaps[0] + 2])

    def close(self, refitted: Refitted, name: str) -> None:
        """Put a refit before the first open gap; `name` is that of the list of layers."""
        place = self.gaps.pop(0)
        self.modules[place] = replaced(self.modules[place], refitted.tensors)
        self.tensors |= {f"{name}.{place}.{key}": tensor for key, tensor in refitted.tensors.items()}
        self.explained.append(refitted.explained)
        self.borrowed.append(refitted.borrowed)


class Gap:
    """
    The first open gap of a path, and the refit of the layer before it, which reads batches.

    Args:
        reader ([`LayerReader`]): The encoder.
        path ([`OpenPath`]): The path.
    """

    def __init__(self, reader: LayerReader, path: OpenPath) -> None:
        place = path.gaps[0]
        before, behind = path.layers[place : place + 2]
        self.reader, self.target = reader, behind - 1
        skipped = [reader.layers[number - 1] for number in range(before + 1, behind)]
        self.refit = Refit(reader.ends, path.modules[place], {self.target: skipped[-1]}, skipped)
        self.start = 0  # the layers that run as in the source are not run again
        if anatomy_of(reader.raw.encoder).resumes:
            changed = (at for at in range(place) if path.modules[at] is not reader.layers[at])
            self.start = next(changed, place)
        self.layers, self.modules = path.layers[self.start : place + 1], path.modules[self.start : place + 1]

    def add(self, batch: Batch, source: Reading) -> None:
        """Add the tokens of a batch, of which `source` is the reading of the source's layers."""
        modules = [*self.modules]
        if self.start:
            modules[0] = Resumed(modules[0], source.states[self.start])
        rows = self.reader.read(self.layers, modules, [len(modules)], batch).rows[len(modules)]
        target = source.rows[self.target].z[batch.real].float()
        self.refit.add(rows.of(batch.real), {self.target: target}, held_out=batch.held_out)


@torch.no_grad()
def fit_paths(
    raw: RawStates, texts: Groups, paths: Iterable[Sequence[int]], description: str | None = None
) -> list[RefittedPath]:
    """
    Refit the layers of paths before their gaps, bottom up, on the path's own activations. The first gaps of all paths
    are served by the same passes over the texts.

    Args:
        raw ([`RawStates`]): The encoder.
        texts (`Sequence[Sequence[TokenizedText]]`): Groups of texts.
        paths (`Iterable[Sequence[int]]`): The layers of each path, counted from 1; the last one is the source's.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.

    Returns:
        `list[RefittedPath]`: The paths in their order. Layers that cannot be refitted stay as they are.
    """
    reader = LayerReader.of(raw)
    if reader is None:
        return [RefittedPath(PathFit([*layers], [], []), {}) for layers in paths]
    started = [
        OpenPath([*layers], [reader.layers[layer - 1] for layer in layers], gaps_of(layers)) for layers in paths
    ]
    while waiting := [path for path in started if path.gaps]:
        first = {path.key: path for path in reversed(waiting)}
        gaps = {key: Gap(reader, path) for key, path in first.items()}
        long = [gap for gap in gaps.values() if gap.refit.is_long]
        if long:
            _add(reader, [group[::SHORTLIST_SHARE] for group in texts], long, description)
            for gap in long:
                gap.refit.shorten()
        _add(reader, texts, gaps.values(), description)
        solved = {key: gap.refit.best() for key, gap in gaps.items()}
        for path in waiting:
            path.close(solved[path.key], reader.name)
    return [RefittedPath(PathFit(path.layers, path.borrowed, path.explained), path.tensors) for path in started]


def _add(reader: LayerReader, texts: Groups, gaps: Collection[Gap], description: str | None) -> None:
    """Add the tokens of texts to some gaps."""
    targets = sorted({gap.target for gap in gaps})
    for batch in reader.batches(texts, description):
        source = reader.read(range(1, targets[-1] + 1), reader.layers, targets, batch)
        for gap in gaps:
            gap.add(batch, source)
    for gap in gaps:
        gap.refit.sum_over_ranks()
