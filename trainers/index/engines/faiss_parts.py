"""The parts that an index of faiss is made of, and how they are put together without a copy of their bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.codes import FLOAT, bytes_per_vector
from ...core.extras import require_extra
from ...evaluation.coding import RANGED, Coder
from ..layout import Layout, is_binary


LINKS, BREADTH = 32, 200  # M and efConstruction of a graph
CLUSTERS, PER_CLUSTER = 2048, 16  # most clusters, and least documents of one
SAMPLE = 24 << 20  # bytes of floats that clusters are found with
TRIALS, OVERLAP = 128, 0.99  # queries that the breadth of a search is set with, and what they must find
BREADTHS = tuple(2**power for power in range(12))


def empty_flat(coder: Coder) -> Any:
    """An index that compares vectors in a code one by one. It stores the bytes of [`Coder.pack`]."""
    faiss = faiss_library()
    if is_binary(coder.code):
        return faiss.IndexBinaryFlat(_bits(coder))
    if coder.code == FLOAT:
        return faiss.IndexFlatIP(coder.dim)
    return _with_ranges(faiss.IndexScalarQuantizer(coder.dim, _type(coder), faiss.METRIC_INNER_PRODUCT), coder)


def empty_graph(coder: Coder) -> Any:
    """An HNSW graph over vectors in a code."""
    faiss = faiss_library()
    if is_binary(coder.code):
        index = faiss.IndexBinaryHNSW(_bits(coder), LINKS)
    elif coder.code == FLOAT:
        index = faiss.IndexHNSWFlat(coder.dim, LINKS, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexHNSWSQ(coder.dim, _type(coder), LINKS, faiss.METRIC_INNER_PRODUCT)
        _with_ranges(faiss.downcast_index(index.storage), coder)
        index.is_trained = True
    index.hnsw.efConstruction = BREADTH
    return index


def empty_clusters(coder: Coder, centres: np.ndarray) -> Any:
    """An inverted file over vectors in a code, with given centres of its clusters."""
    faiss, count = faiss_library(), len(centres)
    if is_binary(coder.code):
        quantizer = faiss.IndexBinaryFlat(_bits(coder))
        quantizer.add(centres)
        return faiss.IndexBinaryIVF(quantizer, _bits(coder), count)
    quantizer = faiss.IndexFlatIP(coder.dim)
    quantizer.add(centres)
    metric = faiss.METRIC_INNER_PRODUCT
    if coder.code == FLOAT:
        index = faiss.IndexIVFFlat(quantizer, coder.dim, count, metric)
        index.is_trained = True
        return index
    # Not by residual: what is stored stays the vector, in the ranges of the coder.
    index = faiss.IndexIVFScalarQuantizer(quantizer, coder.dim, count, _type(coder), metric, False)
    return _with_ranges(index, coder)


def cluster_count(documents: int) -> int:
    """Number of clusters: four times the square root of the documents, in reason."""
    return max(1, min(int(4 * documents**0.5), documents // PER_CLUSTER, CLUSTERS))


def sample_size(coder: Coder) -> int:
    """Number of documents that are enough to find clusters with."""
    return SAMPLE // (4 * (_bits(coder) if is_binary(coder.code) else coder.dim))


def find_centres(coder: Coder, packed: np.ndarray, count: int) -> np.ndarray:
    """Centres of clusters, from a sample of stored bytes: floats, or bits for bits."""
    faiss = faiss_library()
    if is_binary(coder.code):
        quantizer = faiss.IndexBinaryFlat(_bits(coder))
        index = faiss.IndexBinaryIVF(quantizer, _bits(coder), count)
        index.cp.min_points_per_centroid = 1
        index.train(packed)
        return quantizer.reconstruct_n(0, count)
    kmeans = faiss.Kmeans(coder.dim, count, niter=10, spherical=True, min_points_per_centroid=1)
    kmeans.train(comparable(coder, packed))
    return kmeans.centroids


def comparable(coder: Coder, packed: np.ndarray) -> np.ndarray:
    """Stored bytes as an index takes a query: bits as they are, others decoded."""
    return packed if is_binary(coder.code) else coder.decode(packed).numpy()


def fill_flat(index: Any, codes: np.ndarray) -> None:
    """Make an empty flat index one of given bytes, without a copy. They must stay where they are."""
    if isinstance(index, faiss_library().IndexBinaryFlat):
        index.xb = _view(codes)
    else:
        index.codes = _view(codes)
    index.ntotal = len(codes)


def fill_clusters(index: Any, codes: np.ndarray, rows: np.ndarray, ends: np.ndarray) -> None:
    """
    Make an empty inverted file one of given bytes, without a copy. They must stay where they are.

    Args:
        index (`faiss.IndexIVF` or `faiss.IndexBinaryIVF`): The inverted file.
        codes (`np.ndarray` of shape `(documents, bytes)`): Bytes, cluster by cluster.
        rows (`np.ndarray` of shape `(documents,)`): Number of each document in the index.
        ends (`np.ndarray` of shape `(clusters,)`): Where each cluster ends.
    """
    faiss = faiss_library()
    lists = faiss.ArrayInvertedLists(len(ends), 0)  # of no bytes, so that only the numbers are copied into it
    views = faiss.MaybeOwnedVectorUInt8Vector()
    for cluster, (start, end) in enumerate(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)):
        numbers = np.ascontiguousarray(rows[start:end], dtype=np.int64)
        if len(numbers):
            lists.add_entries(cluster, len(numbers), faiss.swig_ptr(numbers), faiss.swig_ptr(numbers.view(np.uint8)))
        views.push_back(_view(codes[start:end]))
    lists.codes.swap(views)
    lists.code_size = codes.shape[1]
    index.replace_invlists(lists, True)
    lists.this.disown()
    index.ntotal = len(codes)


def composed(layout: Layout, base: Any, refine: Any | None) -> Any:
    """
    An index that searches `base`, and scores its shortlist by `refine` if there is one. Both may have different dims:
    a query is as wide as the wider one, and its leading dims are normalised again for the other one.
    """
    if refine is None:
        return base
    assert layout.second is not None
    width = max(layout.first.dim, layout.second.dim)
    index = faiss_library().IndexRefine(_widened(base, width), _widened(refine, width))
    index.k_factor = k_factor(layout.shortlist, 10)
    return index


def k_factor(shortlist: int | None, k: int) -> float:
    """What faiss multiplies k with, in float32, and rounds down, for the length of the shortlist."""
    return (max(k, shortlist or 0) + 0.5) / k


def with_keys(index: Any, keys: np.ndarray, *, by_key: bool = False) -> Any:
    """An index that answers with keys, of one that answers with row numbers. `by_key`: it can also give the vector of
    a key, for a hash table in memory."""
    faiss = faiss_library()
    binary = "Binary" if isinstance(index, faiss.IndexBinary) else ""
    count, index.ntotal = index.ntotal, 0  # what makes it one asks for an empty index
    found = getattr(faiss, f"Index{binary}IDMap{2 if by_key else ''}")(index)
    index.ntotal = found.ntotal = count
    faiss.copy_array_to_vector(np.ascontiguousarray(keys, dtype=np.int64), found.id_map)
    return found


def tune(index: Any, queries: np.ndarray, k: int) -> None:
    """Search twice as many clusters, or twice as much of a graph, as finds nearly all of the k nearest of trial
    queries: the queries of users are further from documents. faiss stores how much."""
    faiss = faiss_library()
    clustered = isinstance(index, faiss.IndexIVF | faiss.IndexBinaryIVF)

    def search_as_much_as(breadth: int) -> None:
        if clustered:
            index.nprobe = min(breadth, index.nlist)
        else:
            index.hnsw.efSearch = max(breadth, k)

    search_as_much_as(index.nlist if clustered else k)
    last = (index if clustered else index.storage).search(queries, k)[0][:, -1:]
    for breadth in BREADTHS:
        search_as_much_as(breadth)
        values, rows = index.search(queries, k)
        near = values <= last if isinstance(index, faiss.IndexBinary) else values >= last - 1e-6
        if (near & (rows >= 0)).mean() >= OVERLAP:
            break
    search_as_much_as(2 * breadth)


def codes_of(index: Any) -> np.ndarray:
    """Bytes `(documents, bytes)` of a flat index, where they are."""
    faiss = faiss_library()
    codes = index.xb if isinstance(index, faiss.IndexBinaryFlat) else index.codes
    if not index.ntotal:
        return np.empty((0, index.code_size), dtype=np.uint8)
    return faiss.rev_swig_ptr(codes.data(), codes.size()).reshape(index.ntotal, index.code_size)


def faiss_library() -> Any:
    """The module faiss. ValueError if it is not installed."""
    return require_extra("faiss", "faiss", "The engine faiss")


def _bits(coder: Coder) -> int:
    return 8 * bytes_per_vector(coder.code, coder.dim)


def _type(coder: Coder) -> int:
    # These types compare a query in float32; the other byte types of faiss would also round it.
    return getattr(faiss_library().ScalarQuantizer, RANGED.get(coder.code, "QT_fp16"))


def _with_ranges(index: Any, coder: Coder) -> Any:
    if coder.ranges is not None:
        index.sq.train(coder.ranges)
    index.is_trained = True
    return index


def _widened(index: Any, width: int) -> Any:
    """An index that takes wider queries: their leading dims, normalised."""
    if index.d == width:
        return index
    faiss = faiss_library()
    wider = faiss.IndexPreTransform(index)
    wider.prepend_transform(faiss.NormalizationTransform(index.d))
    wider.prepend_transform(faiss.RemapDimensionsTransform(width, index.d, False))
    return wider


def down(index: Any) -> Any:
    """An index as its own class, with its own fields."""
    faiss = faiss_library()
    return (faiss.downcast_IndexBinary if isinstance(index, faiss.IndexBinary) else faiss.downcast_index)(index)


def bare(index: Any) -> Any:
    """An index without what makes it take wider queries."""
    index = down(index)
    return down(index.index) if isinstance(index, faiss_library().IndexPreTransform) else index


def _view(codes: np.ndarray) -> Any:
    """A vector of C++ that looks at an array, instead of owning its numbers."""
    faiss = faiss_library()
    vector = faiss.MaybeOwnedVectorUInt8()
    if codes.size:
        pointer = faiss.swig_ptr(codes.reshape(-1))
        vector.is_owned = False
        vector.view_data = vector.c_ptr = pointer
        vector.view_size = vector.c_size = codes.size
    return vector
