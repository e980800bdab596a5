"""Which layers a depth runs: lists are refitted quickly, and the closest to the whole model is chosen."""

from __future__ import annotations

from collections.abc import Iterable

from tqdm.auto import tqdm

from ..encode.ranks import rank
from .centred import Centring
from .late import MaxSim
from .layer_lists import candidates_of, neighbours_of
from .paths import QuickRefits
from .queries import Measured
from .record import ChosenLayers


def choose_layers(
    measuring: Centring | MaxSim, depths: Iterable[int], refits: QuickRefits, description: str | None = None
) -> dict[int, ChosenLayers]:
    """
    Choose the layers of each depth: compare the lists with one gap, and then the lists that differ from the best one
    in a layer beside its gap.

    Args:
        measuring ([`Centring`] or [`MaxSim`]): Measures the lists as they will be installed. The depths of its encoder
            are changed.
        depths (`Iterable[int]`): The depths.
        refits ([`QuickRefits`]): The refits of their gaps.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.
    """
    choices, quiet = {}, description is None or rank() > 0
    last = measuring.raw.encoder.config.num_hidden_layers
    for depth in tqdm(depths, f"{description}: lists", unit=" depths", disable=quiet, leave=False):
        measures: dict[tuple[int, ...], Measured] = {}
        lists = candidates_of(depth, last)
        for _ in range(2):
            for layers in lists:
                if layers not in measures:
                    measures[layers], _ = measuring.measured({depth: ([*layers], refits.of(layers))})[depth]
            ranked = sorted(measures, key=measures.__getitem__)  # the closest to the whole model first
            lists = neighbours_of(ranked[0])
        compared = {",".join(map(str, layers)): measures[layers].retrieval for layers in ranked}
        choices[depth] = ChosenLayers([*ranked[0]], compared)
    return choices
