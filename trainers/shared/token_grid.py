"""Base class of SIA and SCR: objectives on hidden states of tokens at all dims and their prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from ...encode.granularity import EncoderConfig, Grid
from ...encode.states import NestedStates
from ..core.objective import NestedBatch, Objective


class TokenGridObjective(Objective):
    """
    Base class of objectives at layers x dims whose largest dim is the backbone's hidden size.

    Args:
        grid ([`Grid`]): Layers x dims.

    Attributes:
        dims (`list[int]`): Dims below the hidden size.
        width (`int`): The hidden size.

    Raises:
        ValueError: if the grid is not a product of layers and dims, or has only one dim.
    """

    def __init__(self, grid: Grid):
        super().__init__(grid)
        *self.dims, self.width = grid.dims
        if not self.dims or len(grid) != len(grid.layers) * len(grid.dims):
            raise ValueError(f"{type(self).__name__} needs a grid of layers x two dims or more; the grid is {grid}.")

    @classmethod
    def for_grid(cls, grid: Grid, *, layers: Iterable[int] | None = None, **arguments: Any) -> Self:
        """
        Build the objective at some layers, with the dims of the deepest layer of the trained grid.

        Args:
            grid ([`Grid`]): The trained granularities.
            layers (`list[int]`, *optional*): Layers of this objective. Default: `default_layers`.
            arguments: Arguments of the constructor.
        """
        depth, dims = grid.full.layer, grid.dims_of(grid.full.layer)
        return cls(Grid.product(layers or cls.default_layers(depth, len(dims)), dims), **arguments)

    @classmethod
    def default_layers(cls, depth: int, num_dims: int) -> list[int]:
        """The default layers of the objective."""
        raise NotImplementedError(f"{cls.__name__} must define default_layers.")

    def validate(self, config: EncoderConfig) -> None:
        super().validate(config)
        if self.width != config.hidden_size:
            raise ValueError(f"The largest dim of {self.grid} must be the model's hidden size, {config.hidden_size}.")

    def token_states(self, batch: NestedBatch) -> list[NestedStates]:
        """The hidden states of every text column."""
        return [text for text in batch.texts.values() if isinstance(text, NestedStates)]
