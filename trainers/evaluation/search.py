"""Exact search, and two-stage search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import nn

from .embeddings import ROWS_AT_ONCE


SHORTLISTS = (10, 20, 50, 100, 200)  # lengths of shortlists that are measured
LONGEST_ON_GPU = 2048  # documents that faiss finds per query on a GPU
QUERIES_AT_ONCE = 64  # queries whose cosines with a block of documents are in memory together


def exact_search(queries: torch.Tensor, documents: torch.Tensor, k: int) -> np.ndarray:
    """
    Find the documents with the highest cosine by comparing each query with every document (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), A.1). Besides the documents, which may be memory-mapped,
    memory does not grow with their number.

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): Embeddings; need not be normalised.
        documents (`torch.Tensor` of shape `(documents, dim)`): Embeddings; need not be normalised.
        k (`int`): Number of documents to find per query; all documents if there are fewer.

    Returns:
        `np.ndarray` of shape `(queries, k)`: rows of `documents`, best first; of rows with equal cosines, the first
        ones.
    """
    return search_blocks(queries, lambda: documents.split(ROWS_AT_ONCE), k)[1]


def search_blocks(
    queries: torch.Tensor, blocks: Callable[[], Iterable[torch.Tensor]], k: int
) -> tuple[np.ndarray, np.ndarray]:
    """
    [`exact_search`] among documents that come in blocks. The result does not depend on the sizes of the blocks.

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): Embeddings; need not be normalised.
        blocks (`Callable`): Gives the embeddings of all documents in blocks `(documents, dim)`; may be called twice.
        k (`int`): Number of documents to find per query; all documents if there are fewer.

    Returns:
        `tuple[np.ndarray, np.ndarray]`, both of shape `(queries, k)`: cosines and rows, best first; of rows with equal
        cosines, the first ones.
    """
    # One document more than asked for shows where the k-th has equals that an engine may have left out.
    index: ExactIndex | None = None

    def search(block: torch.Tensor, wanted: int) -> tuple[np.ndarray, np.ndarray]:
        nonlocal index
        if index is None:
            index = ExactIndex(block, gpus=faiss_gpus() if wanted <= LONGEST_ON_GPU else 0)
        else:
            index.fill(block)
        return index.search(queries, wanted)

    cosines, rows = _merged(queries, blocks, k + 1, search)
    if cosines.shape[1] > k:
        tied = (cosines[:, k - 1] == cosines[:, k]).nonzero()[0]
        if len(tied):
            some = queries[tied]
            cosines[tied, :k], rows[tied, :k] = _merged(
                some, blocks, k, lambda block, wanted: first_best(some, block, wanted)
            )
    return cosines[:, :k], rows[:, :k]


def _merged(
    queries: torch.Tensor,
    blocks: Callable[[], Iterable[torch.Tensor]],
    k: int,
    search: Callable[[torch.Tensor, int], tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray]:
    """The best `k` of all blocks, from a search in each: cosines and rows. Of equal cosines, the first rows."""
    best, rows, start = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64), 0
    for block in blocks():
        cosines, found = search(block, k)
        best, rows = np.concatenate([best, cosines], axis=1), np.concatenate([rows, found + start], axis=1)
        order = np.lexsort((rows, -best))[:, :k]
        best, rows = np.take_along_axis(best, order, axis=1), np.take_along_axis(rows, order, axis=1)
        start += len(block)
    return best, rows


def first_best(queries: torch.Tensor, documents: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Cosines and rows of the best `k` documents, or of all, where the k-th may have equals: those of the lowest rows,
    in the order of rows.

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): Embeddings; need not be normalised.
        documents (`torch.Tensor` of shape `(documents, dim)`): Embeddings; need not be normalised.
        k (`int`): Number of documents to find per query.
    """
    documents, k = nn.functional.normalize(documents.float(), dim=1), min(k, len(documents))
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for some in nn.functional.normalize(queries.float(), dim=1).split(QUERIES_AT_ONCE):
        cosines = some @ documents.T
        last = cosines.topk(k, dim=1).values[:, -1:]
        better, equal = cosines > last, cosines == last
        room = k - better.sum(dim=1, keepdim=True)
        rows = (better | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))).nonzero()[:, 1].view(len(some), k)
        found.append((cosines.gather(1, rows), rows))
    best, rows = (torch.cat(parts) for parts in zip(*found, strict=True))
    return best.numpy(), rows.numpy()


