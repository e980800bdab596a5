"""Files of faiss: how they are written without holding all of them in memory, and what is in an opened one."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..layout import Layout
from .durable import replacing
from .faiss_parts import bare, codes_of, composed, down, empty_flat, faiss_library, k_factor


AT_ONCE = 1 << 20  # bytes


def save(index: Any, file: Path) -> None:
    """Write an index to a file, all or nothing. OSError if it cannot be written."""
    faiss = faiss_library()
    write = faiss.write_index_binary if isinstance(index, faiss.IndexBinary) else faiss.write_index
    with replacing(file) as draft, draft.open("wb") as opened:
        # Not by the name of the file: faiss would not see a disk that is full at the last bytes.
        write(index, faiss.PyCallbackIOWriter(opened.write, AT_ONCE))


class IndexFile:
    """
    A file of faiss, opened.

    Args:
        file (`Path`): The file.
        layout ([`Layout`]): What is in it.
        in_memory (`bool`, *optional*, defaults to `False`): Whether to read it, so that it can grow. Else its vectors
            and links stay in the file, memory-mapped.

    Raises:
        ValueError: if it is not a file of faiss.
    """

    def __init__(self, file: Path, layout: Layout, in_memory: bool = False):
        faiss = faiss_library()
        self.file, self.layout = file, layout
        read = faiss.read_index_binary if layout.binary else faiss.read_index
        try:
            self.index = read(str(file), 0 if in_memory else faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise ValueError(f"{file} is not an index of faiss: {str(error).splitlines()[0]}") from error
        self.inner = down(self.index.index)
        self.base, self.refine = self.inner, None
        if isinstance(self.inner, faiss.IndexRefine):
            self.base, self.refine = bare(self.inner.base_index), bare(self.inner.refine_index)
        self.clustered = isinstance(self.base, faiss.IndexIVF | faiss.IndexBinaryIVF)
        self.graph = isinstance(self.base, faiss.IndexHNSW | faiss.IndexBinaryHNSW)
        self.storage = down(self.base.storage) if self.graph else self.base
        self.keys = faiss.vector_to_array(self.index.id_map)

    @cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(self.keys, kind="stable")

    @cached_property
    def clusters(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each row: its cluster, and its place there."""
        faiss = faiss_library()
        clusters, places = np.empty((2, len(self.keys)), dtype=np.int32)
        for cluster in range(self.base.nlist):
            if count := self.base.invlists.list_size(cluster):
                rows = faiss.rev_swig_ptr(self.base.invlists.get_ids(cluster), count)
                clusters[rows], places[rows] = cluster, np.arange(count)
        return clusters, places

    @property
    def centres(self) -> np.ndarray:
        """Centres of the clusters, as [`find_centres`] gave them."""
        return down(self.base.quantizer).reconstruct_n(0, self.base.nlist)

    def rows(self, keys: np.ndarray) -> np.ndarray:
        """Rows of keys that are there."""
        return self._order[np.searchsorted(self.keys, keys, sorter=self._order)]

    def first(self, rows: np.ndarray) -> np.ndarray:
        """Stored bytes of the vectors that are searched."""
        if not self.clustered:
            return codes_of(self.storage)[rows]
        faiss, (clusters, places) = faiss_library(), self.clusters
        size = self.base.code_size
        found = np.empty((len(rows), size), dtype=np.uint8)
        for cluster in np.unique(clusters[rows]).tolist():
            wanted = clusters[rows] == cluster
            count = self.base.invlists.list_size(cluster)
            codes = faiss.rev_swig_ptr(self.base.invlists.get_codes(cluster), count * size).reshape(count, size)
            found[wanted] = codes[places[rows[wanted]]]
        return found

    def second(self, rows: np.ndarray) -> np.ndarray:
        """Stored bytes of the vectors that score the shortlist."""
        return codes_of(self.refine)[rows]

    def search(
        self, queries: np.ndarray, k: int, shortlist: int, kept: np.ndarray | None, exact: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Find the nearest rows.

        Args:
            queries (`np.ndarray` of shape `(queries, numbers)`): Queries as the index compares them.
            k (`int`): Number of rows to find per query.
            shortlist (`int`): Number of rows to score again, if vectors for that are in this index.
            kept (`np.ndarray` of shape `(rows,)`, bool, *optional*): Rows that may be found. Default: all.
            exact (`bool`): Whether to compare all rows that are kept, where a graph or clusters would miss some.
        """
        faiss, index, params = faiss_library(), self.inner, None
        if kept is not None:
            selector = faiss.IDSelectorBitmap(np.packbits(kept, bitorder="little"))
            if exact and self.clustered and self.layout.binary:  # it takes no selector
                rows = np.flatnonzero(kept)
                index = empty_flat(self.layout.first)
                index.add(self.first(rows))
                values, found = index.search(queries, k)
                return values, np.where(found < 0, -1, rows[found])
            if self.clustered:
                params = faiss.SearchParametersIVF(sel=selector, nprobe=self.base.nlist)
            elif self.graph and not exact:
                params = faiss.SearchParametersHNSW(sel=selector, efSearch=self.base.hnsw.efSearch)
            else:
                params = faiss.SearchParameters(sel=selector)
                index = composed(self.layout, self.storage, self.refine)
        if self.refine is not None:
            params = faiss.IndexRefineSearchParameters(k_factor=k_factor(shortlist, k), base_index_params=params)
        return index.search(queries, k, params=params)
