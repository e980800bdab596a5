"""Embeddings of texts at every granularity of a grid, in memory or memory-mapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..granularity import Granularity, Grid
from ..nested import prefix


ROWS_AT_ONCE = 65_536  # of arrays that may be larger than memory


@dataclass(frozen=True)
class GridEmbeddings:
    """
    Pooled embeddings of texts: one array a layer, of which every granularity is a view.

    Args:
        grid ([`Grid`]): The granularities that can be read.
        layers (`dict[int, torch.Tensor]`): Layer -> embeddings of shape `(texts, widest dim of the layer)`, on the
            CPU, not normalised.
    """

    grid: Grid
    layers: Mapping[int, torch.Tensor]

    def at(
        self, granularity: Granularity, rows: Sequence[int] | None = None, *, normalize: bool = False
    ) -> torch.Tensor:
        """
        The embeddings at one granularity.

        Args:
            granularity ([`Granularity`]): One of the grid.
            rows (`Sequence[int]`, *optional*): Texts to take, in this order; `None` takes all, without a copy.
            normalize (`bool`, *optional*, defaults to `False`): Whether to L2-normalise, after cutting.

        Returns:
            `torch.Tensor` of shape `(rows, dim)`, in float32 at least.

        Raises:
            ValueError: if the granularity is not in the grid.
        """
        if granularity not in self.grid.granularities:
            raise ValueError(f"{granularity} is not among the encoded granularities {self.grid}.")
        vectors = prefix(self.layers[granularity.layer], granularity.dim)
        vectors = vectors if rows is None else vectors[rows]
        return prefix(
            vectors.to(torch.promote_types(vectors.dtype, torch.float32)), granularity.dim, normalize=normalize
        )

    def require_finite(self) -> GridEmbeddings:
        """
        Check every number.

        Returns:
            [`GridEmbeddings`]: itself.

        Raises:
            ValueError: names the granularities of the first layer with a NaN or an infinity, and a text that has one.
        """
        for layer, vectors in self.layers.items():
            first = None  # dim, and a text where it is not finite
            for start in range(0, len(vectors), ROWS_AT_ONCE):
                wrong = ~torch.isfinite(vectors[start : start + ROWS_AT_ONCE])
                for dim in wrong.any(dim=0).nonzero()[:1, 0].tolist():
                    if first is None or dim < first[0]:
                        first = dim, start + int(wrong[:, dim].nonzero()[0])
            if first is not None:
                reached = [f"{layer}x{dim}" for dim in self.grid.dims_of(layer) if dim > first[0]]
                raise ValueError(f"Embeddings at {', '.join(reached)} are not finite, of text {first[1]} for one.")
        return self
