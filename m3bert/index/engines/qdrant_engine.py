"""An index in Qdrant: a collection on a server, or in a folder."""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ...encode.precisions import FLOAT
from ..engine import Batch, Committed, Engine, Hit, Layout, Where


Models = Any  # the module `qdrant_client.models`, of an optional dependency
POINTS_AT_ONCE = 128  # in one request; a server takes 32 MB
TIMEOUT = 600  # seconds; an exact search of many documents takes long
CANDIDATES = 256  # of a graph, that a search follows at least
# Code -> type of the numbers on a server.
DATATYPES = {FLOAT: "float32", "float16": "float16", "int8": "float32", "binary": "float16"}
# Type of a metadata column -> type of its index; columns of JSON have none.
INDEXES = {"text": "keyword", "integer": "integer", "number": "float", "boolean": "bool"}


class QdrantEngine(Engine):
    """
    A collection of Qdrant with the named vectors `first` and `second`, and the payload `key`, `id`, `text` and
    `metadata`. The id of a point is the key. Vectors are compared by dot product. The second stage is a query with
    `prefetch`.

    Without a `url`, the collection is in the folder `qdrant`. This is Qdrant's local mode, for tests: it holds all
    vectors in memory, as float32, and compares every one of them, for any precision. Only one process can open it.

    On a server, vectors are on its disk. `flat` compares all of them. `hnsw` searches a graph, which is in memory with
    the vectors in 8 bits (`int8`) or in 1 bit (`binary`); Qdrant makes these beside the vectors on the disk, which are
    the decoded ones: float32 for `int8`, 1 and -1 in float16 for `binary`. Documents are found at once, and faster
    after the server has put them into its graph. It rounds a query to the type of the vectors, so that scores of
    `float16` differ in the fourth digit.

    The key of the server's API is read from the variable `QDRANT_API_KEY` of the environment, and kept nowhere.
    """

    name = "qdrant"
    has_server = True
    module = "qdrant_client"
    codes = (FLOAT, "float16", "int8", "binary")
    second_codes = (FLOAT,)
    kinds = ("flat", "hnsw")
    files = ("qdrant",)

    def __init__(self, folder: Path, layout: Layout):
        super().__init__(folder, layout)
        self._models = self.library().models
        place = str(folder.resolve() / "qdrant")
        self._where = layout.url or place  # for error messages
        self._collection = layout.collection or "documents"
        options: dict[str, Any] = {"path": place}
        if layout.url is not None:
            options = {"url": layout.url, "api_key": os.environ.get("QDRANT_API_KEY"), "timeout": TIMEOUT}
        self._client = self._reported(self.library().QdrantClient, **options)

    @classmethod
    def require(cls, layout: Layout) -> None:
        super().require(layout)
        if layout.kind == "hnsw" and layout.url is None:
            raise ValueError("The vector store qdrant has the index type hnsw on a server (url); a folder has flat.")

    def close(self) -> None:
        self._client.close()

    def destroy(self) -> None:
        self._reported(self._client.delete_collection, self._collection)
        super().destroy()

    def count(self, committed: Committed | None = None) -> int:
        passing = matching(self._models, {}, committed)
        return self._reported(self._client.count, self._collection, passing).count

    def truncate(self, first: int) -> None:
        if first == 0:
            self._reported(self._client.delete_collection, self._collection)
            self._reported(self._create)
        else:
            later = self._models.FieldCondition(key="key", range=self._models.Range(gte=first))
            self._delete(later)

    def _create(self) -> None:
        self._client.create_collection(
            self._collection, vectors_config=collection_vectors(self._models, self.layout), on_disk_payload=True
        )
        if self.layout.url is not None:  # local mode has no such indexes
            columns = {column_path(name): INDEXES.get(kind) for name, kind in self.layout.columns.items()}
            for path, kind in {"key": "integer", "id": "keyword", **columns}.items():
                if kind is not None:
                    self._client.create_payload_index(self._collection, path, kind, wait=True)

    def add(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            points = self._points(batch)
            for start in range(0, len(points), POINTS_AT_ONCE):
                some = points[start : start + POINTS_AT_ONCE]
                self._reported(self._client.upsert, self._collection, some, wait=True)

    def _points(self, batch: Batch) -> list[object]:
        vectors = {name: coder.decode(batch.vectors[name]).tolist() for name, coder in self.layout.coders.items()}
        return [
            self._models.PointStruct(
                id=key,
                vector={name: numbers[row] for name, numbers in vectors.items()},
                payload={"key": key, "id": document.id, "text": document.text, "metadata": document.metadata},
            )
            for row, (key, document) in enumerate(zip(batch.keys.tolist(), batch.documents, strict=True))
        ]

    def delete(self, keys: Sequence[int]) -> None:
        self._delete(self._models.HasIdCondition(has_id=list(keys)))

    def _delete(self, condition: object) -> None:
        self._reported(self._client.delete, self._collection, self._models.Filter(must=[condition]), wait=True)

    def keys_of(self, ids: Sequence[str]) -> dict[str, int]:
        models = self._models
        known = models.Filter(must=[models.FieldCondition(key="id", match=models.MatchAny(any=list(ids)))])
        options = {"limit": 2 * len(ids), "with_payload": ["id"]}  # an interrupted change may have stored an id twice
        points, _ = self._reported(self._client.scroll, self._collection, known, **options)
        return {point.payload["id"]: point.id for point in points}

    def search(
        self, queries: torch.Tensor, k: int, where: Where | None = None, committed: Committed | None = None
    ) -> list[list[Hit]]:
        layout, client = self.layout, self._client
        first, final = layout.first.queries(queries), None
        if layout.rescorer is not None:
            final = layout.coders[layout.rescorer].float_queries(queries)
        passing = matching(self._models, where or {}, committed)
        # Without a shortlist, bits are compared as 1 and -1.
        scale = layout.first.dim if final is None and layout.first.symmetric else 1
        hits = []
        for row, query in enumerate(first.tolist()):
            request = self._request(query, None if final is None else final[row].tolist(), k, passing)
            answer = self._reported(client.query_points, self._collection, limit=k, timeout=TIMEOUT, **request)
            scored = [(point.payload, point.score / scale) for point in answer.points]
            hits.append([Hit(row["id"], score, row["text"], row["metadata"]) for row, score in scored])
        return hits

    def _request(self, first: list[float], final: list[float] | None, k: int, passing: object) -> dict[str, object]:
        """Arguments of `query_points`."""
        models = self._models
        settings = exact = None
        if self.layout.url is not None:  # local mode has no settings
            settings, exact = models.SearchParams(**stage_settings(self.layout, k)), models.SearchParams(exact=True)
        if final is None:
            return {"query": first, "using": "first", "query_filter": passing, "search_params": settings}
        length = max(k, self.layout.shortlist or 0)
        prefetch = models.Prefetch(query=first, using="first", limit=length, filter=passing, params=settings)
        return {"prefetch": prefetch, "query": final, "using": self.layout.rescorer, "search_params": exact}

    def _reported(self, call: Callable[..., Any], *arguments: object, **options: object) -> Any:
        """The result of a call, with errors of the disk, of its lock and of a server as one line."""
        from qdrant_client.http.exceptions import ApiException

        try:
            return call(*arguments, **options)
        except (sqlite3.Error, ApiException, OSError, RuntimeError) as error:
            raise OSError(f"Qdrant, {self._where}: {' '.join(str(error).split())}") from error


def collection_vectors(models: Models, layout: Layout) -> dict[str, object]:
    """The named vectors of the collection, by `qdrant_client.models`. Only the first ones have a graph."""
    quantizations = {  # codes that a server makes of vectors, and keeps in memory
        "binary": models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True)),
        "int8": models.ScalarQuantization(
            scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8, always_ram=True)
        ),
    }
    vectors = {}
    for name, coder in layout.coders.items():
        searched = name == "first" and layout.kind == "hnsw"
        vectors[name] = models.VectorParams(
            size=coder.dim,
            distance=models.Distance.DOT,
            datatype=DATATYPES[coder.code],
            on_disk=True,
            hnsw_config=None if searched else models.HnswConfigDiff(m=0),
            quantization_config=quantizations.get(coder.code) if searched else None,
        )
    return vectors


