"""An index in Qdrant: a collection on a server, or in a folder."""

from __future__ import annotations

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
from ..engine import Engine, filled
from ..layout import Layout
from ..store import Batch, Store, Where
from .lines import FOUND, unit_line


POINTS_AT_ONCE = 128  # in one request; a server takes 32 MB
KEYS_AT_ONCE = 1000
TIMEOUT = 600  # seconds; an exact search of many documents takes long
CANDIDATES = 256  # of a graph, that a search follows at least
# Code -> type of the numbers on a server.
DATATYPES = {FLOAT: "float32", "float16": "float16", "int8": "float32", "binary": "float16"}
# Type of a metadata column -> type of its index; columns of JSON have none.
INDEXES = {"text": "keyword", "integer": "integer", "number": "float", "boolean": "bool"}


class QdrantEngine(Engine):
    """
    A collection of Qdrant with the named vectors `first` and `second`, and the payload `id`, `text` and `metadata`.
    The id of a point is the key. Vectors are compared by dot product. The second stage is a query with `prefetch`.

    Without a `url`, the collection is in the folder `qdrant`. This is Qdrant's local mode, for tests: it holds all
    vectors in memory, as float32, and compares every one of them, for any precision. Only one process can open it.

    On a server, vectors are on its disk. `flat` compares all of them. `hnsw` searches a graph, which is in memory with
    the vectors in 8 bits (`int8`) or in 1 bit (`binary`); Qdrant makes these beside the vectors on the disk, which are
    the decoded ones: float32 for `int8`, 1 and -1 in float16 for `binary`. A server rounds a query to the type of the
    vectors, so that scores of `float16` differ in the fourth digit.

    The key of the server's API is read from the variable `QDRANT_API_KEY` of the environment, and kept nowhere. The
    collection is called as the folder was when the index was made.
    """

    name = "qdrant"
    module = "qdrant_client"
    codes = (FLOAT, "float16", "int8", "binary")
    second_codes = (FLOAT,)
    kinds = ("flat", "hnsw")

    def __init__(self, folder: Path, layout: Layout, store: Store):
        super().__init__(folder, layout, store)
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
            raise ValueError(
                "--index_type hnsw: the vector store qdrant has it on a server (--url); a folder has flat."
            )

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
        if known := self.store.state("collection"):
            return known
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", self.folder.resolve().name)
        if self._client.collection_exists(name):
            raise ValueError(
                f"{self.layout.url} has a collection {name!r} of another index: delete it there, or give --output_dir "
                "another name."
            )
        self.store.set_state(collection=name)
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

    def add(self, keys: np.ndarray) -> None:
        """Points that are there already are replaced. A server is waited for until it has made its graphs."""
        for batch in self.store.batches(keys):
            points = self._points(batch)
            for start in range(0, len(points), POINTS_AT_ONCE):
                with self._reported():
                    self._client.upsert(self._collection, points[start : start + POINTS_AT_ONCE], wait=True)
        with self._reported():
            while (status := self._client.get_collection(self._collection).status) != "green":
                if status == "red":
                    raise OSError("the collection has the status red: see the log of the server")
                if status == "grey":  # paused since the server started, until a change
                    self._client.update_collection(
                        self._collection, optimizers_config=self._models.OptimizersConfigDiff()
                    )
                time.sleep(0.5)

    def _points(self, batch: Batch) -> list[Any]:
        vectors = {"first": self.layout.first.decode(batch.first).tolist()}
        if self.layout.second is not None:
            assert batch.second is not None
            vectors["second"] = self.layout.second.decode(batch.second).tolist()
        return [
            self._models.PointStruct(
                id=key,
                vector={name: numbers[row] for name, numbers in vectors.items()},
                payload={"id": batch.ids[row], "text": batch.texts[row], "metadata": batch.metadata[row]},
            )
            for row, key in enumerate(batch.keys.tolist())
        ]

    def delete(self, keys: np.ndarray) -> None:
        for start in range(0, len(keys), KEYS_AT_ONCE):
            points = self._models.PointIdsList(points=keys[start : start + KEYS_AT_ONCE].tolist())
            with self._reported():
                self._client.delete(self._collection, points, wait=True)

    def search(self, queries: torch.Tensor, k: int, where: Where | None = None) -> tuple[np.ndarray, np.ndarray]:
        first, final = self.layout.first.queries(queries), None
        if self.rescorer is not None:
            final = self.rescorer[1].float_queries(queries)
        passing = matching(self._models, where) if where else None
        scores, keys = np.zeros((len(first), k), np.float32), np.full((len(first), k), -1)
        for row, query in enumerate(first.tolist()):
            request = self._request(query, None if final is None else final[row].tolist(), k, passing)
            with self._reported():
                points = self._client.query_points(self._collection, limit=k, timeout=TIMEOUT, **request).points
            scores[row, : len(points)] = [point.score for point in points]
            keys[row, : len(points)] = [point.id for point in points]
        if final is None and self.layout.first.symmetric:
            scores /= self.layout.first.dim
        return filled(scores, keys, k)

    def _request(self, first: list[float], final: list[float] | None, k: int, passing: Any) -> dict[str, Any]:
        """Arguments of `query_points`."""
        models = self._models
        settings = exact = None
        if self.layout.url is not None:  # local mode has no settings
            settings, exact = models.SearchParams(**stage_settings(self.layout, k)), models.SearchParams(exact=True)
        if final is None or self.rescorer is None:
            return {"query": first, "using": "first", "query_filter": passing, "search_params": settings}
        length = max(k, self.layout.shortlist or 0)
        prefetch = models.Prefetch(query=first, using="first", limit=length, filter=passing, params=settings)
        return {"prefetch": prefetch, "query": final, "using": self.rescorer[0], "search_params": exact}

    def example(self) -> list[str]:
        layout, coder = self.layout, self.layout.first
        if layout.url is None:
            lines = [f"client = QdrantClient(path={str(self._place)!r})"]
        else:
            lines = [f'client = QdrantClient({layout.url!r}, api_key=os.environ.get("QDRANT_API_KEY"))']
        signs = f"first = np.where(query[:{coder.dim}] > 0, 1.0, -1.0)"
        lines.append(signs if coder.symmetric else unit_line(coder, "first"))
        calls = ", ".join(f"{name}={value!r}" for name, value in stage_settings(layout, FOUND).items())
        params = f"params=models.SearchParams({calls})"
        score = "point.score"
        if self.rescorer is None:
            query = f'query=first.tolist(), using="first"{f", search_{params}" if layout.url else ""}'
            score += f" / {coder.dim}" if coder.symmetric else ""
        else:
            column, second = self.rescorer
            length = max(FOUND, layout.shortlist or 0)
            stage = f'query=first.tolist(), using="first", limit={length}{f", {params}" if layout.url else ""}'
            lines += [f"shortlist = models.Prefetch({stage})", unit_line(second, column)]
            exact = ", search_params=models.SearchParams(exact=True)" if layout.url else ""
            query = f'prefetch=shortlist, query={column}.tolist(), using="{column}"{exact}'
        return [
            *lines,
            f"hits = client.query_points({self._collection!r}, {query}, limit={FOUND})",
            f'found = [(point.payload["id"], {score}) for point in hits.points]',
            "client.close()",
        ]

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Errors of the disk and of a server as one line."""
        from qdrant_client.http.exceptions import ApiException

        try:
            yield
        except (sqlite3.Error, ApiException, OSError) as error:
            raise OSError(f"Qdrant, {self._where}: {' '.join(str(error).split())}") from error


def collection_vectors(models: Any, layout: Layout) -> dict[str, Any]:
    """The named vectors of the collection, by `qdrant_client.models`. Only the first ones have a graph."""
    plain, vectors = models.HnswConfigDiff(m=0), {}
    quantizations = {  # codes that a server makes of vectors, and keeps in memory
        "binary": models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True)),
        "int8": models.ScalarQuantization(
            scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
        ),
    }
    for name, coder in (("first", layout.first), ("second", layout.second)):
        if coder is not None:
            searched = name == "first" and layout.kind == "hnsw"
            vectors[name] = models.VectorParams(
                size=coder.dim,
                distance=models.Distance.DOT,
                datatype=DATATYPES[coder.code],
                on_disk=True,
                hnsw_config=None if searched else plain,
                quantization_config=quantizations.get(coder.code) if searched else None,
            )
    return vectors


def stage_settings(layout: Layout, k: int) -> dict[str, Any]:
    """Settings of the first stage that finds `k` documents, as arguments of `SearchParams`. Codes that a server made
    score a shortlist; without one, the vectors rescore what they find. Bits are as good as the vectors, which are
    1 and -1."""
    if layout.kind == "flat":
        return {"exact": True}
    settings: dict[str, Any] = {"hnsw_ef": max(CANDIDATES, 2 * max(k, layout.shortlist or 0))}
    if layout.first.code == "int8" and layout.shortlist is None:
        settings["quantization"] = {"rescore": True, "oversampling": 2.0}
    elif layout.first.code in ("int8", "binary"):
        settings["quantization"] = {"rescore": False}
    return settings


def column_path(column: str) -> str:
    """Where a metadata column is in the payload."""
    return f"metadata.{column}" if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", column) else f'metadata."{column}"'


def matching(models: Any, where: Where) -> Any:
    """The filter for documents with certain metadata."""
    return models.Filter(
        must=[
            models.Filter(should=[_condition(models, column_path(column), value) for value in values])
            for column, values in where.items()
        ]
    )


def _condition(models: Any, path: str, value: Any) -> Any:
    if isinstance(value, str | bool):
        return models.FieldCondition(key=path, match=models.MatchValue(value=value))
    return models.FieldCondition(key=path, range=models.Range(gte=value, lte=value))  # MatchValue takes no floats