def faiss_gpus() -> int:
    """Number of GPUs that a search in many documents uses: those that faiss sees. 0 without faiss built for GPUs."""
    if ExactIndex.engine != "faiss":
        return 0
    import faiss

    return faiss.get_num_gpus()


class ExactIndex:
    """
    An index for exact search by cosine. It uses faiss' `IndexFlatIP` if faiss is installed (extra `evaluation`),
    otherwise `torch.topk` over blocks of documents.

    Args:
        documents (`torch.Tensor` of shape `(documents, dim)`): Embeddings; need not be normalised.
        gpus (`int`, *optional*, defaults to 0): Number of GPUs for faiss; 0 searches on the CPU.
    """

    engine = "torch" if find_spec("faiss") is None else "faiss"

    def __init__(self, documents: torch.Tensor, gpus: int = 0):
        self._index: Any = None
        if self.engine == "faiss":
            import faiss

            self._index = faiss.IndexFlatIP(documents.shape[1])
            if gpus:
                self._index = faiss.index_cpu_to_all_gpus(self._index, ngpu=gpus)
        self.fill(documents)

    def fill(self, documents: torch.Tensor) -> None:
        """Search in these documents from now on, in the memory of those before."""
        self.count = len(documents)
        self._blocks: list[torch.Tensor] = []
        if self._index is not None:
            self._index.reset()
        for block in documents.split(ROWS_AT_ONCE):
            normalized = nn.functional.normalize(block.float(), dim=1)
            if self._index is None:
                self._blocks.append(normalized)
            else:
                self._index.add(normalized.numpy())

    def search(self, queries: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Find the documents with the highest cosine.

        Args:
            queries (`torch.Tensor` of shape `(queries, dim)`): Embeddings; need not be normalised.
            k (`int`): Number of documents to find per query; all documents if there are fewer.

        Returns:
            `tuple[np.ndarray, np.ndarray]`, both of shape `(queries, k)`: cosines and rows, best first.
        """
        queries, k = nn.functional.normalize(queries.float(), dim=1), min(k, self.count)
        if self._index is not None:
            return self._index.search(queries.numpy(), k)
        best, rows, start = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.long), 0
        for block in self._blocks:
            cosines = queries @ block.T
            best = torch.cat([best, cosines], dim=1)
            rows = torch.cat([rows, torch.arange(start, start + len(block)).expand(len(queries), -1)], dim=1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            rows, start = rows.gather(1, order), start + len(block)
        return best.numpy(), rows.numpy()


def rerank(
    queries: torch.Tensor, documents: torch.Tensor, shortlist: np.ndarray, sizes: Sequence[int]
) -> dict[int, np.ndarray]:
    """
    The second stage of a two-stage search: sort the first documents of a shortlist by cosine.

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): Embeddings at the granularity that reranks; need not be
            normalised.
        documents (`torch.Tensor` of shape `(documents, dim)`): Embeddings of the whole collection, at the same
            granularity.
        shortlist (`np.ndarray` of shape `(queries, length)`): Rows of `documents` found by the first stage, best
            first.
        sizes (`Sequence[int]`): Numbers of documents to rerank; each number is a separate search.

    Returns:
        `dict[int, np.ndarray]`: size -> rows of shape `(queries, size)`, best first.
    """
    queries = nn.functional.normalize(queries.float(), dim=1)
    cosines = torch.stack(
        [
            nn.functional.normalize(documents[rows].float(), dim=1) @ query
            for query, rows in zip(queries, torch.from_numpy(shortlist), strict=True)
        ]
    )
    orders = {size: cosines[:, :size].argsort(dim=1, descending=True, stable=True).numpy() for size in sizes}
    return {size: np.take_along_axis(shortlist[:, :size], order, axis=1) for size, order in orders.items()}


def products_share(documents: int, dims: tuple[int, int], size: int) -> float:
    """Multiplications of a two-stage search, as a share of those of an exact search at the dim of the second stage."""
    first, second = dims
    return (documents * first + size * second) / (documents * second)