def stage_settings(layout: Layout, k: int) -> dict[str, object]:
    """Settings of the first stage, as arguments of `SearchParams`. If the server searches codes of its own,
    they score the shortlist; without one, the vectors rescore int8. The vectors of bits are the bits: 1 and -1."""
    if layout.kind == "flat":
        return {"exact": True}
    settings: dict[str, object] = {"hnsw_ef": max(CANDIDATES, 2 * max(k, layout.shortlist or 0))}
    if layout.first.code == "int8" and layout.shortlist is None:
        settings["quantization"] = {"rescore": True, "oversampling": 2.0}
    elif layout.first.code in ("int8", "binary"):
        settings["quantization"] = {"rescore": False}
    return settings


def column_path(column: str) -> str:
    """Where a metadata column is in the payload. ValueError for a name that a path of Qdrant cannot have."""
    if '"' in column:
        raise ValueError(f"Qdrant cannot filter by the column {column!r}: its name has a quotation mark.")
    return f"metadata.{column}" if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", column) else f'metadata."{column}"'


def matching(models: Models, where: Where, committed: Committed | None) -> object:
    """The filter for documents with certain metadata that belong to the index."""

    def condition(path: str, value: object) -> object:
        if isinstance(value, str | bool):
            return models.FieldCondition(key=path, match=models.MatchValue(value=value))
        return models.FieldCondition(key=path, range=models.Range(gte=value, lte=value))  # MatchValue takes no floats

    must = [
        models.Filter(should=[condition(column_path(column), value) for value in values])
        for column, values in where.items()
    ]
    if committed is None:
        return models.Filter(must=must) if must else None
    must.append(models.FieldCondition(key="key", range=models.Range(lt=committed.end)))
    return models.Filter(must=must, must_not=[models.HasIdCondition(has_id=list(committed.removed))])
