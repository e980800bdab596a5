"""Base classes of SIA, SCR and SIR: objectives at chosen layers, and on hidden states of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from ...encode.granularity import EncoderConfig, Grid
from ...encode.states import NestedStates
from ..core.objective import NestedBatch, Objective


class OwnLayersObjective(Objective):
    """Base class of objectives at chosen layers, with the dims of the deepest layer of the trained grid."""

    @classmethod
    def for_grid(cls, grid: Grid, *, layers: Iterable[int] | None = None, **arguments: Any) -> Self:
        """Build the objective for a trained grid at these layers, or at `default_layers`."""
        depth, dims = grid.full.layer, grid.dims_of(grid.full.layer)
        return cls(Grid.product(layers or cls.default_layers(depth, len(dims)), dims), **arguments)

    @classmethod
    def default_layers(cls, depth: int, num_dims: int) -> list[int]:
        """Two layers, at two thirds and five sixths of the depth (MIC, appendix D: 8 and 10 of 12)."""
        return sorted({-(-2 * depth // 3), -(-5 * depth // 6)})


class TokenGridObjective(OwnLayersObjective):
    """
    Base class of objectives at layers x dims, of which the largest, `width`, is the backbone's hidden size; `dims` are
    the others. ValueError if the grid is not a product of layers and dims, or has only one dim.
    """

    def __init__(self, grid: Grid):
        super().__init__(grid)
        *self.dims, self.width = grid.dims
        if not self.dims or len(grid) != len(grid.layers) * len(grid.dims):
            raise ValueError(f"{type(self).__name__} needs a grid of layers x two dims or more; the grid is {grid}.")

    def validate(self, config: EncoderConfig) -> None:
        super().validate(config)
        if self.width != config.hidden_size:
            raise ValueError(f"The largest dim of {self.grid} must be the model's hidden size, {config.hidden_size}.")

    def token_states(self, batch: NestedBatch) -> list[NestedStates]:
        """The hidden states of every text column."""
        return [text for text in batch.texts.values() if isinstance(text, NestedStates)]
