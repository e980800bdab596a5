"""
Embeddings in a precision: the bytes that are stored, an index of them, and the float vectors that compare as they do.

An evaluator knows only float vectors. [`vectors_in_precision`] gives it vectors whose cosines rank as an index of the
stored bytes ranks, so that every precision is scored from the one encode of a grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..utils.extras import require_extra, require_sentence_transformers
from .embeddings import ROWS_AT_ONCE
from .granularity import Granularity, Grid
from .precisions import FLOAT, bytes_per_vector, precision_of, stored_bits
from .states import truncate


if TYPE_CHECKING:
    from ..modeling.quantization_m3bert import M3BertQuantizer

# Precisions with a range per dim -> the type of faiss with the same bytes.
RANGED = {"int8": "QT_8bit", "int4": "QT_4bit"}
# Precisions that sentence-transformers quantises to -> its names of them.
BY_SENTENCE_TRANSFORMERS = {"int8": "uint8", "binary": "ubinary"}
# Precisions of numbers -> their storage in faiss, which compares a query in float32: other types would round it, too.
STORAGE = {FLOAT: "Flat", "float16": "SQfp16", "int8": "SQ8", "int4": "SQ4"}


@dataclass(frozen=True)
class Coder:
    """
    A precision for embeddings of `dim` dims of one collection, with the minimum and maximum of each, `(2, dim)`, for
    `int8` and `int4`, and the quantizer for the precisions `qama-*`. Made by [`Coder.fit`].
    """

    code: str
    dim: int
    ranges: np.ndarray | None = None
    quantizer: M3BertQuantizer | None = None

    @classmethod
    def fit(
        cls, vectors: torch.Tensor, code: str = FLOAT, dim: int | None = None, quantizer: M3BertQuantizer | None = None
    ) -> Coder:
        """
        Fit a precision to the embeddings `(vectors, width)` that it will store, of which `dim` leading dims are kept,
        by default all. They need not be normalised. ValueError if the precision is unknown or needs a quantizer, or
        `dim` is not within the dims.
        """
        width = vectors.shape[1]
        dim = width if dim is None else dim
        if not 0 < dim <= width:
            raise ValueError(f"dim={dim} must be within 1..{width}, the dims of the embeddings.")
        if precision_of(code).learned:
            if quantizer is None:
                raise ValueError(f"The precision {code} needs a quantizer, and there is none.")
            return cls(code, dim, quantizer=quantizer)
        if code not in RANGED:
            return cls(code, dim)
        blocks = [_unit(block, dim) for block in vectors.split(ROWS_AT_ONCE)]
        low, high = torch.stack([b.amin(dim=0) for b in blocks]), torch.stack([b.amax(dim=0) for b in blocks])
        return cls(code, dim, np.stack([low.amin(dim=0).numpy(), high.amax(dim=0).numpy()]))

    @property
    def symmetric(self) -> bool:
        """As [`Precision.symmetric`]."""
        return precision_of(self.code).symmetric

    def pack(self, vectors: torch.Tensor) -> np.ndarray:
        """The bytes to store, uint8 `(vectors, bytes_per_vector)`, of embeddings `(vectors, width)`."""
        return np.concatenate([self._pack(block) for block in vectors.split(ROWS_AT_ONCE)])

    def _pack(self, vectors: torch.Tensor) -> np.ndarray:
        if self.quantizer is not None:
            codes = self.quantizer.encode(vectors.float().to(self.quantizer.device), self.code, self.dim)
            return codes.packed.cpu().numpy()
        numbers = _unit(vectors, self.dim).numpy()
        if self.code in BY_SENTENCE_TRANSFORMERS:
            library = require_sentence_transformers("A precision of 8 bits or 1 a number")
            precision = BY_SENTENCE_TRANSFORMERS[self.code]
            return library.quantize_embeddings(numbers, precision=precision, ranges=self.ranges)
        if self.code == "int4":
            return self._faiss_quantizer().compute_codes(numbers)
        return numbers.astype(self.code).view(np.uint8)

    @torch.no_grad()
    def decode(self, packed: np.ndarray) -> torch.Tensor:
        """The numbers that bytes stand for, float32 `(vectors, numbers)`, which are compared with
        [`~Coder.float_queries`]: the middle of a step for `int8` and `int4`, 1 or -1 for `binary`, the mean of a level
        for `qama-*`."""
        if self.quantizer is not None:
            return self.quantizer.decode(self._codes(packed)).cpu()
        if self.code == "binary":
            return torch.from_numpy(2 * np.unpackbits(packed, axis=1, count=self.dim).astype(np.float32) - 1)
        if self.code in RANGED:
            return torch.from_numpy(self._faiss_quantizer().decode(packed))
        return torch.from_numpy(packed.view(self.code).astype(np.float32))

    @torch.no_grad()
    def float_queries(self, vectors: torch.Tensor) -> torch.Tensor:
        """Queries as the float numbers that are compared with [`~Coder.decode`], `(queries, numbers)`, normalised."""
        if self.quantizer is None:
            return _unit(vectors, self.dim)
        units = self.quantizer.units(vectors.float().to(self.quantizer.device), self.code, self.dim).cpu()
        return torch.nn.functional.normalize(units, dim=1)

    def documents(self, packed: np.ndarray) -> torch.Tensor:
        """Stored bytes as a search compares them with [`~Coder.queries`]: bits as 1 and -1, or decoded."""
        if self.quantizer is not None:
            return self.quantizer.signs(self._codes(packed)).cpu()
        return self.decode(packed)

    def queries(self, vectors: torch.Tensor) -> torch.Tensor:
        """Queries as a search compares them with [`~Coder.documents`]: coded as the documents, or in float32."""
        return self.documents(self.pack(vectors)) if self.symmetric else self.float_queries(vectors)

    def _codes(self, packed: np.ndarray) -> Any:
        from ..modeling.quantization_m3bert import Codes

        assert self.quantizer is not None  # by the callers
        tensor = torch.from_numpy(packed).to(self.quantizer.device)
        return Codes(tensor, self.code, self.dim, self.quantizer.fingerprint)

    def _faiss_quantizer(self) -> Any:
        faiss = require_extra("faiss", "evaluation", f"The precision {self.code}")
        quantizer = faiss.ScalarQuantizer(self.dim, getattr(faiss.ScalarQuantizer, RANGED[self.code]))
        quantizer.train(self.ranges)
        return quantizer


@dataclass(frozen=True)
class PackedIndex:
    """An index of embeddings in a precision, with exact search. Made by [`PackedIndex.pack`]."""

    index: Any  # faiss has no common base class for both kinds
    coder: Coder

    @classmethod
    def pack(
        cls, vectors: torch.Tensor, code: str = FLOAT, dim: int | None = None, quantizer: M3BertQuantizer | None = None
    ) -> PackedIndex:
        """Build an index of embeddings; arguments as for [`Coder.fit`]."""
        coder = Coder.fit(vectors, code, dim, quantizer)
        return cls.of(coder, coder.pack(vectors))

    @classmethod
    def of(cls, coder: Coder, packed: np.ndarray) -> PackedIndex:
        """An index of bytes `(documents, bytes_per_vector)` that [`Coder.pack`] made."""
        index = faiss_index(coder)
        if coder.symmetric:
            index.add(packed)
        else:
            index.add_sa_codes(packed)
        return cls(index, coder)

    @property
    def nbytes(self) -> int:
        """Bytes that a search reads: all vectors and, for `int8` and `int4`, the minimum and maximum of each dim."""
        ranges = 0 if self.coder.ranges is None else self.coder.ranges.nbytes
        return self.index.ntotal * self.index.code_size + ranges

    def search(self, queries: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Find the `k` nearest documents, or all if there are fewer, of queries `(queries, width)`, which need not be
        normalised, by comparing each with every document. Returns scores and rows `(queries, k)`, best first. A score
        is the dot product of the float32 query and the decoded document; for `binary` and `qama-*`, which are compared
        by Hamming distance, the cosine of the bits as 1 and -1.
        """
        k = min(k, self.index.ntotal)
        if not self.coder.symmetric:
            return self.index.search(self.coder.float_queries(queries).numpy(), k)
        distances, rows = self.index.search(self.coder.pack(queries), k)
        return 1 - 2 * distances / stored_bits(self.coder.code, self.coder.dim), rows


