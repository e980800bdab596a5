"""The texts of one task, embedded once for all granularities of a grid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ..encode.coding import vectors_in_precision
from ..encode.embeddings import GridEmbeddings
from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity
from ..encode.precisions import FLOAT
from ..encode.states import truncate
from .evaluators import Evaluator, Scores, Vectors


class TaskEmbeddings:
    """Embeddings of the texts of one task at every granularity, in memory or memory-mapped in a folder; equal texts
    are encoded once. ValueError, which names the granularities, if one is not finite."""

    def __init__(
        self, encoder: GridEncoder, evaluator: Evaluator, description: str | None = None, folder: Path | None = None
    ) -> None:
        encoder.require_cosine()
        self.grid, self.quantizer, self.evaluator = encoder.grid, encoder.quantizer, evaluator
        self._rows: dict[str, list[int] | None] = {}
        self._embeddings: dict[str, GridEmbeddings] = {}
        for role in dict.fromkeys(map(evaluator.role, evaluator.texts)):
            position: dict[str, int] = {}
            rows_by_name = {
                name: [position.setdefault(text, len(position)) for text in texts]
                for name, texts in evaluator.texts.items()
                if evaluator.role(name) == role
            }
            embeddings = encoder.encode(
                list(position),
                role=evaluator.read_as(role, encoder),
                description=description,
                folder=folder / role if folder else None,
            ).require_finite()
            for name, rows in rows_by_name.items():  # None: all rows in order, which needs no copy
                self._rows[name] = None if rows == list(range(len(position))) else rows
                self._embeddings[name] = embeddings

    def of(self, name: str, layer: int) -> torch.Tensor:
        """Embeddings of one list of texts at the widest granularity of a layer, `(texts, dim)`."""
        return truncate(self._encoded(name, layer), self.grid.dims_of(layer)[-1])

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Name of each list of texts -> [`~TaskEmbeddings.of`] a layer."""
        return {name: self.of(name, layer) for name in self._rows}

    def in_precision(self, granularity: Granularity, *, float_queries: bool = False) -> dict[str, torch.Tensor]:
        """Name of each list of texts -> its embeddings in a precision, by [`vectors_in_precision`]."""
        encoded = {name: self._encoded(name, granularity.layer) for name in self._rows}
        return vectors_in_precision(
            encoded, self.evaluator.stored, granularity, self.quantizer, float_queries=float_queries
        )

    def rescorer(self, granularity: Granularity, name: str) -> Vectors:
        """Vectors that rescore a shortlist of a precision: one of [`rescorers_of`] it."""
        if name == "codes":
            return self.in_precision(granularity, float_queries=True)
        return self.in_precision(replace(granularity, code=name))

    def float_dims(self, layer: int) -> list[int]:
        """Dims of a layer that are scored in float32."""
        return [g.dim for g in self.grid if (g.layer, g.code) == (layer, FLOAT)]

    def scores(self) -> dict[Granularity, Scores]:
        """Granularity -> metric -> value."""
        scores: dict[Granularity, Scores] = {}
        for layer in self.grid.layers:
            if dims := self.float_dims(layer):
                by_dim = self.evaluator.score_layer(self.layer(layer), dims)
                scores |= {Granularity(layer, dim): metrics for dim, metrics in by_dim.items()}
        for g in self.grid.coded:
            vectors = self.in_precision(g)
            width = next(iter(vectors.values())).shape[1]  # some precisions have another number of dims
            scores[g] = self.evaluator.score_layer(vectors, [width])[width]
        return {g: scores[g] for g in self.grid}

    def _encoded(self, name: str, layer: int) -> torch.Tensor:
        return self._embeddings[name].widest(layer, self._rows[name])
