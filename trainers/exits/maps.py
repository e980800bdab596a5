"""The maps of exits: from hidden states, and the static vectors of texts, to the space that all depths share."""

from __future__ import annotations

from typing import Any

import torch

from ..core.projection import Projection
from .sums import FEATURES, ExitSums, Fit


class ExitMaps:
    """
    The maps to the common space: the target's space, or its principal components, padded with zeros to the hidden
    size. They are fitted in the target's space, so that the basis of the exits does not change them.

    Args:
        sums ([`ExitSums`]): Sums over the texts. With features of the tokens, they give the static table.
        basis (`str`): `"last_layer"` or `"principal"`.
        config ([`~transformers.PreTrainedConfig`]): Config of the model.
        projection ([`Projection`], *optional*): A projection of the last layer that stays where it is. The common
            space is then the one in front of it, and the target that behind it.

    Attributes:
        dim (`int`): Dims of the common space.
        to_space (`torch.Tensor` of shape `(target dims, hidden_size)`): From the target's space to the common space.
        table (`Fit`, *optional*): The map from a token's features to its row of the static table.
        state_only (`dict[int, Fit]`): Layer -> the map from its hidden state.
        joints (`dict[int, Fit]`): Layer below the last -> the map from its hidden state and the static vector, with a
            static table.
    """

    def __init__(self, sums: ExitSums, basis: str, config: Any, projection: Projection | None = None) -> None:
        self.depth, self.width = config.num_hidden_layers, config.hidden_size
        # A model keeps as many principal axes of a target as its hidden size.
        kept = torch.eye(len(sums.target_axes)).to(sums.target_axes)
        if len(kept) > self.width:
            kept = sums.target_axes[: self.width]
        rotation = sums.target_axes[: self.width] if basis == "principal" else kept
        self.dim = len(rotation)
        self.to_space = torch.nn.functional.pad(rotation.T, (0, self.width - self.dim))
        self._offset: torch.Tensor | None = None
        behind = self.to_space.T @ kept.T  # from the common space to the target's
        if projection is not None:
            behind = projection.weight.detach().T.to(self.to_space)
            self.to_space, self.dim = torch.linalg.pinv(behind), self.width
            if projection.bias is not None:
                self._offset = projection.bias.detach().to(self.to_space)
        self.state_only: dict[int, Fit] = {}
        self.joints: dict[int, Fit] = {}
        self.table: Fit | None = None
        if FEATURES in sums.rows:
            table = sums.fit([FEATURES])
            self.table = self._in_space(table)
            # Static vectors in the target's space: from the features, and from the vectors of the model.
            self._from_features = [affine @ kept.T for affine in sums.tables(table.report)]
            self._from_space = behind

    def add(self, sums: ExitSums) -> None:
        """Fit the maps of the layers of these sums."""
        for layer in sums.layers:
            self.state_only[layer] = self._in_space(sums.fit([layer]))
            if self.table is not None and layer < self.depth:
                report, affine = sums.fit_with_table(layer, self._from_features)
                state, static = affine[: 1 + self.width], affine[1 + self.width :]
                if self._offset is not None:
                    state[0] += self._offset @ static
                self.joints[layer] = self._in_space(Fit(report, torch.cat([state, self._from_space @ static])))

    def _in_space(self, fit: Fit) -> Fit:
        if self._offset is None:
            return Fit(fit.report, fit.affine @ self.to_space)
        affine = torch.cat([fit.affine[:1] - self._offset, fit.affine[1:]])
        return Fit(fit.report, affine @ self.to_space)