def faiss_index(coder: Coder, arrangement: str = "") -> Any:
    """
    An empty index of faiss for vectors in a precision: bits are compared by Hamming distance, numbers by dot product.
    `arrangement` is their arrangement as `faiss.index_factory` calls it: `"HNSW32"` is a graph, `"IVF64"` are
    clusters, which must still be trained. By default, vectors are compared one by one.
    """
    faiss = require_extra("faiss", "evaluation", "An index of packed vectors")
    if coder.symmetric:
        bits = 8 * bytes_per_vector(coder.code, coder.dim)
        return faiss.index_binary_factory(bits, f"B{arrangement or 'Flat'}")
    description = ",".join(filter(None, [arrangement, STORAGE[coder.code]]))
    index = faiss.index_factory(coder.dim, description, faiss.METRIC_INNER_PRODUCT)
    if coder.ranges is not None and not arrangement.startswith("IVF"):
        index.train(coder.ranges)
    return index


def vectors_in_precision(
    vectors: Mapping[str, torch.Tensor],
    stored: Sequence[str],
    granularity: Granularity,
    quantizer: M3BertQuantizer | None = None,
    *,
    float_queries: bool = False,
) -> dict[str, torch.Tensor]:
    """
    Embeddings of a task in a precision, as float32 vectors whose cosines rank as an index of the stored bytes does.
    Some precisions have another number of dims. The precision is fitted to the `stored` of the embeddings of one layer
    `(texts, width)`, which are not normalised; the others are queries. With `float_queries`, queries stay in float32
    and documents are decoded for every precision, as when a shortlist is rescored. Raises as [`Coder.fit`].
    """
    everything = vectors[stored[0]] if len(stored) == 1 else torch.cat([vectors[name] for name in stored])
    coder = Coder.fit(everything, granularity.code, granularity.dim, quantizer)
    embed_document, embed_query = coder.documents, coder.queries
    if float_queries:
        embed_document, embed_query = coder.decode, coder.float_queries
    documents = {name: embed_document(coder.pack(vectors[name])) for name in stored}
    queries = {name: embed_query(side) for name, side in vectors.items() if name not in stored}
    if not queries or coder.symmetric:
        return documents | queries
    # An index computes dot products, and decoded documents differ a little in length. One more number makes all
    # lengths equal, so that cosines rank as dot products do. It is zero for queries.
    squares = {name: side.square().sum(dim=1, keepdim=True) for name, side in documents.items()}
    longest = max(square.max() for square in squares.values())
    documents = {name: torch.cat([side, (longest - squares[name]).sqrt()], dim=1) for name, side in documents.items()}
    queries = {name: torch.nn.functional.pad(side, (0, 1)) for name, side in queries.items()}
    return documents | queries


def require_quantizer(quantizer: M3BertQuantizer | None, grid: Grid, width: int) -> None:
    """Raise a ValueError if a precision `qama-*` of a grid has no quantizer for its layer and `width`."""
    learned = [member for member in grid if precision_of(member.code).learned]
    if not learned:
        return
    named = ", ".join(map(str, learned))
    if quantizer is None:
        raise ValueError(f"{named}: these precisions need a quantizer, and the encoder has none.")
    if quantizer.config.hidden_size != width:
        raise ValueError(
            f"{named}: the quantizer reads {quantizer.config.hidden_size} dims, and the embeddings have {width}."
        )
    layers = quantizer.config.layers
    if other := [str(member) for member in learned if layers and member.layer not in layers]:
        raise ValueError(
            f"{', '.join(other)}: the quantizer is for embeddings of layer {', '.join(map(str, layers))}."
        )


def _unit(vectors: torch.Tensor, dim: int) -> torch.Tensor:
    return truncate(vectors.float(), dim, normalize=True)
