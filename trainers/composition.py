"""Several objectives as one, each with its weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .objective import NestedBatch, Objective


class Composition(Objective):
    """
    A weighted sum of objectives over one forward pass of the backbone. Its grid, which a checkpoint declares as
    trained, is the first one's.

    Args:
        parts (`Mapping[str, tuple[float, Objective]]`): Name -> weight and objective; those of weight 0 are left out.

    Raises:
        ValueError: if nothing is left, a weight is negative, or two parts would log terms of the same names.
    """

    name = "composition"

    def __init__(self, parts: Mapping[str, tuple[float, Objective]]):
        negative = [name for name, (weight, _) in parts.items() if weight < 0]
        if negative:
            raise ValueError(f"Weights of a composition must not be negative: {', '.join(negative)}.")
        kept = {name: part for name, part in parts.items() if part[0] > 0}
        if not kept:
            raise ValueError("A composition needs an objective with a weight above 0.")
        objectives = {name: objective for name, (_, objective) in kept.items()}
        prefixes = sorted(f"{objective.name}_" for objective in objectives.values())
        if any(longer.startswith(shorter) for shorter, longer in zip(prefixes, prefixes[1:], strict=False)):
            raise ValueError(f"Parts of a composition log under the same name: {', '.join(prefixes)}.")
        super().__init__(next(iter(objectives.values())).grid)
        self.parts = nn.ModuleDict(objectives)
        self.weights = {name: weight for name, (weight, _) in kept.items()}
        poolings = {objective.pooling for objective in objectives.values()}
        self.pooling = poolings.pop() if len(poolings) == 1 else None

    @property
    def layers(self) -> list[int]:
        return sorted({layer for part in self.parts.values() for layer in part.layers})

    @property
    def reads_token_states(self) -> bool:
        return any(part.reads_token_states for part in self.parts.values())

    def validate(self, config: Any) -> None:
        for name, part in self.parts.items():
            try:
                part.validate(config)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        return {name: term for part in self.parts.values() for name, term in part(batch).items()}

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        totals = []
        for name, part in self.parts.items():
            own = {term: value for term, value in terms.items() if term.startswith(f"{part.name}_")}
            totals.append(self.weights[name] * part.total(own))
        return torch.stack(totals).sum()
