"""A made-up collection of documents with vectors, and what a search of it must find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

from m3bert.encode.coding import Coder
from m3bert.index.corpus import Document
from m3bert.index.engine import Batch, Engine, Hit, Layout, find_engine
from m3bert.modeling.quantization_m3bert import M3BertQuantizer, M3BertQuantizerConfig


WIDTH = 64
COLUMNS = {"year": "integer", "topic": "text", "score": "number", "open": "boolean", "tags": "json"}
TOPICS = ("air", "the sea's", 'a "quoted" one', "fire")


@dataclass(frozen=True)
class Collection:
    """Documents with vectors in clusters, as those of texts are."""

    vectors: torch.Tensor
    queries: torch.Tensor

    @classmethod
    def make(cls, documents: int = 300, queries: int = 7, width: int = WIDTH) -> Collection:
        generator = torch.Generator().manual_seed(documents)
        centres = torch.randn(12, width, generator=generator)

        def draw(count: int) -> torch.Tensor:
            chosen = centres[torch.randint(len(centres), (count,), generator=generator)]
            return 3 * (chosen + 0.8 * torch.randn(count, width, generator=generator))

        return cls(draw(documents), draw(queries))

    def metadata(self, row: int) -> dict[str, Any]:
        return {
            "year": 1990 + row % 10, "topic": TOPICS[row % len(TOPICS)], "score": row / 4, "open": row % 3 == 0,
            "tags": [row % 2, "x"],
        }  # fmt: skip

    def batch(self, layout: Layout, rows: Sequence[int]) -> Batch:
        """Rows of the collection as a batch; their keys are the rows."""
        vectors = self.vectors[list(rows)]
        return Batch(
            np.array(rows, dtype=np.int64),
            [Document("", f"id-{row}", f"text of {row}", self.metadata(row)) for row in rows],
            {name: coder.pack(vectors) for name, coder in layout.coders.items()},
        )


def quantizer_for(collection: Collection) -> M3BertQuantizer:
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=collection.vectors.shape[1])).eval()
    quantizer.initialize(collection.vectors)
    return quantizer


def make_layout(collection: Collection, text: str, kind: str = "flat", url: str | None = None) -> Layout:
    """A layout as text: `32@binary`, `16@float32>40>64@int8` (shortlist of 40), `32@qama-2>40` (decoded codes)."""
    first, *rest = text.split(">")
    coders = []
    for part in (first, *rest[1:]):
        dim, code = part.split("@")
        quantizer = quantizer_for(collection) if code.startswith("qama") else None
        coders.append(Coder.fit(collection.vectors, code, int(dim), quantizer))
    return Layout(
        coders[0], coders[1] if len(coders) > 1 else None, int(rest[0]) if rest else None, kind, url,
        None if url is None else f"test-{uuid4()}", COLUMNS,
    )  # fmt: skip


def opened(folder: Path, layout: Layout, name: str) -> Engine:
    folder.mkdir(parents=True, exist_ok=True)
    return find_engine(name)(folder, layout)


def add(engine: Engine, collection: Collection, rows: range) -> None:
    """Add rows of the collection, in batches. A row 0 begins the index."""
    if rows.start == 0:
        engine.truncate(0)
    engine.add(
        collection.batch(engine.layout, range(start, min(start + 128, rows.stop)))
        for start in range(rows.start, rows.stop, 128)
    )


def numbers(hits: list[list[Hit]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and rows of hits as arrays of `k` columns; -inf and -1 where there is none."""
    scores, keys = np.full((len(hits), k), -np.inf, np.float32), np.full((len(hits), k), -1)
    for row, actual in enumerate(hits):
        scores[row, : len(actual)] = [hit.score for hit in actual]
        keys[row, : len(actual)] = [int(hit.id.removeprefix("id-")) for hit in actual]
    return scores, keys


def first_scores(layout: Layout, collection: Collection) -> np.ndarray:
    """Scores of the first stage, `(queries, documents)`, by multiplying everything with everything."""
    coder = layout.first
    documents = coder.documents(coder.pack(collection.vectors))
    queries = coder.queries(collection.queries)
    return (queries @ documents.T).numpy() / (documents.shape[1] if coder.symmetric else 1)


def final_scores(layout: Layout, collection: Collection) -> np.ndarray:
    """Scores of the last stage, `(queries, documents)`."""
    if layout.shortlist is None:
        return first_scores(layout, collection)
    coder = layout.second or layout.first
    return (coder.float_queries(collection.queries) @ coder.decode(coder.pack(collection.vectors)).T).numpy()


def check_exact(
    layout: Layout, collection: Collection, hits: list[list[Hit]], k: int, remaining: Sequence[int] | None = None
) -> None:
    """
    Check the result of an exact search of the rows `kept` (keys are rows). Documents with equal scores may come in any
    order.
    """
    scores, keys = numbers(hits, k)
    rows = np.arange(len(collection.vectors)) if remaining is None else np.array(remaining, dtype=int)
    first, final = first_scores(layout, collection)[:, rows], final_scores(layout, collection)[:, rows]
    place = {int(row): index for index, row in enumerate(rows)}
    actual = min(k, len(rows))
    assert len(hits) == len(collection.queries) and max(map(len, hits)) <= k
    assert (keys[:, actual:] == -1).all() and np.isneginf(scores[:, actual:]).all()
    if not actual:
        return
    length = len(rows) if layout.shortlist is None else min(len(rows), max(k, layout.shortlist))
    for query in range(len(keys)):
        columns = np.array([place[key] for key in keys[query, :actual].tolist()], dtype=int)
        assert len(set(columns)) == actual
        np.testing.assert_allclose(scores[query, :actual], final[query, columns], atol=2e-5)
        assert (np.diff(scores[query, :actual]) <= 1e-6).all()
        last = np.sort(first[query])[::-1][length - 1]  # what the last of the shortlist has
        assert (first[query, columns] >= last - 2e-5).all()
        sure = final[query][first[query] > last + 2e-5] if length < len(rows) else final[query]
        best = np.sort(sure)[::-1][:actual]
        assert (scores[query, : len(best)] >= best - 2e-5).all()
