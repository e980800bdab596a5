"""Which layers a depth runs: lists are refitted quickly, and the closest to the whole model is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from tqdm.auto import tqdm

from ..encode.ranks import rank
from ..modeling.parts_elastic import layer_list
from .layer_lists import candidates_of, gaps_of, neighbours_of
from .layer_rows import Groups, LayerReader
from .queries import Measured
from .raw_states import RawStates
from .record import ChosenLayers, Paths
from .refit import Refit, Tensors


QUICK_SHARE = 4  # one text of so many
Measure = Callable[[Paths], Mapping[int, Measured]]  # paths -> depth -> how close it is to the whole model


@dataclass(frozen=True)
class QuickRefits:
    """
    Refits of the output matrix of each layer alone, from its input in the source, for all lists of a choice at once.

    Args:
        name (`str`): Name of the list of layers.
        tensors (`Mapping[tuple[int, int], dict[str, torch.Tensor]]`): Layer, and the next one -> the refit of the
            layer, by names in the layer. It is empty where layers cannot be refitted.
    """

    name: str
    tensors: Mapping[tuple[int, int], Tensors]

    @classmethod
    @torch.no_grad()
    def fit(cls, raw: RawStates, texts: Groups, depths: Iterable[int], description: str | None) -> QuickRefits:
        """Fit those that a choice of these depths may need to a part of the texts; arguments as in [`fit_paths`]."""
        reader, last = LayerReader.of(raw), raw.encoder.config.num_hidden_layers
        if reader is None:
            return cls(layer_list(raw.encoder, last)[0], {})
        first = [layers for depth in depths for layers in candidates_of(depth, last)]
        lists = {*first, *chain(*map(neighbours_of, first))}
        pairs = sorted({layers[place : place + 2] for layers in lists for place in gaps_of(layers)})
        numbers = sorted({number for number, _ in pairs})
        refits = {}
        for number in numbers:
            # Rows are divided by the deviation of the first target: the layer itself.
            ends = [number, *(behind - 1 for before, behind in pairs if before == number)]
            targets = {target: reader.layers[target - 1] for target in ends}
            refits[number] = Refit(reader.ends, reader.layers[number - 1], targets)
        for batch in reader.batches([group[::QUICK_SHARE] for group in texts], description):
            places = range(1, last)
            reading = reader.read(places, reader.layers, places, batch)
            outputs = {number: rows.z[batch.real].float() for number, rows in reading.rows.items()}
            for number, refit in refits.items():
                refit.add(reading.rows[number].of(batch.real), outputs, held_out=False)
        for refit in refits.values():
            refit.sum_over_ranks()
        return cls(reader.name, {(before, behind): refits[before].quick(behind - 1) for before, behind in pairs})

    def of(self, layers: Sequence[int]) -> Tensors:
        """The refits before the gaps of a list of layers, by their names in the native model of the list."""
        return {
            f"{self.name}.{place}.{key}": tensor
            for place in gaps_of(layers)
            for key, tensor in self.tensors.get((layers[place], layers[place + 1]), {}).items()
        }


def choose_layers(
    raw: RawStates, texts: Groups, depths: Sequence[int], measure: Measure, description: str | None
) -> dict[int, ChosenLayers]:
    """Choose the layers of each depth: compare the lists with one gap, and then the lists that differ from the best
    one in a layer beside its gap. Arguments as in [`fit_paths`]; `measure` gets the lists with quick refits. Depths
    of the encoder are changed."""
    refits, last = QuickRefits.fit(raw, texts, depths, description), raw.encoder.config.num_hidden_layers
    choices, quiet = {}, description is None or rank() > 0
    for depth in tqdm(depths, f"{description}: lists", unit=" depths", disable=quiet, leave=False):
        measures: dict[tuple[int, ...], Measured] = {}
        lists = candidates_of(depth, last)
        for _ in range(2):
            for layers in lists:
                if layers not in measures:
                    measures[layers] = measure({depth: ([*layers], refits.of(layers))})[depth]
            ranked = sorted(measures, key=lambda layers: measures[layers][:2])  # the closest to the whole model first
            lists = neighbours_of(ranked[0])
        compared = {",".join(map(str, layers)): measures[layers].retrieval for layers in ranked}
        choices[depth] = ChosenLayers([*ranked[0]], compared)
    return choices
