"""Embeddings of texts at every granularity of a grid, in memory or memory-mapped in a folder filled in parts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..distributed import rank, wait_for_all_ranks
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


class EmbeddingFolder:
    """
    Memory-mapped arrays that processes of one machine fill together, batch by batch. What is filled stays: a run that
    was interrupted goes on where it stopped, with any number of processes.

    The folder holds `layer_{l}.npy`, `(texts, widest dim of the layer)`; `finished.npy`, a byte a batch; and
    `manifest.json`, which says of what they are.

    Args:
        folder (`Path`): Made if need be.
        manifest (`dict`): All that the arrays depend on, as JSON: written into a new folder, compared in an old one.
        widths (`dict[int, int]`): Layer -> widest dim.
        texts (`int`): Number of texts.
        batches (`int`): Number of batches.
        dtype (`torch.dtype`): Of the arrays: float32 or float16.

    Raises:
        ValueError: if the folder holds embeddings of something else; names what differs.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        widths: Mapping[int, int],
        texts: int,
        batches: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.folder = folder
        if rank() == 0:
            self._prepare(manifest, widths, texts, batches, dtype)
        wait_for_all_ranks()
        self._compare(manifest)
        self._finished = np.load(folder / "finished.npy", mmap_mode="r+")
        self._arrays = {layer: np.load(folder / f"layer_{layer}.npy", mmap_mode="r+") for layer in widths}

    def _prepare(
        self, manifest: Mapping[str, Any], widths: Mapping[int, int], texts: int, batches: int, dtype: torch.dtype
    ) -> None:
        file = self.folder / "manifest.json"
        if file.is_file():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        number = torch.empty(0, dtype=dtype).numpy().dtype
        for layer, width in widths.items():
            np.lib.format.open_memmap(self.folder / f"layer_{layer}.npy", "w+", number, (texts, width)).flush()
        np.lib.format.open_memmap(self.folder / "finished.npy", "w+", np.dtype(np.uint8), (batches,)).flush()
        # Last, and in one move: a folder with a manifest has all its arrays.
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps(dict(manifest), indent=2) + "\n", encoding="utf-8")
        draft.replace(file)

    def _compare(self, manifest: Mapping[str, Any]) -> None:
        found = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        wanted = json.loads(json.dumps(dict(manifest)))
        differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        if differing:
            raise ValueError(
                f"{self.folder} holds embeddings of something else: {', '.join(differing)} differ. "
                "Name another folder, or delete this one."
            )

    def is_finished(self, batch: int) -> bool:
        """Whether a batch is there."""
        return bool(self._finished[batch])

    def write(self, batch: int, rows: Sequence[int], vectors: Mapping[int, torch.Tensor]) -> None:
        """Write a batch: layer -> embeddings of these rows."""
        for layer, array in self._arrays.items():
            array[rows] = vectors[layer].numpy()
        self._finished[batch] = 1  # after the data: what is marked is there

    def read(self) -> dict[int, torch.Tensor]:
        """Layer -> embeddings, memory-mapped."""
        for array in (*self._arrays.values(), self._finished):
            array.flush()
        return {layer: torch.from_numpy(array) for layer, array in self._arrays.items()}
