"""Document embeddings stored in 32, 8 or 1 bits per number: size, search time and search results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ..core.extras import require_extra
from ..core.granularity import Granularity, Grid
from ..data.teacher import require_sentence_transformers
from .embeddings import GridEmbeddings
from .encoding import GridEncoder
from .latency import seconds_in_turn


BITS = (32, 8, 1)


@dataclass(frozen=True)
class PackedIndex:
    """
    An index of document embeddings in 32, 8 or 1 bits per number, with exact search. Made by [`PackedIndex.pack`].

    Args:
        index (`faiss.Index` or `faiss.IndexBinary`): The stored vectors.
        bits (`int`): Bits per number: 32, 8 or 1.
        dim (`int`): Numbers per vector.
    """

    index: Any  # faiss has no common base class for both kinds
    bits: int
    dim: int

    @classmethod
    def pack(cls, vectors: torch.Tensor, bits: int) -> PackedIndex:
        """
        Build an index. With 32 bits, vectors are stored unchanged. With 8 bits, each number is one of 256 levels of
        the range of its dim over the documents. With 1 bit, the sign is stored. Both use
        [`~sentence_transformers.quantize_embeddings`].

        Args:
            vectors (`torch.Tensor` of shape `(documents, dim)`): Normalised embeddings in float32.
            bits (`int`): 32, 8 or 1. Signs are padded to whole bytes.

        Returns:
            [`PackedIndex`]

        Raises:
            ValueError: if there are no documents, `bits` is not a legal value, or faiss or sentence-transformers is
                not installed.
        """
        if bits not in BITS:
            raise ValueError(f"bits={bits} is not available; legal values: 32, 8, 1.")
        if not len(vectors):
            raise ValueError("There is no document to search.")
        numbers, dim = vectors.numpy(), vectors.shape[1]
        faiss = require_extra("faiss", "evaluation", "An index of packed vectors")
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
        # Passed explicitly, because the library cannot infer the ranges from a single document.
        ranges = np.stack([numbers.min(axis=0), numbers.max(axis=0)])
        # Both libraries divide a range into steps of 1 / 255, and faiss decodes a byte to the middle of its step.
        # The other byte types of faiss would also round the query.
        index = faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
        index.train(ranges)
        index.add_sa_codes(quantized(numbers, "uint8", ranges))
        return cls(index, bits, dim)

    @property
    def bytes_per_vector(self) -> int:
        """Bytes per document vector."""
        return self.index.code_size

    @property
    def nbytes(self) -> int:
        """Bytes that a search reads: all vectors and, with 8 bits, the minimum and maximum of each dim."""
        ranges = 2 * self.dim * 4 if self.bits == 8 else 0
        return self.index.ntotal * self.bytes_per_vector + ranges

    def search(self, queries: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Find the nearest documents by comparing each query with every document. With 32 bits, the score is the cosine.
        With 8 bits, it is the dot product of the float32 query and the decoded document. With 1 bit, the signs of
        query and document are compared by Hamming distance.

        Args:
            queries (`torch.Tensor` of shape `(queries, dim)`): Normalised embeddings in float32.
            k (`int`): Number of documents to find per query; all documents if there are fewer.

        Returns:
            `tuple[np.ndarray, np.ndarray]`, both of shape `(queries, k)`: scores and rows, best first. With 1 bit, the
            score is the cosine of the signs: 1 if all signs are equal, -1 if all differ.
        """
        numbers, k = queries.numpy(), min(k, self.index.ntotal)
        if self.bits > 1:
            return self.index.search(numbers, k)
        distances, rows = self.index.search(quantized(numbers, "ubinary"), k)
        return 1 - 2 * distances / self.dim, rows


def quantized(numbers: np.ndarray, precision: str, ranges: np.ndarray | None = None) -> np.ndarray:
    """[`~sentence_transformers.quantize_embeddings`] of the optional dependency sentence-transformers."""
    library = require_sentence_transformers("A vector of 8 bits or 1 a number")
    return library.quantize_embeddings(numbers, precision=precision, ranges=ranges)


@dataclass(frozen=True)
class Setting:
    """
    How documents are stored and searched.

    Args:
        granularity ([`Granularity`]): Granularity of the documents.
        bits (`int`): Bits per stored number: 32, 8 or 1.
        query_layer (`int`, *optional*): Layer of the query, for an encoder with exits. Default: that of the documents.
    """

    granularity: Granularity
    bits: int
    query_layer: int | None = None

    @property
    def query(self) -> Granularity:
        """Granularity of the query."""
        layer = self.granularity.layer if self.query_layer is None else self.query_layer
        return Granularity(layer, self.granularity.dim)


@dataclass(frozen=True)
class Search:
    """
    Result and cost of one query at one setting.

    Args:
        setting ([`Setting`]): The setting.
        rows (`list[int]`): Documents found, best first.
        scores (`list[float]`): Scores of these documents, from [`PackedIndex.search`].
        encode_ms (`float`): Milliseconds to encode the query.
        search_ms (`float`): Milliseconds to search the index.
        bytes_per_vector (`int`): Bytes per document vector.
        index_bytes (`int`): Bytes of the whole index.
    """

    setting: Setting
    rows: list[int]
    scores: list[float]
    encode_ms: float
    search_ms: float
    bytes_per_vector: int
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
    Run the same query at several settings. The query is encoded separately for each setting, only up to its layer if
    the encoder is an m3BERT.

    Args:
        encoder ([`GridEncoder`]): Encoder of queries and documents.
        documents ([`GridEmbeddings`]): Embeddings of the documents by this encoder.
        query (`str`): Query.
        settings (`Sequence[Setting]`): Settings, with granularities of the grid of the documents.
        k (`int`, *optional*, defaults to 5): Number of documents to find; all documents if there are fewer.
        rounds (`int`, *optional*, defaults to 5): Measurements per setting; the times are their medians.

    Returns:
        `list[Search]`: one result per setting.

    Raises:
        ValueError: if a granularity is not in the grid, `bits` is not a legal value, or an embedding is not finite.
    """
    indexes = [PackedIndex.pack(documents.at(s.granularity, normalize=True), s.bits) for s in settings]
    encodings = [partial(_encoded, encoder, query, setting.query) for setting in settings]
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
            indexes[turn].bytes_per_vector,
            indexes[turn].nbytes,
        )
        for turn, setting in enumerate(settings)
    ]


def _encoded(encoder: GridEncoder, query: str, granularity: Granularity) -> torch.Tensor:
    alone = replace(encoder, grid=Grid((granularity,)))
    return alone.encode([query], role="query").require_finite().at(granularity, normalize=True)
