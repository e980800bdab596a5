"""faiss: an index in one file, with ids, texts and metadata in SQLite."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...encode.coding import Coder, PackedIndex, faiss_index
from ...encode.precisions import FLOAT, PRECISIONS
from ...utils.durable import replacing, writing
from ..engine import Batch, Committed, Engine, Hit, Layout, Where, rescored
from .store import Store


Faiss = Any  # an index of faiss, whose classes have no common base
LINKS = 32  # M of a graph
BREADTH = 200  # efConstruction of a graph
CLUSTERS = 4096  # most clusters
PER_CLUSTER = 16  # least documents of a cluster
PER_CENTRE = 256  # documents that a cluster is fitted to
PROBES = 64  # clusters that a search reads; a sixteenth of all, if that is more
CANDIDATES = 256  # candidates of a graph that a search follows
SHORTLIST = 10  # k that the shortlist in the file is for, when another program opens it
BATCH = 2048  # documents that faiss gets at once


class FaissEngine(Engine):
    """
    An index in the file `index.faiss`: an `IndexIDMap2` of the keys over vectors that are compared one by one
    (`flat`), in clusters (`ivf`) or in a graph (`hnsw`). Numbers whose shortlist is scored by float32 are an
    `IndexRefine`. Any other shortlist is scored by the vectors of the [`~index.engines.store.Store`], which also has
    the documents.

    A search maps the file into memory; a change reads it, and writes it anew. Deleting fills the index again from the
    vectors of the store: faiss cannot remove from a graph or an `IndexRefine`. Clusters stay as first built.
    With a filter, and while a change takes place, the documents that pass are compared one by one, for every kind.
    """

    name = "faiss"
    module = "faiss"
    codes = tuple(PRECISIONS)
    second_codes = (FLOAT, "int8")
    kinds = ("flat", "ivf", "hnsw")
    files = ("index.faiss*", "documents.sqlite*", "vectors")

    def __init__(self, folder: Path, layout: Layout):
        super().__init__(folder, layout)
        self._faiss, self._file = self.library(), folder / "index.faiss"
        # The code that an `IndexRefine` scores a shortlist by.
        self._refine = layout.second
        if layout.first.symmetric or self._refine is None or self._refine.code != FLOAT:
            self._refine = None
        self._index: Faiss = None
        self._mapped: tuple[int, int, int] | None = None
        self._map()
        self.store = Store(folder, layout)

    def close(self) -> None:
        self._index = None
        self.store.close()

    def count(self, committed: Committed | None = None) -> int:
        return len(self.store.keys_where({}, committed))

    def truncate(self, first: int) -> None:
        if first == 0:
            self._file.unlink(missing_ok=True)
            self._map()
        elif (index := self._read()) is not None:
            self._remove(index, self._keys(index)[self._keys(index) >= first])
        self.store.truncate(first)

    def add(self, batches: Iterable[Batch]) -> None:
        first = None
        for batch in batches:
            first = int(batch.keys[0]) if first is None else first
            self.store.add(batch)
        if first is not None:
            keys = self.store.keys(first)
            index = self._read() or self._empty(keys)
            self._fill(index, keys)
            self._save(index)

    def delete(self, keys: Sequence[int]) -> None:
        self._remove(self._read(), np.array(keys, dtype=np.int64))
        self.store.delete(keys)

    def keys_of(self, ids: Sequence[str]) -> dict[str, int]:
        return self.store.keys_of(ids)

    def search(
        self, queries: torch.Tensor, k: int, where: Where | None = None, committed: Committed | None = None
    ) -> list[list[Hit]]:
        layout, count = self.layout, max(k, self.layout.shortlist or 0)
        self._map()
        filtered = where or (committed is not None and not self._has_only(committed))
        allowed = self.store.keys_where(where or {}, committed) if filtered else None
        if self._index is None or not self._index.ntotal or (allowed is not None and not len(allowed)):
            return [[] for _ in queries]
        if allowed is not None:
            packed = PackedIndex.of(layout.first, self.store.vectors("first")[allowed])
            scores, rows = packed.search(queries, count)
            keys = allowed[rows]
        elif self._refine is not None:
            params = self._faiss.IndexRefineSearchParameters(k_factor=k_factor(count, k))
            scores, keys = self._index.search(self._refine.float_queries(queries).numpy(), k, params=params)
        else:
            scores, keys = PackedIndex(self._index, layout.first).search(queries, count)
        again = layout.rescorer if self._refine is None or allowed is not None else None
        return [self._hits(*row, k, again) for row in zip(queries, scores, keys, strict=True)]

    def _hits(self, query: torch.Tensor, scores: np.ndarray, keys: np.ndarray, k: int, again: str | None) -> list[Hit]:
        """The best `k` of the keys that one query found (-1: none), scored by other vectors if `again` names some."""
        scores, keys = scores[keys >= 0], keys[keys >= 0]
        if again is not None:
            scores = rescored(self.layout.coders[again], query, self.store.vectors(again)[keys])
            order = np.argsort(-scores, kind="stable")
            scores, keys = scores[order], keys[order]
        documents = self.store.documents(keys[:k])
        return [
            Hit(documents[key][0], score, *documents[key][1:])
            for score, key in zip(scores[:k].tolist(), keys[:k].tolist(), strict=True)
        ]

    def _remove(self, index: Faiss, keys: np.ndarray) -> None:
        rest = np.setdiff1d(self._keys(index), keys)
        if len(rest) < index.ntotal:
            index.reset()  # which keeps clusters
            self._fill(index, rest)
            self._save(index)

    def _read(self, flags: int = 0) -> Faiss:
        """The index, in memory unless the flags say otherwise; `None` before the first document."""
        if not self._file.is_file():
            return None
        read = self._faiss.read_index_binary if self.layout.first.symmetric else self._faiss.read_index
        try:
            return read(str(self._file), flags)
        except RuntimeError as error:
            raise ValueError(f"{self._file} is not an index of faiss: {str(error).splitlines()[0]}") from error

    def _map(self) -> None:
        """Map the file into memory, again if another process has replaced it."""
        stat = self._file.stat() if self._file.is_file() else None
        mapped = None if stat is None else (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if mapped != self._mapped:
            self._index, self._mapped = None, mapped
            self._index = self._read(self._faiss.IO_FLAG_MMAP_IFC)

    def _has_only(self, committed: Committed) -> bool:
        """Whether the index is that from before a change."""
        known = self._index is not None and not committed.removed
        return known and bool((self._keys(self._index) < committed.end).all())

    def _keys(self, index: Faiss) -> np.ndarray:
        return self._faiss.vector_to_array(index.id_map)

    def _empty(self, keys: np.ndarray) -> Faiss:
        """An index without documents, made for the documents of some keys."""
        layout, faiss = self.layout, self._faiss
        if layout.kind == "ivf":
            index = self._clusters(keys)
        else:
            index = faiss_index(layout.first, f"HNSW{LINKS}" if layout.kind == "hnsw" else "")
        if layout.kind == "hnsw":
            index.hnsw.efConstruction = BREADTH
            index.hnsw.efSearch = max(CANDIDATES, 2 * (layout.shortlist or 0))
        if self._refine is not None:
            index = faiss.IndexRefine(self._wider(index, self._refine.dim), faiss_index(self._refine))
            index.k_factor = k_factor(layout.shortlist or 0, SHORTLIST)
        return (faiss.IndexBinaryIDMap2 if layout.first.symmetric else faiss.IndexIDMap2)(index)

    def _clusters(self, keys: np.ndarray) -> Faiss:
        """Empty clusters, found with documents from everywhere among the keys."""
        coder = self.layout.first
        count = max(1, min(int(4 * len(keys) ** 0.5), len(keys) // PER_CLUSTER, CLUSTERS))
        sample = keys[np.linspace(0, len(keys) - 1, min(PER_CENTRE * count, len(keys))).astype(np.int64)]
        index = faiss_index(coder, f"IVF{count}")
        index.nprobe, index.cp.min_points_per_centroid = min(count, max(PROBES, count // 16)), 1
        if not coder.symmetric:
            index.by_residual = False  # what is stored stays the vector, in the ranges of the coder
        index.train(self._numbers("first", coder, sample))
        if coder.ranges is not None:
            index.sq.train(coder.ranges)
        return index

    def _wider(self, index: Faiss, width: int) -> Faiss:
        """An index that takes vectors of more dims: it compares their leading dims, normalised."""
        if index.d == width:
            return index
        wider = self._faiss.IndexPreTransform(index)
        wider.prepend_transform(self._faiss.NormalizationTransform(index.d))
        wider.prepend_transform(self._faiss.RemapDimensionsTransform(width, index.d, False))
        return wider

    def _fill(self, index: Faiss, keys: np.ndarray) -> None:
        name, coder = ("first", self.layout.first) if self._refine is None else ("second", self._refine)
        for start in range(0, len(keys), BATCH):
            some = keys[start : start + BATCH]
            index.add_with_ids(self._numbers(name, coder, some), some)

    def _numbers(self, name: str, coder: Coder, keys: np.ndarray) -> np.ndarray:
        """Stored vectors as faiss takes them: bits as they are, others decoded to the middle of their step, so that
        faiss codes them to the same bytes again."""
        packed = self.store.vectors(name)[keys]
        return packed if coder.symmetric else coder.decode(packed).numpy()

    def _save(self, index: Faiss) -> None:
        """Replace the file, all or nothing."""
        faiss, self._index, self._mapped = self._faiss, None, None
        write = faiss.write_index_binary if self.layout.first.symmetric else faiss.write_index
        place = f"The index {self.folder}"
        with writing(place), replacing(self._file) as draft, draft.open("wb") as opened:
            # Not by the name of the file: faiss would not see a disk that is full at the last bytes.
            write(index, faiss.PyCallbackIOWriter(opened.write))
        self._map()


def k_factor(shortlist: int, k: int) -> float:
    """The factor that faiss multiplies k with, in float32, and rounds down, for the length of the shortlist."""
    return (max(k, shortlist) + 0.5) / k
