"""Lists of layers: which ones a depth may run."""

from __future__ import annotations

from collections.abc import Sequence


SHARES = (1 / 6, 1 / 3, 1 / 2, 2 / 3)


def default_depths(last: int) -> list[int]:
    """About a sixth, a third, a half and two thirds of `last` layers."""
    depths = {max(1, round(last * share)) for share in SHARES}
    return sorted(depth for depth in depths if depth < last)


def gaps_of(layers: Sequence[int]) -> list[int]:
    """The places of the layers in front of a gap."""
    return [place for place, layer in enumerate(layers[:-1]) if layers[place + 1] != layer + 1]


def candidates_of(depth: int, last: int) -> list[tuple[int, ...]]:
    """The lists of `depth` layers of a model with `last` layers that have one gap and end in the last layer: the first
    a layers and the last b, for every a and b above 0."""
    if depth >= last:
        return []
    return [(*range(1, depth - top + 1), *range(last - top + 1, last + 1)) for top in range(1, depth)]


def neighbours_of(layers: Sequence[int]) -> list[tuple[int, ...]]:
    """The lists of layers that have a skipped layer in place of one beside a gap, which is neither the first nor the
    last one."""
    skipped = {*range(1, layers[-1])} - {*layers}
    beside = {layers[place + side] for place in gaps_of(layers) for side in (0, 1)} - {layers[0], layers[-1]}
    lists = {tuple(sorted({*layers, other} - {layer})) for layer in beside for other in skipped}
    return sorted(lists - {tuple(layers)})
