"""What objectives share in which the full width teaches its prefixes, or is what a prefix leaves over."""

from __future__ import annotations

from typing import Any

import torch

from ..granularity import Grid
from ..nested import NestedStates
from ..objective import NestedBatch, Objective


# Entries of a column's states up to which columns are stacked: a megabyte or two.
STACKED_NUMBERS = 2**19


class FullWidthObjective(Objective):
    """
    Base of objectives at layers x dims, of which the largest dim is the backbone's full width.

    Args:
        grid ([`Grid`]): Layers x dims.

    Attributes:
        dims (`list[int]`): Those below the full width.
        width (`int`): The full width.

    Raises:
        ValueError: if the grid is not such a product, or has no dim below its largest.
    """

    def __init__(self, grid: Grid):
        super().__init__(grid)
        *self.dims, self.width = grid.dims
        if not self.dims or len(grid) != len(grid.layers) * len(grid.dims):
            raise ValueError(
                f"{type(self).__name__} needs layers x dims, the full width and a dim below it; the grid is {grid}."
            )

    def validate(self, config: Any) -> None:
        super().validate(config)
        if self.width != config.hidden_size:
            raise ValueError(
                f"The largest dim of {type(self).__name__} must be the model's full width, {config.hidden_size}; its "
                f"grid is {self.grid}."
            )

    def token_states(self, batch: NestedBatch) -> list[NestedStates]:
        """
        The states of every text column.

        Raises:
            ValueError: if all that is left of them is pooled.
        """
        texts = [text for text in batch.texts.values() if isinstance(text, NestedStates)]
        if len(texts) < len(batch.texts):
            raise ValueError(f"{type(self).__name__} reads token states, not pooled embeddings.")
        return texts

    def stacked(self, texts: list[NestedStates]) -> list[NestedStates]:
        """The text columns as one, where they are equally long and small: fewer steps for the price of a copy."""
        shapes = {text.layers[self.layers[0]].shape for text in texts}
        if len(shapes) > 1 or max(shape.numel() for shape in shapes) > STACKED_NUMBERS:
            return texts
        layers = {layer: torch.cat([text.layers[layer] for text in texts]) for layer in self.layers}
        return [NestedStates(layers, torch.cat([text.attention_mask for text in texts]), texts[0].causal)]
