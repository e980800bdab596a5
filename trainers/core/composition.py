"""A weighted sum of objectives."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml
from torch import nn

from ...encode.granularity import EncoderConfig
from ...encode.states import StateKey
from ...utils.papers import Identity
from .objective import NestedBatch, Objective, Terms


class Composition(Objective):
    """
    A weighted sum of objectives over one forward pass of the backbone. Its grid, which checkpoints declare as trained,
    is the grid of the first part. Terms are logged under the names of the parts, so two parts may have the same class.
    A nested composition is flattened: its parts become parts of this one, and the weights are multiplied.

    Args:
        parts (`Mapping[str, tuple[float, Objective]]`): Name -> (weight, objective). Parts of weight 0 are left out.

    Raises:
        ValueError: if no part has a weight above 0, a weight is negative, or two parts have the same name.
    """

    name = "composition"

    def __init__(self, parts: Mapping[str, tuple[float, Objective]]):
        negative = [name for name, (weight, _) in parts.items() if weight < 0]
        if negative:
            raise ValueError(f"Weights of a composition must not be negative: {', '.join(negative)}.")
        members: dict[str, Objective] = {}
        weights: dict[str, float] = {}
        for name, (weight, objective) in parts.items():
            inner = {name: (1.0, objective)}
            if isinstance(objective, Composition):
                inner = {part: (objective.weights[part], member) for part, member in objective.members.items()}
            for part, (share, member) in inner.items():
                if part in members:
                    raise ValueError(f"Two parts of a composition have the same name: {part!r}.")
                if weight > 0:
                    members[part], weights[part] = member, weight * share
        if not members:
            raise ValueError("A composition needs an objective with a weight above 0.")
        super().__init__(next(iter(members.values())).grid)
        for name, member in members.items():
            member.name = name
        self.parts = nn.ModuleDict(members)
        self.weights: dict[str, float] = weights
        poolings = {member.pooling for member in members.values()}
        self.pooling = poolings.pop() if len(poolings) == 1 else None

    @property
    def members(self) -> dict[str, Objective]:
        """Name -> part."""
        return {name: part for name, part in self.parts.items() if isinstance(part, Objective)}

    @property
    def identity(self) -> Identity:
        """The identities of the parts, with their weights."""
        parts = tuple(replace(part.identity, weight=self.weights[name]) for name, part in self.members.items())
        return Identity(
            " + ".join(part.name for part in parts),
            "a weighted sum",
            tuple(dict.fromkeys(paper for part in parts for paper in part.papers)),
            tuple(dict.fromkeys(tag for part in parts for tag in part.tags)),
            parts=parts,
        )

    @property
    def layers(self) -> list[int]:
        return sorted({layer for part in self.members.values() for layer in part.layers})

    @property
    def state_keys(self) -> Sequence[StateKey]:
        return list({key for part in self.members.values() for key in part.state_keys})

    @property
    def reads_token_states(self) -> bool:
        return any(part.reads_token_states for part in self.members.values())

    def validate(self, config: EncoderConfig) -> None:
        for name, part in self.members.items():
            try:
                part.validate(config)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error

    def forward(self, batch: NestedBatch) -> Terms:
        return {
            replace(term, weight=self.weights[name] * term.weight): value
            for name, part in self.members.items()
            for term, value in part(batch).items()
        }


def mapping_of(
    name: str, value: Mapping[str, Any] | str | None, legal: Collection[str] | None = None
) -> dict[str, Any]:
    """A mapping, or one that is written as YAML or JSON, as on the command line. ValueError that names the argument if
    it is no mapping or has an unknown key."""
    try:
        mapping = yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError as error:
        raise ValueError(f"{name}={value!r} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(mapping, Mapping | None):
        raise ValueError(f"{name}={value!r} must be a mapping, such as {{pooling: mean}}.")
    if legal is not None and (unknown := [str(key) for key in mapping or {} if key not in legal]):
        raise ValueError(f"{name} has unknown keys: {', '.join(unknown)}; legal values: {', '.join(legal)}.")
    return dict(mapping or {})
