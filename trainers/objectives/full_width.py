"""Base class of SIA and SCR: objectives on hidden states of tokens at all dims and their prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch

from ..core.granularity import EncoderConfig, Grid
from ..core.objective import NestedBatch, Objective
from ..core.states import NestedStates


# Largest number of entries in a column's states for which columns are stacked: 1 to 2 MB.
STACKED_NUMBERS = 2**19


class FullWidthObjective(Objective):
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
            raise ValueError(
                f"{type(self).__name__} needs a grid of layers x dims with all dims and fewer; the grid is {grid}."
            )

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
            raise ValueError(
                f"The largest dim of {type(self).__name__} must be the model's hidden size, {config.hidden_size}; its "
                f"grid is {self.grid}."
            )

    def token_states(self, batch: NestedBatch) -> list[NestedStates]:
        """
        The hidden states of every text column.

        Raises:
            ValueError: if a column has only pooled embeddings.
        """
        texts = [text for text in batch.texts.values() if isinstance(text, NestedStates)]
        if len(texts) < len(batch.texts):
            raise ValueError(f"{type(self).__name__} reads hidden states of tokens, not pooled embeddings.")
        return texts

    def stacked(self, texts: list[NestedStates]) -> list[NestedStates]:
        """The text columns stacked into one, if they have the same shape and are small: one copy saves many small
        operations."""
        shapes = {text.layers[self.layers[0]].shape for text in texts}
        if len(shapes) > 1 or max(shape.numel() for shape in shapes) > STACKED_NUMBERS:
            return texts
        layers = {layer: torch.cat([text.layers[layer] for text in texts]) for layer in self.layers}
        return [NestedStates(layers, torch.cat([text.attention_mask for text in texts]), texts[0].causal)]


def isotropy_layers(depth: int) -> list[int]:
    """Default layers of MIC's regularisers: at two thirds and five sixths of the depth (MIC, appendix D: 8 and 10 of
    12)."""
    return sorted({-(-2 * depth // 3), -(-5 * depth // 6)})
