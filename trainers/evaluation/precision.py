"""Document embeddings in fewer bits: what they take, what a search of them costs, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import faiss
import numpy as np
import torch

from ..granularity import Granularity, Grid
from ..teacher import require_sentence_transformers
from .embeddings import GridEmbeddings
from .encoding import GridEncoder
from .latency import seconds_in_turn


BITS = (32, 8, 1)


@dataclass(frozen=True)
class PackedIndex:
    """
    Document embeddings as an index stores them, and their exact search. Made by [`PackedIndex.pack`].

    Args:
        index (`faiss.Index` or `faiss.IndexBinary`): The stored vectors.
        bits (`int`): Of each number: 32, 8 or 1.
        dim (`int`): Numbers in a vector.
    """

    index: Any  # faiss has no name for both kinds
    bits: int
    dim: int

    @classmethod
    def pack(cls, vectors: torch.Tensor, bits: int) -> PackedIndex:
        """
        Store vectors: as they are; in 8 bits, where a byte is a step of the range that its dim has over the documents;
        or in 1 bit, the sign ([`~sentence_transformers.quantize_embeddings`] in both cases).

        Args:
            vectors (`torch.Tensor` of shape `(documents, dim)`): Normalised embeddings in float32.
            bits (`int`): 32, 8 or 1. Signs fill whole bytes: what a dim that is no multiple of 8 leaves is empty.

        Returns:
            [`PackedIndex`]

        Raises:
            ValueError: if there is no document, the bits are others, or sentence-transformers is not installed.
        """
        if bits not in BITS:
            raise ValueError(f"bits={bits} is no precision to store vectors in; legal values: 32, 8, 1.")
        if not len(vectors):
            raise ValueError("There is no document to search.")
        numbers, dim = vectors.numpy(), vectors.shape[1]
        index: Any
        if bits == 32:
            index = faiss.IndexFlatIP(dim)
            index.add(numbers)
            return cls(index, bits, dim)
        if bits == 1:
            codes = quantized(numbers, "ubinary")
            index = faiss.IndexBinaryFlat(8 * codes.shape[1])
            index.add(codes)
            return cls(index, bits, dim)
        # Named, not left to be inferred, which a single document does not allow: its numbers are the ranges.
        ranges = np.stack([numbers.min(axis=0), numbers.max(axis=0)])
        # Both libraries cut a range into steps of 1 / 255 of it, and faiss takes the middle of a step for its numbers.
        # With its other types of bytes, it would round the query as well.
        index = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
        index.train(ranges)
        index.add_sa_codes(quantized(numbers, "uint8", ranges))
        return cls(index, bits, dim)

    @property
    def bytes_a_vector(self) -> int:
        """Of the stored numbers of a document."""
        return self.index.code_size

    @property
    def nbytes(self) -> int:
        """Of everything that a search reads: all vectors, and with 8 bits the two ends of each dim's range."""
        ranges = 2 * self.dim * 4 if self.bits == 8 else 0
        return self.index.ntotal * self.bytes_a_vector + ranges

    def search(self, queries: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """
        The nearest documents, by comparing with every one: by cosine; with 8 bits, by the dot product of the query as
        it is with what the documents' bytes stand for; with 1 bit, by Hamming distance, to the signs of the query.

        Args:
            queries (`torch.Tensor` of shape `(queries, dim)`): Normalised embeddings in float32.
            k (`int`): Documents to find for each query; all of them where there are fewer.

        Returns:
            `tuple[np.ndarray, np.ndarray]`, both of shape `(queries, k)`: scores and rows, the best first. Scores are
            cosines, with 1 bit those of the signs: 1 where all are equal, -1 where none is.
        """
        numbers, k = queries.numpy(), min(k, self.index.ntotal)
        if self.bits > 1:
            return self.index.search(numbers, k)
        distances, rows = self.index.search(quantized(numbers, "ubinary"), k)
        return 1 - 2 * distances / self.dim, rows


def quantized(numbers: np.ndarray, precision: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """[`~sentence_transformers.quantize_embeddings`], where the extra is installed."""
    library = require_sentence_transformers("A vector of 8 bits or 1 a number")
    return library.quantize_embeddings(numbers, precision=precision, ranges=ranges)


@dataclass(frozen=True)
class Setting:
    """
    How documents are stored and searched.

    Args:
        granularity ([`Granularity`]): Of queries and documents.
        bits (`int`): Of each stored number: 32, 8 or 1.
    """

    granularity: Granularity
    bits: int


@dataclass(frozen=True)
class Search:
    """
    What one query found at one setting, and what that took.

    Args:
        setting ([`Setting`]): It.
        rows (`list[int]`): Documents found, the best first.
        scores (`list[float]`): Of each, as [`PackedIndex.search`] says.
        encode_ms (`float`): Milliseconds from text to vector.
        search_ms (`float`): Milliseconds from vector to rows.
        bytes_a_vector (`int`): Of a document.
        index_bytes (`int`): Of all documents.
    """

    setting: Setting
    rows: list[int]
    scores: list[float]
    encode_ms: float
    search_ms: float
    bytes_a_vector: int
    index_bytes: int


def search_at(
    encoder: GridEncoder,
    documents: GridEmbeddings,
    query: str,
    settings: Sequence[Setting],
    *,
    k: int = 5,
    rounds: int = 5,
) -> list[Search]:
    """
    Ask the same at several settings. The query is encoded for each of them alone, to its layer: an m3BERT stops there.

    Args:
        encoder ([`GridEncoder`]): Of queries and documents.
        documents ([`GridEmbeddings`]): Of the same encoder.
        query (`str`): Text.
        settings (`Sequence[Setting]`): Of granularities in the grid of the documents.
        k (`int`, *optional*, defaults to 5): Documents to find; all of them where there are fewer.
        rounds (`int`, *optional*, defaults to 5): Times of each; the settings take turns, and medians are taken.

    Returns:
        `list[Search]`: of each setting.

    Raises:
        ValueError: if a granularity is not in the grid, the bits are none of 32, 8, 1, or an embedding is not finite.
    """
    indexes = [PackedIndex.pack(documents.at(s.granularity, normalize=True), s.bits) for s in settings]
    encodings = [partial(_encoded, encoder, query, setting.granularity) for setting in settings]
    queries = [encoding() for encoding in encodings]
    searches = [partial(index.search, vector, k) for index, vector in zip(indexes, queries, strict=True)]
    encode_seconds = seconds_in_turn(dict(enumerate(encodings)), rounds)
    search_seconds = seconds_in_turn(dict(enumerate(searches)), rounds)
    found = [search() for search in searches]
    return [
        Search(
            setting,
            found[turn][1][0].tolist(),
            found[turn][0][0].tolist(),
            1000 * encode_seconds[turn],
            1000 * search_seconds[turn],
            indexes[turn].bytes_a_vector,
            indexes[turn].nbytes,
        )
        for turn, setting in enumerate(settings)
    ]


def _encoded(encoder: GridEncoder, query: str, granularity: Granularity) -> torch.Tensor:
    alone = replace(encoder, grid=Grid((granularity,)))
    return alone.encode([query], role="query").require_finite().at(granularity, normalize=True)
