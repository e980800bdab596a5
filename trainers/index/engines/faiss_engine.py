"""faiss: an index in one file, which faiss opens without this package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ...core.codes import CODES, bytes_per_vector, stored_bits
from ..engine import Batch, Engine, Where, filled
from ..layout import Layout
from .durable import replacing, writing
from .faiss_build import NONE, Rebuild
from .faiss_example import example
from .faiss_files import IndexFile
from .faiss_pending import Pending


class FaissEngine(Engine):
    """
    An index in the file `index.faiss`. Bits whose shortlist is scored by other vectors have these in a second file,
    `second.faiss`, because faiss re-scores only floats.

    Documents wait in files of their own until [`~FaissEngine.finish`] writes the index anew with them, from file to
    file. Memory then holds the keys and their order, some 50 bytes per document, but no vectors; for `ivf`, also a
    sample to find clusters with. Only a graph (`hnsw`) is built in memory, with its vectors. A search maps the files.

    How much of the clusters (`nprobe`) or the graph (`efSearch`) is searched is twice what trial queries need to find
    99% of what they should, and is stored in the file. With a filter, all documents that pass are compared one by one,
    for every kind. A graph cannot forget documents: deleted ones stay in the file, and `deleted.npy` keeps them from
    being found.
    """

    name = "faiss"
    module = "faiss"
    codes = tuple(CODES)
    second_codes = ("float32", "float16", "int8")
    kinds = ("flat", "ivf", "hnsw")
    filters = True
    holds_documents = False

    def __init__(self, folder: Path, layout: Layout):
        super().__init__(folder, layout)
        coders = {"first": layout.first} | ({} if layout.second is None else {"second": layout.second})
        sizes = {name: bytes_per_vector(coder.code, coder.dim) for name, coder in coders.items()}
        self._pending = Pending(folder / "pending", sizes)
        # Vectors that faiss cannot score a shortlist with itself.
        self._beside = Layout(layout.second) if layout.binary and layout.second is not None else None
        self._open()

    @property
    def _file(self) -> Path:
        return self.folder / "index.faiss"

    @property
    def _second_file(self) -> Path:
        return self.folder / "second.faiss"

    @property
    def _deleted_file(self) -> Path:
        return self.folder / "deleted.npy"

    def _open(self) -> None:
        self._index = IndexFile(self._file, self.layout) if self._file.is_file() else None
        self._second = None
        if self._beside is not None and self._index is not None:
            self._second = IndexFile(self._second_file, self._beside)
        self._deleted = np.load(self._deleted_file) if self._deleted_file.is_file() else NONE

    def close(self) -> None:
        self._index = self._second = None

    def write(self, batch: Batch) -> None:
        self._pending.append(batch)

    def finish(self) -> None:
        if not len(self._pending):
            return
        with writing(self.folder):
            with self._rebuild(self._pending) as rebuild:
                if len(rebuild.keys):
                    self._save_second(rebuild)  # first, so that no key of the index is ever without its second vector
                    self._save_index(rebuild)
            self._pending.clear()
        self._open()

    def delete(self, keys: np.ndarray) -> None:
        self._pending.drop(keys)
        if self._index is None or not np.isin(keys, self._index.keys).any():
            return
        with writing(self.folder):
            if self._index.graph:
                with replacing(self._deleted_file) as draft, draft.open("wb") as opened:
                    np.save(opened, np.union1d(self._deleted, keys[np.isin(keys, self._index.keys)]))
            else:
                with self._rebuild(None, dropped=keys) as rebuild:
                    self._save_index(rebuild)
                    self._save_second(rebuild)
        self._open()

    def search(
        self, queries: torch.Tensor, k: int, where: Where | None = None, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        index, layout = self._index, self.layout
        kept = None
        if index is not None and (allowed is not None or len(self._deleted)):
            kept = ~np.isin(index.keys, self._deleted)
            if allowed is not None:
                kept &= np.isin(index.keys, allowed)
        count = 0 if index is None else len(index.keys) if kept is None else int(kept.sum())
        if index is None or not count:
            return filled(np.empty((len(queries), 0)), np.empty((len(queries), 0)), k)
        length = min(max(k, layout.shortlist or 0), count)
        if layout.binary:
            coded = layout.first.pack(queries)
        else:
            widest = max((layout.first, layout.second or layout.first), key=lambda coder: coder.dim)
            coded = widest.float_queries(queries).numpy()
        wanted = length if index.refine is None else min(k, count)
        scores, rows = index.search(coded, wanted, length, kept, exact=allowed is not None)
        keys = np.where(rows < 0, -1, index.keys[rows])
        if layout.binary:
            scores = 1 - 2 * scores / stored_bits(layout.first.code, layout.first.dim)
            if layout.shortlist is not None:
                return filled(*self.scored_again(queries, keys, k), k)
        return filled(np.where(keys < 0, -np.inf, scores), keys, k)

    def packed(self, keys: np.ndarray) -> np.ndarray:
        file = self._second or self._index
        assert file is not None  # there are keys
        rows = file.rows(keys)
        return file.first(rows) if file.refine is None else file.second(rows)

    def disk_bytes(self) -> int:
        own = [self._file, self._second_file, self._deleted_file, *self._pending.folder.glob("*")]
        return sum(file.stat().st_size for file in own if file.is_file())

    def _rebuild(self, pending: Pending | None, dropped: np.ndarray = NONE) -> Rebuild:
        return Rebuild(self.folder / "scratch", self.layout, self._index, self._second, pending, dropped)

    def _save_index(self, rebuild: Rebuild) -> None:
        by_key = self.layout.binary and self.layout.second is None and self.layout.shortlist is not None
        rebuild.index(self._file, beside=self._beside is not None, by_key=by_key)

    def _save_second(self, rebuild: Rebuild) -> None:
        if self._beside is not None:
            rebuild.second_vectors(self._beside.first, self._second_file)

    def example(self) -> str:
        if self._index is None or not len(self._deleted):
            return example(self.folder, self.layout)
        return example(self.folder, self.layout, self._deleted_file, self._index.base.hnsw.efSearch)
