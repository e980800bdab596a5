"""Exact search, and two-stage search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ..encode.embeddings import ROWS_AT_ONCE


SHORTLISTS = (10, 20, 50, 100, 200)  # lengths of shortlists that are measured
QUERIES_AT_ONCE = 64  # queries whose cosines with a block of documents are in memory together


def exact_search(queries: torch.Tensor, documents: torch.Tensor, k: int) -> np.ndarray:
    """
    Find the documents with the highest cosine by comparing each query with every document (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), A.1). Besides the documents, which may be memory-mapped,
    memory does not grow with their number. The search runs on a GPU if there is one.

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): Embeddings; need not be normalised.
        documents (`torch.Tensor` of shape `(documents, dim)`): Embeddings; need not be normalised.
        k (`int`): Number of documents to find per query; all documents if there are fewer.

    Returns:
        `np.ndarray` of shape `(queries, k)`: rows of `documents`, best first; of rows with equal cosines, the first
        ones.
    """
    return nearest(queries, documents, k)[1]


def nearest(queries: torch.Tensor, documents: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """[`exact_search`] with the cosines: both of shape `(queries, k)`."""
    queries = nn.functional.normalize(queries.to("cuda" if torch.cuda.is_available() else "cpu").float(), dim=1)
    best, rows, start = queries[:, :0], queries[:, :0].long(), 0
    for block in documents.split(ROWS_AT_ONCE):
        block = nn.functional.normalize(block.to(queries.device).float(), dim=1)
        of_block = [_first_best(some @ block.T, k) for some in queries.split(QUERIES_AT_ONCE)]
        cosines, places = (torch.cat(parts) for parts in zip(*of_block, strict=True))
        best, rows = torch.cat([best, cosines], dim=1), torch.cat([rows, places + start], dim=1)
        # Stable: the rows of equal cosines are in ascending order, in a block and from block to block.
        best, order = best.sort(dim=1, descending=True, stable=True)
        best, rows, start = best[:, :k], rows.gather(1, order)[:, :k], start + len(block)
    return best.cpu().numpy(), rows.cpu().numpy()


def _first_best(cosines: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` highest cosines per row and their columns, ascending; of equal cosines the first, unlike `topk`."""
    k = min(k, cosines.shape[1])
    last = cosines.topk(k, dim=1).values[:, -1:]
    better, equal = cosines > last, cosines == last
    room = k - better.sum(dim=1, keepdim=True)
    chosen = better | (equal & (equal.cumsum(dim=1, dtype=torch.int32) <= room))
    columns = chosen.nonzero()[:, 1].view(len(cosines), k)
    return cosines.gather(1, columns), columns


def rerank(
    queries: torch.Tensor, documents: torch.Tensor, shortlist: np.ndarray, sizes: Sequence[int]
) -> dict[int, np.ndarray]:
    """
    The second stage of a two-stage search: sort the first documents of a shortlist by cosine.

    Args:
        queries (`torch.Tensor` of shape `(queries, dim)`): Embeddings; need not be normalised.
        documents (`torch.Tensor` of shape `(documents, dim)`): Embeddings of the whole collection.
        shortlist (`np.ndarray` of shape `(queries, length)`): Rows of `documents`, best first.
        sizes (`Sequence[int]`): Numbers of documents to rerank; each number is a separate search.

    Returns:
        `dict[int, np.ndarray]`: size -> rows of shape `(queries, size)`, best first.
    """
    queries, reordered = nn.functional.normalize(queries.float(), dim=1), []
    for query, rows in zip(queries, shortlist, strict=True):
        cosines = nn.functional.normalize(documents[torch.from_numpy(rows)].float(), dim=1) @ query
        orders = (cosines[:size].argsort(descending=True, stable=True).numpy() for size in sizes)
        reordered.append([rows[order] for order in orders])
    return {size: np.stack(ranked) for size, ranked in zip(sizes, zip(*reordered, strict=True), strict=True)}


def products_share(documents: int, dims: tuple[int, int], size: int) -> float:
    """Multiplications of a two-stage search, as a share of an exact search at the dim of the second stage."""
    first, second = dims
    return (documents * first + size * second) / (documents * second)
