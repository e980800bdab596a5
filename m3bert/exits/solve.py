"""The maps, the layers and the refits of a fit, from what it has read of its texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..encode.projection import Projection
from .centred import Centring
from .choice import Measure, choose_layers
from .kept import KeptParts
from .maps import CommonSpace, ExitMaps
from .passes import REFIT_TEXTS, TextPasses
from .paths import fit_paths
from .plan import FitPlan
from .queries import Queries
from .read_texts import ReadTexts
from .record import ChosenLayers, RefittedPath
from .ridge import apply_affine


@dataclass(frozen=True)
class AfterLast:
    """What follows the last layer, for pooled hidden states `(texts, hidden_size)`: a projection that stays, an exit
    `(1 + hidden_size, hidden_size)`, or nothing. With static vectors of the texts, the exit reads them, too."""

    projection: Projection | None
    exit: torch.Tensor | None = None
    static: torch.Tensor | None = None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if self.projection is not None:
            return self.projection.to(states.device)(states.float())
        if self.static is not None:
            states = torch.cat([states.double(), self.static.to(states.device, torch.float64)], dim=1)
        return states if self.exit is None else apply_affine(self.exit, states.double())


@dataclass(frozen=True)
class Solution:
    """
    All that is put into a model.

    Args:
        maps ([`ExitMaps`]): The maps of prefixes and of the table.
        last_exit (`torch.Tensor` of shape `(1 + hidden_size, hidden_size)`, *optional*): The exit of the last layer,
            which is the exit of paths, too.
        paths (`dict[int, RefittedPath]`): Depth -> its path.
        choices (`dict[int, ChosenLayers]`): Depth -> what its layers were compared with.
        queries ([`Queries`]): What depths are measured on, in the space after the last layer.
    """

    maps: ExitMaps
    last_exit: torch.Tensor | None
    paths: Mapping[int, RefittedPath]
    choices: Mapping[int, ChosenLayers]
    queries: Queries


def solve(plan: FitPlan, read: ReadTexts) -> Solution:
    """Solve for the exits, choose the layers of depths, and refit paths. The depths of the encoder are changed."""
    space = CommonSpace.of(read.sums, plan.options.basis, plan.config.hidden_size, plan.staying)
    maps = ExitMaps.of(read.sums, space)
    last_exit = _last_exit(plan, maps)
    queries = read.queries if plan.staying is not None else read.queries.mapped(space.to_space)
    choices: dict[int, ChosenLayers] = {}
    fitted: dict[int, RefittedPath] = {}
    if plan.chosen or plan.paths:
        centring = Centring.of(read.passes.raw, queries, _after_last(plan, read, maps, last_exit))
        choices, refits = choose_and_refit(plan, read.passes, read.parts, centring.measured)
        fitted = centring.centred(refits)
    return Solution(maps, last_exit, fitted, choices, queries)


def choose_and_refit(
    plan: FitPlan, passes: TextPasses, parts: KeptParts, measure: Measure
) -> tuple[dict[int, ChosenLayers], dict[int, RefittedPath]]:
    """Depth -> what its layers were compared with, and depth -> its path, for all paths of a plan."""
    raw, paths = passes.raw, plan.paths
    choices: dict[int, ChosenLayers] = {}
    texts, label = passes.sampled(REFIT_TEXTS), None if plan.options.description is None else "Refitting layers"
    if plan.chosen:
        choices = parts("choice", lambda: choose_layers(raw, texts, plan.chosen, measure, label))
        paths = dict(sorted((paths | {depth: choice.layers for depth, choice in choices.items()}).items()))
    refits = parts("refits", lambda: fit_paths(raw, texts, paths.values(), label))
    return choices, dict(zip(paths, refits, strict=True))


def _after_last(plan: FitPlan, read: ReadTexts, maps: ExitMaps, last_exit: torch.Tensor | None) -> AfterLast:
    """What follows the last layer for the queries, as it is installed."""
    tokens = read.passes.tokens
    if plan.last not in maps.joints or maps.table is None or tokens is None:
        return AfterLast(plan.staying, last_exit)
    static = apply_affine(maps.table.affine, tokens.means(read.queries.ids))
    return AfterLast(None, maps.joints[plan.last].affine, static)


def _last_exit(plan: FitPlan, maps: ExitMaps) -> torch.Tensor | None:
    """The exit of the last layer: the map to a teacher, or the projection and the rotation of the basis."""
    if plan.last in maps.state_only:
        return maps.state_only[plan.last].affine
    if plan.staying is not None or (plan.options.basis == "last_layer" and plan.projection is None):
        return None
    weight = torch.eye(plan.config.hidden_size) if plan.projection is None else plan.projection.weight
    to_space = maps.space.to_space
    return torch.nn.functional.pad(weight.to(to_space).T, (0, 0, 1, 0)) @ to_space
