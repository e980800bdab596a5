"""Embeddings of texts at every granularity of a grid, in memory or memory-mapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .granularity import Granularity, Grid
from .states import truncate


ROWS_AT_ONCE = 65_536  # rows to process at a time, for arrays that may be larger than memory


@dataclass(frozen=True)
class GridEmbeddings:
    """
    Pooled embeddings of texts: one array per layer. Every size is a view of one of them. They have no precision yet.

    Args:
        grid ([`Grid`]): The sizes of the embeddings.
        layers (`dict[int, torch.Tensor]`): Layer -> embeddings of shape `(texts, widest dim of the layer)`, on the
            CPU.
        normalized (`bool`, *optional*, defaults to `False`): Whether the model L2-normalises, as in `layers`.
    """

    grid: Grid
    layers: Mapping[int, torch.Tensor]
    normalized: bool = False

    def at(
        self, granularity: Granularity, rows: Sequence[int] | torch.Tensor | None = None, *, normalize: bool = False
    ) -> torch.Tensor:
        """
        The embeddings at one size, in float. [`~coding.vectors_in_precision`] gives those in a precision.

        Args:
            granularity ([`Granularity`]): A size of the grid. Its precision is not applied.
            rows (`Sequence[int]` or `torch.Tensor`, *optional*): Texts to return, in this order; `None` returns all,
                without a copy.
            normalize (`bool`, *optional*, defaults to `False`): Whether to L2-normalise even if the model does not.

        Returns:
            `torch.Tensor` of shape `(rows, dim)`, in float32 or wider.

        Raises:
            ValueError: if the granularity is not in the grid.
        """
        if granularity.size not in self.grid.granularities:
            raise ValueError(f"{granularity.size} is not among the encoded granularities {self.grid}.")
        vectors = truncate(self.layers[granularity.layer], granularity.dim)
        vectors = vectors if rows is None else vectors[rows]
        vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
        return truncate(vectors, granularity.dim, normalize=normalize or self.normalized)

    def widest(self, layer: int, rows: Sequence[int] | None = None) -> torch.Tensor:
        """The embeddings of a layer at its widest dim, as [`~GridEmbeddings.at`]: what a precision is made from."""
        return self.at(Granularity(layer, self.grid.dims_of(layer)[-1]), rows)

    def map(self, function: Callable[[int, torch.Tensor], torch.Tensor]) -> GridEmbeddings:
        """The embeddings after a function of layer and embeddings `(texts, dim)`, such as
        [`~M3BertModel.exit_state`]: the exit of a mean is the mean of the exits. Not for normalised embeddings."""
        with torch.no_grad():
            layers = {layer: function(layer, vectors) for layer, vectors in self.layers.items()}
            return GridEmbeddings(self.grid, layers)

    def require_finite(self) -> GridEmbeddings:
        """These embeddings. A ValueError names the granularities of the first layer with NaN or infinity."""
        for layer, vectors in self.layers.items():
            finite = torch.ones(vectors.shape[1], dtype=torch.bool)
            for rows in vectors.split(ROWS_AT_ONCE):
                finite &= torch.isfinite(rows).all(dim=0)
            if not finite.all():
                first = int(finite.int().argmin())
                reached = [f"{layer}x{dim}" for dim in self.grid.dims_of(layer) if dim > first]
                raise ValueError(f"Embeddings at {', '.join(reached)} are not finite.")
        return self
