"""Measure the searches of a retrieval task: two stages, rescoring, asymmetric encoders, and BM25 beside embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..encode.encoder import GridEncoder
from ..encode.states import shared_layers, truncate, unwrap_encoder
from .evaluators import Retrieval, Vectors
from .hybrid import FUSIONS
from .results import GridResults, MeasuredSearch, rescorers_of
from .search import SHORTLISTS, products_share, rerank
from .task_embeddings import TaskEmbeddings


LONGEST_RESCORED = 100  # documents of a shortlist in a precision


def measure_searches(
    name: str,
    embeddings: TaskEmbeddings,
    encoder: GridEncoder,
    results: GridResults,
    *,
    two_stages: bool,
    asymmetric: bool | None,
    hybrid: bool,
) -> None:
    """Add the searches of a retrieval task to the results; see [`evaluate_grid`]. Other tasks have none."""
    if not isinstance(embeddings.evaluator, Retrieval):
        return
    searches, grid = Searches(name, embeddings.evaluator, embeddings), embeddings.grid
    if two_stages:
        for layer in grid.layers:
            results.two_stage_searches += searches.two_stages(layer)
        results.rescored_searches += searches.rescored()
    layers = grid.layers if asymmetric is not False else []
    if asymmetric is None:
        shared = shared_layers(unwrap_encoder(encoder.model).config)
        layers = [layer for layer in layers if layer in shared]
    between = {layer: dims for layer in layers if (dims := embeddings.float_dims(layer))}
    results.asymmetric_searches += searches.asymmetric(between)
    if hybrid:
        last = grid.layers[-1]
        results.hybrid_searches += searches.hybrid(between or {last: embeddings.float_dims(last)})


@dataclass(frozen=True)
class Searches:
    """Measures the searches of a retrieval task with its embeddings."""

    name: str
    task: Retrieval
    embeddings: TaskEmbeddings

    def two_stages(self, layer: int) -> Iterator[MeasuredSearch]:
        """Searches with a short prefix that are reranked with a longer one, for pairs of dims and [`SHORTLISTS`]."""
        vectors, dims = self.embeddings.layer(layer), self.embeddings.float_dims(layer)
        queries, documents = vectors["queries"], vectors["documents"]
        lengths = [length for length in SHORTLISTS if length <= self.task.reachable]
        for position, first in enumerate(dims[:-1] if lengths else ()):
            shortlist = self.task.nearest(_truncated(queries, documents, first), lengths[-1]).rows
            for second in dims[position + 1 :]:
                ranked = rerank(truncate(queries, second), truncate(documents, second), shortlist, lengths)
                for length, rows in ranked.items():
                    share = products_share(len(documents), (first, second), length)
                    stages = {"layer": layer, "first_dim": first, "second_dim": second}
                    yield self._measured(rows, **stages, shortlist=length, products_share=share)

    def rescored(self) -> Iterator[MeasuredSearch]:
        """Searches that find a shortlist of at most 100 in a precision and rescore it."""
        lengths = [length for length in SHORTLISTS if length <= min(self.task.reachable, LONGEST_RESCORED)]
        for g in self.embeddings.grid.coded if lengths else ():
            shortlist = None
            for name in rescorers_of(g.code):
                if shortlist is None:
                    shortlist = self.task.nearest(self.embeddings.in_precision(g), lengths[-1]).rows
                vectors = self.embeddings.rescorer(g, name)
                for length, rows in rerank(vectors["queries"], vectors["documents"], shortlist, lengths).items():
                    size = {"layer": g.layer, "dim": g.dim}
                    yield self._measured(rows, **size, code=g.code, rescore=name, shortlist=length)

    def asymmetric(self, dims: Mapping[int, Sequence[int]]) -> Iterator[MeasuredSearch]:
        """Exact searches with queries and documents at different layers, for every dim that both have, ascending."""
        queries = {layer: self.embeddings.of("queries", layer) for layer in dims}
        for document_layer in dims:
            documents = self.embeddings.of("documents", document_layer)
            for dim in dims[document_layer]:
                others = [layer for layer in dims if layer != document_layer and dim in dims[layer]]
                if not others:
                    continue
                # One search serves the queries of all layers, and finds as many as ndcg@10 reads.
                stacked = torch.cat([truncate(queries[layer], dim) for layer in others])
                ranked = self.task.nearest(_truncated(stacked, documents, dim), 10).rows
                for layer, rows in zip(others, np.split(ranked, len(others)), strict=True):
                    yield self._measured(rows, query_layer=layer, document_layer=document_layer, dim=dim)

    def hybrid(self, dims: Mapping[int, Sequence[int]]) -> Iterator[MeasuredSearch]:
        """BM25 alone, and beside exact search with queries at every layer and documents at the last one."""
        last = max(dims)
        documents = self.embeddings.of("documents", last)
        yield self._measured(self.task.bm25_ranked())
        for layer in dims:
            queries = self.embeddings.of("queries", layer)
            for dim in (dim for dim in dims[layer] if dim in dims[last]):
                vectors = _truncated(queries, documents, dim)
                for name in FUSIONS:
                    rows = self.task.bm25_ranked(vectors, name)
                    yield self._measured(rows, query_layer=layer, document_layer=last, dim=dim, fusion=name)

    def _measured(self, rows: np.ndarray, **how: int | float | str) -> MeasuredSearch:
        metric = self.task.main_metric
        value, documents = self.task.score_ranked(rows)[metric], len(self.task.texts["documents"])
        return MeasuredSearch(self.name, documents, metric, value, **how)  # type: ignore[arg-type]


def _truncated(queries: torch.Tensor, documents: torch.Tensor, dim: int) -> Vectors:
    return {"queries": truncate(queries, dim), "documents": truncate(documents, dim)}
