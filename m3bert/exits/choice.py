"""Which layers a depth runs: lists are refitted quickly, and the closest to the whole model is chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from tqdm.auto import tqdm

from ..encode.ranks import rank
from .layer_lists import candidates_of, neighbours_of
from .passes import RawStates
from .paths import QuickRefits
from .queries import Measured, Queries
from .record import Choice


@dataclass
class Comparison:
    """
    Compares lists of layers for one depth.

    Args:
        raw ([`RawStates`]): The encoder. Its depths are changed.
        queries ([`Queries`]): What the lists are measured on.
        refits ([`QuickRefits`]): The refits of all gaps.
        after (`Callable`): What follows the last layer: a map of pooled hidden states.
    """

    raw: RawStates
    queries: Queries
    refits: QuickRefits
    after: Callable[[torch.Tensor], torch.Tensor]
    measures: dict[tuple[int, ...], Measured] = field(default_factory=dict)

    def measure(self, lists: Iterable[tuple[int, ...]]) -> None:
        """Measure lists that were not measured before."""
        for layers in lists:
            if layers not in self.measures:
                depth = len(layers)
                self.raw.encoder.set_depths(paths={depth: ([*layers], self.refits.of(layers))})
                states = self.raw.pooled(self.queries.ids, [depth])[depth]
                self.measures[layers] = self.queries.measured(self.after(states))

    def ranked(self) -> list[tuple[int, ...]]:
        """The lists that were measured, the closest to the whole model first."""
        return sorted(self.measures, key=self.measures.__getitem__)


def choose(
    raw: RawStates,
    depths: Iterable[int],
    queries: Queries,
    refits: QuickRefits,
    after: Callable[[torch.Tensor], torch.Tensor],
    description: str | None = None,
) -> dict[int, Choice]:
    """
    Choose the layers of each depth: compare the lists with one gap, and then the lists that differ from the best one
    in a layer beside its gap. Arguments as in [`Comparison`]; `description` is the text before the progress bar, and
    `None` shows no bar.
    """
    choices, quiet = {}, description is None or rank() > 0
    for depth in tqdm(depths, f"{description}: lists", unit=" depths", disable=quiet, leave=False):
        comparison = Comparison(raw, queries, refits, after)
        comparison.measure(candidates_of(depth, raw.encoder.config.num_hidden_layers))
        comparison.measure(neighbours_of(comparison.ranked()[0]))
        ranked = comparison.ranked()
        compared = {",".join(map(str, layers)): comparison.measures[layers].retrieval for layers in ranked}
        choices[depth] = Choice([*ranked[0]], compared)
    return choices
