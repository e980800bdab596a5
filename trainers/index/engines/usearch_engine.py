"""usearch: vectors in files that are mapped into memory, compared one by one or by a graph."""

from __future__ import annotations

from errno import EIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.codes import CODES, bytes_per_vector, stored_bits
from ...evaluation.coding import Coder
from ..engine import Batch, Engine, Where, filled
from ..layout import Layout, as_numbers, is_binary
from .durable import replacing, writing
from .lines import bits_lines, import_lines, score_lines, unit_line, without_repeats
from .rows import AT_ONCE, Rows


# usearch rounds the query to these codes, too, and its scores are then a little off. So it finds a few more documents,
# which are scored again with the float query.
ROUNDED = ("float16", "int8")
MORE = 64
QUERIES_AT_ONCE = 64
PAIRS_AT_ONCE = 2**20  # of a query and a document, in an exact search: each takes 16 bytes
EXPANSION = 256  # candidates that a search of a graph keeps; with the default of usearch, 64, it misses more


class USearchEngine(Engine):
    """
    An index in files. `flat` has no graph: the vectors are `first.npy`, and usearch compares all of them with a query.
    Memory stays the same for any number of documents, while building and while searching. `hnsw` is a graph,
    `first.usearch`, which holds its vectors. It is built in memory, on one core, with about 300 bytes per
    document and its vectors, also when documents are added or deleted; a search maps the file.

    The vectors that score a shortlist again are `second.npy`. Deleting writes all files anew.

    usearch rounds the query of `float16` and `int8` as it does the documents. The best documents by these scores are
    scored again with the float query, so that the result of `flat` is exact unless a document is wrong by more than 64
    ranks. That does not go for the documents of a shortlist.
    """

    name = "usearch"
    module = "usearch.index"
    codes = tuple(code for code in CODES if code != "int4")
    second_codes = ("float32", "float16", "int8")
    kinds = ("flat", "hnsw")
    filters = False
    holds_documents = False
    one_range = True

    def __init__(self, folder: Path, layout: Layout):
        super().__init__(folder, layout)
        first = {"first": _column(layout.first)}
        second = {} if layout.second is None else {"second": _column(layout.second)}
        self._graph_file = folder / "first.usearch" if layout.kind == "hnsw" else None
        self._rows = Rows(folder, second if self._graph_file else first | second)
        self._pending = Rows(folder / "pending", first) if self._graph_file else None
        self._graph: Any = None
        self._open_graph()

    def write(self, batch: Batch) -> None:
        vectors = {"first": _numbers(self.layout.first, batch.first)}
        if self.layout.second is not None:
            assert batch.second is not None
            vectors["second"] = _numbers(self.layout.second, batch.second)
        with writing(self.folder):
            if self._pending is not None:
                self._pending.write(batch.keys, {"first": vectors.pop("first")})
            if vectors:
                self._rows.write(batch.keys, vectors)

    def finish(self) -> None:
        if self._pending is None or not len(self._pending.keys):
            return
        keys, vectors = self._pending.keys, self._pending.vectors("first")
        graph = self._loaded_graph()
        for start in range(0, len(keys), AT_ONCE):
            some = np.array(keys[start : start + AT_ONCE])
            graph.remove(some[graph.contains(some)])  # which were written again
            # Threads would lose documents that they add at the same time: github.com/unum-cloud/USearch/issues/735.
            graph.add(some, vectors[start : start + AT_ONCE], threads=1)
        self._save_graph(graph)
        with writing(self.folder):
            self._pending.clear()

    def delete(self, keys: np.ndarray) -> None:
        if self._graph_file is not None and self._graph_file.is_file():
            graph = self._loaded_graph()
            known = keys[graph.contains(keys)]
            if len(known):
                graph.remove(known)
                self._save_graph(graph)
        with writing(self.folder):
            for rows in (self._pending, self._rows):
                if rows is not None:
                    rows.delete(keys)

    def search(
        self, queries: torch.Tensor, k: int, where: Where | None = None, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        nearest = self._nearest if self._graph_file is None else self._nearest_in_graph
        distances, keys = nearest(self._coded(queries), self._count(k))
        if self._scores_again:
            return filled(*self.scored_again(queries, keys, k), k)
        coder = self.layout.first
        scores = 1 - (2 * distances / stored_bits(coder.code, coder.dim) if self.layout.binary else distances)
        return filled(np.where(keys < 0, -np.inf, scores), keys, k)

    def packed(self, keys: np.ndarray) -> np.ndarray:
        coder = self.layout.second or self.layout.first
        if self.layout.second is None and self._graph_file is not None:
            numbers = np.stack(self._graph.get(keys))
        else:
            name = "first" if self.layout.second is None else "second"
            numbers = self._rows.vectors(name)[self._rows.places(keys)[0]]
        if coder.code == "int8":
            return (numbers.astype(np.int16) + 128).astype(np.uint8)
        return np.ascontiguousarray(numbers).view(np.uint8)

    def disk_bytes(self) -> int:
        files = (*self.folder.glob("*.npy"), *self.folder.glob("pending/*.npy"), *self.folder.glob("*.usearch"))
        return sum(file.stat().st_size for file in files)

    def example(self) -> str:
        folder, coder, count = self.folder.resolve(), self.layout.first, self._count(10)
        query = {
            "float16": "unit.astype(np.float16)",
            "int8": "np.round(127 * unit / abs(unit).max()).astype(np.int8)",
        }
        asked = "bits" if self.layout.binary else query.get(coder.code, "unit")
        lines = bits_lines(coder) if self.layout.binary else [unit_line(coder)]
        if self._graph_file is None:
            imported, first = "from usearch.index import MetricKind, search", "vectors[near.keys]"
            metric = "MetricKind.Hamming" if self.layout.binary else "MetricKind.IP"
            lines += [
                f"vectors = np.load({str(folder / 'first.npy')!r}, mmap_mode='r')",
                f"near = search(vectors, {asked}, {min(count, len(self._rows.keys))}, {metric}, exact=True)",
                f"keys = np.load({str(folder / 'keys.npy')!r}, mmap_mode='r')[near.keys]",
            ]
            places = "near.keys"
        else:
            imported, first = "from usearch.index import Index", "np.stack(index.get(keys))"
            file = str(folder / self._graph_file.name)
            lines += [
                f"index = Index.restore({file!r}, view=True, expansion_search={EXPANSION})",
                f"near = index.search({asked}, {count})",
                "keys = near.keys.astype(int)",
            ]
            places = f"np.load({str(folder / 'keys.npy')!r}).searchsorted(keys)"
        if self._scores_again:
            second = f"np.load({str(folder / 'second.npy')!r}, mmap_mode='r')[{places}]"
            lines.append(f"stored = {first if self.layout.second is None else second}")
            lines += score_lines(self.layout.second or coder)
            lines += ["best = np.argsort(-scores)[:10]", "keys, scores = keys[best], scores[best]"]
        elif self.layout.binary:
            lines.append(f"scores = 1 - 2 * near.distances / {stored_bits(coder.code, coder.dim)}")
        else:
            lines.append("scores = 1 - near.distances")
        lines += [
            f"documents = sqlite3.connect({str(folder / 'documents.sqlite')!r})",
            "one = 'SELECT id FROM documents WHERE key = ?'",
            "ids = [documents.execute(one, [key]).fetchone()[0] for key in keys.tolist()]",
            "found = list(zip(ids, scores.tolist()))",
        ]
        return "\n".join(
            import_lines(["import sqlite3"], ["import numpy as np", imported], coder) + without_repeats(lines)
        )

    def close(self) -> None:
        self._graph = None

    @property
    def _scores_again(self) -> bool:
        return self.layout.shortlist is not None or self.layout.first.code in ROUNDED

    def _count(self, k: int) -> int:
        """Documents that the first stage must find."""
        if self.layout.shortlist is not None:
            return max(k, self.layout.shortlist)
        return k + MORE if self._scores_again else k

    def _coded(self, queries: torch.Tensor) -> np.ndarray:
        """Queries as usearch compares them with the first vectors."""
        coder = self.layout.first
        if self.layout.binary:
            return coder.pack(queries)
        floats = coder.float_queries(queries).numpy()
        if coder.code != "int8":
            return floats.astype(coder.code)
        # A range of its own, for it is only multiplied: scores keep their order.
        widest = np.abs(floats).max(axis=1, keepdims=True)
        return np.round(127 * floats / np.where(widest > 0, widest, 1)).astype(np.int8)

    def _nearest(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Distances and keys of the nearest documents, after a comparison with all."""
        library = self.library()
        metric = library.MetricKind.Hamming if self.layout.binary else library.MetricKind.IP
        stored, vectors = self._rows.keys, self._rows.vectors("first")
        count = min(count, len(stored))
        distances, keys = np.empty((len(queries), count), np.float32), np.empty((len(queries), count), np.int64)
        for place in range(0, len(queries), QUERIES_AT_ONCE):
            some = slice(place, place + QUERIES_AT_ONCE)
            best, rows = np.empty((len(queries[some]), 0)), np.empty((len(queries[some]), 0), np.int64)
            size = PAIRS_AT_ONCE // len(best)
            for start in range(0, len(stored), size):
                block = vectors[start : start + size]
                near = library.search(block, queries[some], min(count, len(block)), metric, exact=True)
                best = np.hstack([best, np.atleast_2d(near.distances)])
                rows = np.hstack([rows, start + np.atleast_2d(near.keys).astype(np.int64)])
                order = best.argsort(axis=1, kind="stable")[:, :count]
                best, rows = np.take_along_axis(best, order, axis=1), np.take_along_axis(rows, order, axis=1)
            distances[some], keys[some] = best, stored[rows]
        return distances, keys

    def _nearest_in_graph(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Distances and keys of the nearest documents that the graph leads to; where they are fewer, the key is -1."""
        distances, keys = np.zeros((len(queries), count), np.float32), np.full((len(queries), count), -1)
        if self._graph is not None:
            near = self._graph.search(queries, count)
            counts = near.counts if len(queries) > 1 else [len(near)]
            for row, found in enumerate(counts):
                distances[row, :found] = np.atleast_2d(near.distances)[row, :found]
                keys[row, :found] = np.atleast_2d(near.keys)[row, :found]
        return distances, keys

    def _open_graph(self) -> None:
        self._graph = None
        if self._graph_file is not None and self._graph_file.is_file():
            self._graph = self.library().Index.restore(self._graph_file, view=True, expansion_search=EXPANSION)

    def _loaded_graph(self) -> Any:
        """The graph in memory, where it can be changed. Changing one that is only mapped would end the process."""
        index, coder = self.library().Index, self.layout.first
        if self._graph is not None:
            return index.restore(self._graph_file)
        kind, width = _column(coder)
        if self.layout.binary:
            return index(ndim=8 * width, metric="hamming", dtype="b1")
        return index(ndim=width, metric="cos", dtype=kind)

    def _save_graph(self, graph: Any) -> None:
        assert self._graph_file is not None
        with writing(self.folder), replacing(self._graph_file) as draft:
            try:
                graph.save(draft)
            except RuntimeError as error:  # as on a full disk
                raise OSError(EIO, str(error)) from error
        self._open_graph()


def _column(coder: Coder) -> tuple[str, int]:
    """Type of the stored numbers, and numbers per vector."""
    if is_binary(coder.code):
        return "uint8", bytes_per_vector(coder.code, coder.dim)
    return coder.code, coder.dim


def _numbers(coder: Coder, packed: np.ndarray) -> np.ndarray:
    return packed if is_binary(coder.code) else as_numbers(coder, packed)
