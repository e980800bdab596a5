"""The lines that search an index in Qdrant without this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..layout import Layout
from .lines import unit_line


FOUND = 10  # documents that the lines find


def example(place: str, collection: str, layout: Layout, settings: Mapping[str, Any], column: str) -> str:
    """
    Lines of Python that read `query`, and set `found`.

    Args:
        place (`str`): Folder of the collection, if it is on no server.
        collection (`str`): Its name.
        layout ([`Layout`]): What is in it.
        settings (`dict[str, Any]`): Arguments of `SearchParams` for the first stage. They are for a server.
        column (`str`): Name of the vectors that score a shortlist.
    """
    lines = ["import numpy as np", "from qdrant_client import QdrantClient, models", ""]
    if layout.url is None:
        lines.append(f"client = QdrantClient(path={place!r})")
    else:
        lines = ["import os", "", *lines]
        lines.append(f'client = QdrantClient({layout.url!r}, api_key=os.environ.get("QDRANT_API_KEY"))')
    coder = layout.first
    first = f"np.where(query[:{coder.dim}] > 0, 1.0, -1.0)"
    lines.append(f"first = {first}" if layout.binary else unit_line(coder, "first"))
    calls = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    params = f", params=models.SearchParams({calls})" if layout.url else ""
    score = "point.score"
    if layout.shortlist is None:
        query = f'query=first.tolist(), using="first"{params.replace("params", "search_params", 1)}'
        score += f" / {coder.dim}" if layout.binary else ""
    else:
        length = max(FOUND, layout.shortlist)
        exact = ", search_params=models.SearchParams(exact=True)" if layout.url else ""
        lines += [
            unit_line(layout.second or coder, column),
            f'shortlist = models.Prefetch(query=first.tolist(), using="first", limit={length}{params})',
        ]
        query = f'prefetch=shortlist, query={column}.tolist(), using="{column}"{exact}'
    return "\n".join(
        [
            *lines,
            f"hits = client.query_points({collection!r}, {query}, limit={FOUND})",
            f'found = [(point.payload["id"], {score}) for point in hits.points]',
            "client.close()",
        ]
    )
