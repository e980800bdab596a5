"""An index in Qdrant: a collection on a server, or in a folder."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.codes import FLOAT
from ..engine import Batch, Engine, Where, filled
from ..layout import Layout
from .qdrant_collection import (
    bytes_on_server,
    collection_vectors,
    column_path,
    matching,
    packed_numbers,
    stage_settings,
)
from .qdrant_example import FOUND, example


POINTS_AT_ONCE = 128  # in one request; a server takes 32 MB
QUERIES_AT_ONCE = 64
KEYS_AT_ONCE = 1000
TIMEOUT = 600  # seconds; an exact search of many documents takes long
NAME_FILE = "qdrant.json"  # which collection of the server is that of the folder
# Type of a metadata column -> type of its index; columns of JSON have none.
INDEXES = {"text": "keyword", "integer": "integer", "number": "float", "boolean": "bool"}


class QdrantEngine(Engine):
    """
    A collection of Qdrant with the named vectors `first` and `second`, and the payload `id`, `text` and `metadata`.
    The id of a point is the key. Vectors are compared by dot product. The second stage is a query with `prefetch`.

    Without a `url`, the collection is in the folder `qdrant`. This is Qdrant's local mode, for tests: it holds all
    vectors in memory, as float32, and compares every one of them, for any code. Only one process can open it.

    On a server, vectors are on its disk. `flat` compares all of them. `hnsw` searches a graph, which is in memory with
    the vectors in 8 bits (`int8`) or in 1 bit (`sign`); Qdrant makes these beside the vectors on the disk, which are
    the decoded ones: float32 for `int8`, 1 and -1 in float16 for `sign`. A server rounds a query to the type of the
    vectors, so that scores of `float16` differ in the fourth digit.

    The key of the server's API is read from the variable `QDRANT_API_KEY` of the environment, and kept nowhere. The
    collection is called as the folder was when the index was made.
    """

    name = "qdrant"
    module = "qdrant_client"
    codes = (FLOAT, "float16", "int8", "sign")
    second_codes = (FLOAT, "float16")
    kinds = ("flat", "hnsw")
    filters = True
    holds_documents = True

    def __init__(self, folder: Path, layout: Layout):
        super().__init__(folder, layout)
        self._models = self.library().models
        self._place = folder.resolve() / "qdrant"
        self._where = layout.url or str(self._place)  # for error messages
        self._client = self._opened()
        try:
            with self._reported():
                self._collection = self._named()
                if not self._client.collection_exists(self._collection):
                    self._create()
        except BaseException:
            self.close()
            raise

    @classmethod
    def require(cls, layout: Layout) -> None:
        super().require(layout)
        if layout.kind == "hnsw" and layout.url is None:
            raise ValueError("--kind hnsw: the engine qdrant has it on a server (--url); in a folder, it has flat.")

    def close(self) -> None:
        self._client.close()

    def _opened(self) -> Any:
        client = self.library().QdrantClient
        if self.layout.url is not None:
            return client(url=self.layout.url, api_key=os.environ.get("QDRANT_API_KEY"), timeout=TIMEOUT)
        try:
            with self._reported():
                return client(path=str(self._place))
        except RuntimeError as error:  # of the lock
            raise ValueError(
                f"{self._place} is open already, and Qdrant opens a folder only once: close it there, or use a server "
                "(--url)."
            ) from error

    def _named(self) -> str:
        """The collection of this index."""
        if self.layout.url is None:
            return "documents"
        file = self.folder / NAME_FILE
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))["collection"]
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", self.folder.resolve().name)
        if self._client.collection_exists(name):
            raise ValueError(
                f"{self.layout.url} has a collection {name!r} of another index: delete it there, or give --output "
                "another name."
            )
        file.write_text(json.dumps({"collection": name}) + "\n", encoding="utf-8")
        return name

    def _create(self) -> None:
        self._client.create_collection(
            self._collection, vectors_config=collection_vectors(self._models, self.layout), on_disk_payload=True
        )
        if self.layout.url is None:  # local mode has no such indexes
            return
        for column, kind in self.layout.columns.items():
            if kind in INDEXES:
                self._client.create_payload_index(self._collection, column_path(column), INDEXES[kind], wait=True)

    def write(self, batch: Batch) -> None:
        vectors = {"first": self.layout.first.decode(batch.first)}
        if self.layout.second is not None:
            assert batch.second is not None
            vectors["second"] = self.layout.second.decode(batch.second)
        for start in range(0, len(batch), POINTS_AT_ONCE):
            points = [
                self._models.PointStruct(
                    id=int(batch.keys[row]),
                    vector={name: numbers[row].tolist() for name, numbers in vectors.items()},
                    payload=_payload(batch, row),
                )
                for row in range(start, min(start + POINTS_AT_ONCE, len(batch)))
            ]
            with self._reported():
                self._client.upsert(self._collection, points, wait=True)

    def finish(self) -> None:
        """Wait until a server has made its graphs."""
        with self._reported():
            while (status := self._client.get_collection(self._collection).status) != "green":
                if status == "red":
                    raise OSError("the collection has the status red: see the log of the server")
                if status == "grey":  # paused since the server started, until a change
                    self._client.update_collection(
                        self._collection, optimizers_config=self._models.OptimizersConfigDiff()
                    )
                time.sleep(0.5)

    def delete(self, keys: np.ndarray) -> None:
        for start in range(0, len(keys), KEYS_AT_ONCE):
            points = self._models.PointIdsList(points=keys[start : start + KEYS_AT_ONCE].tolist())
            with self._reported():
                self._client.delete(self._collection, points, wait=True)

    def search(
        self, queries: torch.Tensor, k: int, where: Where | None = None, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        first, final = self.layout.first.queries(queries), None
        if self.layout.shortlist is not None:
            final = (self.layout.second or self.layout.first).float_queries(queries)
        passing = None if not where else matching(self._models, where, self.layout)
        requests = [
            self._request(first[row].tolist(), None if final is None else final[row].tolist(), k, passing)
            for row in range(len(queries))
        ]
        found = []
        for start in range(0, len(requests), QUERIES_AT_ONCE):
            with self._reported():
                answers = self._client.query_batch_points(
                    self._collection, requests[start : start + QUERIES_AT_ONCE], timeout=TIMEOUT
                )
            for answer in answers:
                scores = np.array([[point.score for point in answer.points]], dtype=np.float32)
                keys = np.array([[point.id for point in answer.points]], dtype=np.int64)
                found.append(filled(scores, keys, k))
        scores = np.concatenate([scores for scores, _ in found])
        if final is None and self.layout.binary:
            scores /= self.layout.first.dim
        return scores, np.concatenate([keys for _, keys in found])

    def _request(self, first: list[float], final: list[float] | None, k: int, passing: Any) -> Any:
        models = self._models
        settings = exact = None
        if self.layout.url is not None:  # local mode has no settings
            settings, exact = models.SearchParams(**stage_settings(self.layout, k)), models.SearchParams(exact=True)
        if final is None:
            return models.QueryRequest(query=first, using="first", limit=k, filter=passing, params=settings)
        length = max(k, self.layout.shortlist or 0)
        prefetch = models.Prefetch(query=first, using="first", limit=length, filter=passing, params=settings)
        return models.QueryRequest(prefetch=prefetch, query=final, using=self._column, limit=k, params=exact)

    @property
    def _column(self) -> str:
        """The vectors that score a shortlist."""
        return "first" if self.layout.second is None else "second"

    def packed(self, keys: np.ndarray) -> np.ndarray:
        points = {point.id: point.vector[self._column] for point in self._points(keys, with_vectors=[self._column])}
        numbers = np.array([points[key] for key in keys.tolist()], dtype=np.float32)
        return packed_numbers(self.layout.second or self.layout.first, numbers)

    def documents(self, keys: np.ndarray) -> dict[int, tuple[str, str | None, dict[str, Any]]]:
        return {
            point.id: (point.payload["id"], point.payload["text"], point.payload["metadata"])
            for point in self._points(keys, with_payload=True)
        }

    def _points(self, keys: np.ndarray, with_payload: bool = False, **options: Any) -> Iterator[Any]:
        for start in range(0, len(keys), KEYS_AT_ONCE):
            ids = keys[start : start + KEYS_AT_ONCE].tolist()
            with self._reported():
                points = self._client.retrieve(self._collection, ids, with_payload=with_payload, **options)
            yield from points

    def disk_bytes(self) -> int:
        """Bytes of the folder, with texts and metadata: they are in the same file. A server does not say what it
        takes; it is the bytes of its vectors then, and of their codes, without the graph."""
        if self.layout.url is None:
            return sum(path.stat().st_size for path in self._place.rglob("*") if path.is_file())
        with self._reported():
            return self._client.count(self._collection).count * bytes_on_server(self.layout)

    def example(self) -> str:
        settings = stage_settings(self.layout, FOUND)
        return example(str(self._place), self._collection, self.layout, settings, self._column)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Errors of the disk and of a server as one line."""
        from qdrant_client.http.exceptions import ApiException

        try:
            yield
        except (sqlite3.Error, ApiException, OSError) as error:
            raise OSError(f"Qdrant, {self._where}: {' '.join(str(error).split())}") from error


def _payload(batch: Batch, row: int) -> dict[str, Any]:
    metadata = json.loads(json.dumps(batch.metadata[row], default=str))
    return {"id": batch.ids[row], "text": batch.texts[row], "metadata": metadata}
