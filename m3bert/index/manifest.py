"""What an index says of itself, in a file of its folder, and the vector stores that there are."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from ..encode.typed import read_object


# Name of a vector store -> module of the folder `engines`, and class.
ENGINES = {
    "faiss": ("faiss_engine", "FaissEngine"),
    "qdrant": ("qdrant_engine", "QdrantEngine"),
    "lancedb": ("lancedb_engine", "LanceDBEngine"),
}
# How the searched vectors are arranged: compared one by one, in clusters (IVF), or as a graph (HNSW).
KINDS = ("flat", "ivf", "hnsw")
SCHEMA_VERSION = 3
IN_SQLITE = 2  # the version that kept the progress of an index in `documents.sqlite`, for all vector stores
MANIFEST = "index.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """
    What an index says of itself in `index.json`.

    Raises:
        ValueError: if the folder holds no index, or one of another version.
    """
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} holds no index: it has no {MANIFEST}.")
    manifest = read_object(folder / MANIFEST)
    if manifest.get("schema_version") not in (SCHEMA_VERSION, IN_SQLITE):
        raise ValueError(f"{folder / MANIFEST} is of another version of m3bert: build the index again.")
    if "finished" not in manifest:
        with closing(sqlite3.connect(folder / "documents.sqlite")) as database:
            state = dict(database.execute("SELECT name, value FROM state"))
        pending = json.loads(state.get("pending", '{"first": 0}'))  # where an interrupted addition began
        manifest |= {"next_key": pending["first"] if pending else int(state["next_key"]), "finished": not pending}
        manifest["layout"]["collection"] = state.get("collection")
    return manifest
