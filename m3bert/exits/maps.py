"""The space that all depths share, and the maps into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..encode.projection import Projection
from .sums import FEATURES, ExitSums, Fit


@dataclass(frozen=True)
class CommonSpace:
    """
    The space that all depths share: the target's space, or its principal components, padded with zeros to the hidden
    size. Maps are fitted in the target's space, so that the basis of the common space does not change them.

    Args:
        to_space (`torch.Tensor` of shape `(target dims, hidden_size)`): From the target's space.
        behind (`torch.Tensor` of shape `(hidden_size, target dims)`): Back to the target's space, of which a target
            that is wider than the hidden size has the first principal axes.
        offset (`torch.Tensor` of shape `(target dims,)`, *optional*): What is added behind it.
        dim (`int`): Dims that are not padding.
    """

    to_space: torch.Tensor
    behind: torch.Tensor
    offset: torch.Tensor | None
    dim: int

    @classmethod
    def of(cls, sums: ExitSums, basis: str, width: int, projection: Projection | None = None) -> CommonSpace:
        """The common space of a fit, in the basis `"last_layer"` or `"principal"`, for a model with the hidden size
        `width`. A projection of the last layer may stay where it is: the common space is then in front of it, and the
        target's space behind it."""
        principal, _ = sums.target_spread
        axes = torch.eye(len(principal)).to(principal)
        if projection is not None:
            behind = projection.weight.detach().T.to(axes)
            offset = None if projection.bias is None else projection.bias.detach().to(axes)
            return cls(torch.linalg.pinv(behind), behind, offset, width)
        # A model has as many principal axes of a target as its hidden size.
        if len(axes) > width:
            axes = principal[:width]
        rotation = principal[:width] if basis == "principal" else axes
        to_space = torch.nn.functional.pad(rotation.T, (0, width - len(rotation)))
        return cls(to_space, to_space.T @ axes.T, None, len(rotation))

    def into(self, fit: Fit) -> Fit:
        """A map to the target's space, as one into this space."""
        affine = fit.affine
        if self.offset is not None:
            affine = torch.cat([affine[:1] - self.offset, affine[1:]])
        return fit._replace(affine=affine @ self.to_space)

    def out_of(self, affine: torch.Tensor) -> torch.Tensor:
        """A map `(1 + inputs, hidden_size)` into this space, as one to the target's space."""
        affine = affine @ self.behind
        if self.offset is not None:
            affine[0] += self.offset
        return affine


@dataclass(frozen=True)
class ExitMaps:
    """
    The maps into the common space.

    Args:
        space ([`CommonSpace`]): The space.
        state_only (`dict[int, Fit]`): Layer -> the map from its hidden state.
        table (`Fit`, *optional*): The map from a token's features to its row of the static table.
        joints (`dict[int, Fit]`): Layer -> the map from its hidden state and the static vector of the text, with a
            static table.
    """

    space: CommonSpace
    state_only: Mapping[int, Fit]
    table: Fit | None = None
    joints: Mapping[int, Fit] = field(default_factory=dict)

    @classmethod
    def of(cls, sums: ExitSums, space: CommonSpace) -> ExitMaps:
        """The maps that follow from sums over the texts; a static table if they have features of the tokens."""
        state_only = {layer: space.into(sums.fit([layer])) for layer in sums.layers}
        if FEATURES not in sums.rows:
            return cls(space, state_only)
        table = sums.fit([FEATURES])
        # Static vectors in the target's space, as the model gives them: a projection with more dims than the hidden
        # state reaches a part of that space.
        static = [space.out_of(space.into(table._replace(affine=each)).affine) for each in sums.tables(table.report)]
        joints = {layer: _joint(sums, space, layer, static) for layer in sums.layers}
        return cls(space, state_only, space.into(table), joints)


def _joint(sums: ExitSums, space: CommonSpace, layer: int, tables: list[torch.Tensor]) -> Fit:
    """The map from the hidden state of a layer and the static vector in the common space."""
    fit = sums.fit_with_table(layer, tables)
    state, static = fit.affine.tensor_split([1 + sums.rows[layer].shape[1]])
    if space.offset is not None:
        state[0] += space.offset @ static
    return space.into(fit._replace(affine=torch.cat([state, space.behind @ static])))
