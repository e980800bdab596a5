"""The files of an index of faiss, written from what is in them and from what is new."""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from ...core.codes import bytes_per_vector
from ...evaluation.coding import Coder
from ..layout import Layout
from . import faiss_parts as parts
from .faiss_files import IndexFile, save
from .faiss_pending import DROPPED, Pending, mapped


BLOCK = 2048  # rows that are copied or coded at once
NONE = np.empty(0, dtype=np.int64)


class Rebuild:
    """
    One writing of an index. Vectors go from file to file; memory holds the keys, their order, and for clusters a
    sample to train on. A graph, with its vectors, is in memory.

    Args:
        folder (`Path`): Folder for files that are needed until it is closed.
        layout ([`Layout`]): What is in the index.
        old ([`IndexFile`], *optional*): The index so far.
        second ([`IndexFile`], *optional*): The second vectors so far, if they have a file of their own.
        pending ([`Pending`], *optional*): Documents to add. `None`: none.
        dropped (`np.ndarray`, *optional*): Keys to leave out.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        old: IndexFile | None,
        second: IndexFile | None,
        pending: Pending | None,
        dropped: np.ndarray = NONE,
    ):
        self.folder, self.layout, self.old, self.second, self.pending = folder, layout, old, second, pending
        self.known = 0 if old is None else len(old.keys)
        every = np.concatenate([NONE if old is None else old.keys, NONE if pending is None else pending.keys])
        # A key that is there twice counts where it was written last. A graph cannot replace what it has.
        found, last = np.unique(every[::-1], return_index=True)
        rows = len(every) - 1 - last
        stays = (found != DROPPED) & ~np.isin(found, dropped)
        if layout.kind == "hnsw" and old is not None:
            new = rows[stays & ~np.isin(found, old.keys)]
            self.rows = np.concatenate([np.arange(self.known), new])
        else:
            self.rows = rows[stays]
        self.keys = every[self.rows]  # in the order of the new index
        self._mapped: list[np.ndarray] = []  # what faiss looks at until it is written
        rmtree(folder, ignore_errors=True)
        folder.mkdir()

    def __enter__(self) -> Rebuild:
        return self

    def __exit__(self, *_: object) -> None:
        self._mapped.clear()
        rmtree(self.folder)

    def index(self, file: Path, *, beside: bool, by_key: bool) -> None:
        """
        Write the index.

        Args:
            file (`Path`): The file.
            beside (`bool`): Whether second vectors are in a file of their own.
            by_key (`bool`): Whether one can ask the index for the vector of a key.
        """
        layout, refine = self.layout, None
        base = {"flat": self._flat, "ivf": self._clusters, "hnsw": self._graph}[layout.kind]()
        if layout.second is not None and not beside:
            refine = parts.empty_flat(layout.second)
            parts.fill_flat(refine, self._vectors("second"))
        if by_key and layout.kind == "ivf":
            base.make_direct_map()
        save(parts.with_keys(parts.composed(layout, base, refine), self.keys, by_key=by_key), file)

    def second_vectors(self, coder: Coder, file: Path) -> None:
        """Write the second vectors to a file of their own."""
        index = parts.empty_flat(coder)
        parts.fill_flat(index, self._vectors("second"))
        save(parts.with_keys(index, self.keys, by_key=True), file)

    def _flat(self) -> Any:
        index = parts.empty_flat(self.layout.first)
        parts.fill_flat(index, self._vectors("first"))
        return index

    def _clusters(self) -> Any:
        coder, count = self.layout.first, len(self.rows)
        if self.old is None:
            sample = self._sample(parts.sample_size(coder))
            centres = parts.find_centres(coder, sample, parts.cluster_count(count))
        else:
            centres = self.old.centres
        index = parts.empty_clusters(coder, centres)
        clusters = np.empty(count, dtype=np.int32)
        is_old = self.rows < self.known
        if self.old is not None:
            clusters[is_old] = self.old.clusters[0][self.rows[is_old]]
        new = np.flatnonzero(~is_old)
        quantizer = parts.down(index.quantizer)
        for start in range(0, len(new), BLOCK):
            some = new[start : start + BLOCK]
            packed = self._read("first", self.rows[some])
            clusters[some] = quantizer.search(parts.comparable(coder, packed), 1)[1][:, 0]
        order = np.argsort(clusters, kind="stable")
        ends = np.cumsum(np.bincount(clusters, minlength=len(centres)))
        parts.fill_clusters(index, self._vectors("first", order), order, ends)
        self._tune(index)
        return index

    def _graph(self) -> Any:
        coder = self.layout.first
        if self.old is None:
            index = parts.empty_graph(coder)
        else:
            self._grown = IndexFile(self.old.file, self.layout, in_memory=True)  # it owns what follows
            index = self._grown.base
        storage = parts.down(index.storage)
        for start in range(self.known, len(self.rows), BLOCK):
            packed = self._read("first", self.rows[start : start + BLOCK])
            index.add(parts.comparable(coder, packed))
            parts.codes_of(storage)[start:] = packed  # coding decoded numbers again may round them
        self._tune(index)
        return index

    def _sample(self, count: int) -> np.ndarray:
        """Stored bytes of some documents, from everywhere in the index."""
        count = min(count, len(self.rows))
        return self._read("first", self.rows[np.linspace(0, len(self.rows) - 1, count).astype(np.int64)])

    def _tune(self, index: Any) -> None:
        if len(self.rows):
            documents = parts.comparable(self.layout.first, self._sample(parts.TRIALS))
            k = min(max(10, self.layout.shortlist or 0), len(self.rows))
            parts.tune(index, between(documents), k)

    def _vectors(self, name: str, order: np.ndarray | None = None) -> np.ndarray:
        """Stored bytes of all documents of the new index, in a file."""
        rows = self.rows if order is None else self.rows[order]
        if self.old is None and self.pending is not None and np.array_equal(rows, np.arange(len(self.pending))):
            vectors = self.pending.vectors(name)
        else:
            file = self.folder / name
            with file.open("wb") as opened:
                for start in range(0, len(rows), BLOCK):
                    opened.write(self._read(name, rows[start : start + BLOCK]).data)
            vectors = mapped(file, len(rows), self._size(name))
        self._mapped.append(vectors)
        return vectors

    def _read(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Stored bytes of some documents: those of the index, and after them those that are pending."""
        found = np.empty((len(rows), self._size(name)), dtype=np.uint8)
        is_old = rows < self.known
        if is_old.any():
            found[is_old] = self._read_old(name, rows[is_old])
        if not is_old.all():
            assert self.pending is not None
            found[~is_old] = self.pending.vectors(name)[rows[~is_old] - self.known]
        return found

    def _read_old(self, name: str, rows: np.ndarray) -> np.ndarray:
        assert self.old is not None  # there are old rows
        if name == "first":
            return self.old.first(rows)
        if self.second is None:
            return self.old.second(rows)
        return self.second.first(self.second.rows(self.old.keys[rows]))

    def _size(self, name: str) -> int:
        coder = self.layout.first if name == "first" else self.layout.second
        assert coder is not None
        return bytes_per_vector(coder.code, coder.dim)


def between(documents: np.ndarray) -> np.ndarray:
    """Trial queries: documents of which a quarter is another document. A document itself would be found too easily."""
    random, others = np.random.default_rng(0), np.roll(documents, 1, axis=0)
    if documents.dtype == np.uint8:  # bits
        own = np.bitwise_or(*random.integers(0, 256, (2, *documents.shape), dtype=np.uint8))
        return (documents & own) | (others & ~own)
    return np.where(random.random(documents.shape) < 0.75, documents, others).astype(np.float32)
