"""
An index of documents in one vector store: build it, add to it, delete from it, and search it.

The file `index.json` of its folder says how it was built. While documents are added, it says that the index is not
finished; what a killed process had added is removed by the next addition.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from tqdm.auto import tqdm

from ..encode.durable import only_writer, replace_text
from ..encode.encoder import GridEncoder
from ..encode.states import unwrap_encoder
from ..encode.typed import read_object
from .corpus import Corpus, Document, column_types, is_of_type
from .engine import Batch, Engine, Hit, Layout, find_engine
from .plan import Plan, encoder_identity, require_same_encoder


SCHEMA_VERSION = 3
IN_SQLITE = 2  # the version that kept the progress of an index in `documents.sqlite`, for all vector stores
MANIFEST = "index.json"
CHUNK = 2048  # documents that are encoded, and then written, together
SAMPLE = 5  # chunks at the beginning that codes are fitted to


class Index:
    """
    An index in a folder. Made by [`Index.build`] or [`Index.open`].

    Args:
        folder (`Path`): The folder.
        manifest (`dict[str, Any]`): Content of its `index.json`.
        encoder ([`GridEncoder`], *optional*): Encoder of queries and new documents. Deleting needs none.

    ```python
    >>> index = Index.open(Path("runs/index"), encoder)  # doctest: +SKIP
    >>> index.search(["How do I remove a folder?"], 3)[0][0].id  # doctest: +SKIP
    'shutil.rmtree'
    ```
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], encoder: GridEncoder | None = None):
        self.folder, self.manifest, self.encoder = folder, manifest, encoder
        self.plan = Plan.from_dict(manifest["plan"])
        self.layout = Layout.from_dict(manifest["layout"], encoder.quantizer if encoder is not None else None)
        self.engine: Engine = find_engine(manifest["engine"])(folder, self.layout)

    @classmethod
    def build(
        cls, folder: Path, engine: str, plan: Plan, encoder: GridEncoder, corpus: Corpus, *, kind: str | None = None,
        url: str | None = None, model: str | None = None, verbose: bool = False
    ) -> Index:  # fmt: skip
        """
        Embed the documents of a corpus, and build the index from their vectors. If the folder has this index already,
        it is opened; an interrupted build starts again.

        Args:
            folder (`Path`): Folder of the index.
            engine (`str`): Vector store: one of [`~index.engine.ENGINES`].
            plan ([`Plan`]): What to store, and how to search.
            encoder ([`GridEncoder`]): Encoder with the grid of the plan.
            corpus ([`Corpus`]): Documents.
            kind (`str`, *optional*): One of [`~index.engine.KINDS`]. Default: the first of the store.
            url (`str`, *optional*): Address of a Qdrant server.
            model (`str`, *optional*): Hub id or folder of the encoder, for those who search. Default: where it was
                loaded from.
            verbose (`bool`, *optional*, defaults to `False`): Whether to show progress.

        Returns:
            [`Index`]: the finished index.

        Raises:
            OSError: if a file cannot be read or written.
            ValueError: if the encoder is not that of the plan, the vector store does not have its precisions, a
                document has no text or its id is not new, the folder holds another index or other files, or another
                process writes to it.
        """
        settings = {
            "engine": engine,
            "plan": json.loads(json.dumps(plan.to_dict())),
            "encoder": encoder_identity(encoder),
            "kind": kind or find_engine(engine).kinds[0],
            "url": url,
        }
        require_same_encoder(plan.encoder, settings["encoder"], "The plan")
        with only_writer(folder):
            manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
            for name, value in settings.items():
                if manifest.get(name, value) != value:
                    raise ValueError(f"{folder} holds an index with another {name}; choose another folder.")
            if not manifest.get("next_key"):
                manifest = _begin(folder, manifest, settings, plan, encoder, corpus, model)
            index = cls(folder, manifest, encoder)
            try:
                if not manifest["next_key"]:
                    index._add(corpus, verbose)
            except BaseException:
                index.close()
                raise
            return index

    @classmethod
    def open(cls, folder: Path, encoder: GridEncoder | None = None) -> Index:
        """
        Open an index.

        Args:
            folder (`Path`): Folder of the index.
            encoder ([`GridEncoder`], *optional*): Encoder of queries, and of new documents.

        Raises:
            ValueError: if the folder holds no index, or it was built with another model.
        """
        manifest = read_manifest(folder)
        if encoder is not None:
            require_same_encoder(manifest["encoder"], encoder_identity(encoder), f"The index {folder}")
        return cls(folder, manifest, encoder)

    def __len__(self) -> int:
        return len(self.engine)

    def close(self) -> None:
        """Give back files and connections."""
        self.engine.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, corpus: Corpus, *, verbose: bool = False) -> int:
        """
        Add documents, whose ids must be new. After an interrupted addition, the index cannot be searched until another
        one ends, which begins without the documents of the first.

        Returns:
            `int`: number of documents that were added.

        Raises:
            OSError: if a file cannot be read or written.
            ValueError: as [`Index.build`].
        """
        with only_writer(self.folder):
            self.manifest = read_manifest(self.folder)
            first = self.manifest["next_key"]
            self._add(corpus, verbose)
            return self.manifest["next_key"] - first

    def delete(self, ids: Sequence[str]) -> None:
        """
        Delete documents by their ids.

        Raises:
            ValueError: if an id is not in the index, the index is not finished, or another process writes to it.
                Nothing is deleted then.
        """
        with only_writer(self.folder):
            self._require_finished()
            known = self.engine.known(ids)
            if missing := [id_ for id_ in ids if id_ not in known]:
                raise ValueError(f"{self.folder} has no document {missing[0]!r}.")
            self.engine.delete(ids)

    def search(self, queries: Sequence[str], k: int = 10, where: Mapping[str, Any] | None = None) -> list[list[Hit]]:
        """
        Find documents.

        Args:
            queries (`Sequence[str]`): Texts.
            k (`int`, *optional*, defaults to 10): Number of documents to find per query.
            where (`dict[str, Any]`, *optional*): Metadata that documents must have: column -> a value, or a list of
                values of which they must have one.

        Returns:
            `list[list[Hit]]`: documents per query, best first.

        Raises:
            ValueError: if the index is not finished, `k` is below 1, or a column is unknown or of another type.
        """
        if k < 1:
            raise ValueError(f"k={k} must be at least 1.")
        assert self.encoder is not None, "open the index with an encoder"
        self._require_finished()
        filters = {}
        for name, wanted in (where or {}).items():
            filters[name] = wanted if isinstance(wanted, list | tuple) else [wanted]
            kind = self.layout.columns.get(name, "json")
            if kind == "json" or not all(is_of_type(value, kind) for value in filters[name]):
                raise ValueError(f"Cannot filter by {name}={wanted!r}; columns: {dict(self.layout.columns)}.")
        if not all(filters.values()):  # a column of which no value passes
            return [[] for _ in queries]
        embeddings = self.encoder.encode(list(queries), role="query").require_finite()
        return self.engine.search(embeddings.widest(self.plan.query.layer), k, filters)

    def _require_finished(self) -> None:
        if not read_manifest(self.folder)["finished"]:  # which another process may have changed
            raise ValueError(f"The index {self.folder} is not finished: run the command that was interrupted again.")

    def _add(self, corpus: Corpus, verbose: bool) -> None:
        self._note(finished=False)
        first = self.manifest["next_key"]
        self.engine.truncate(first)
        with tqdm(desc="Indexing", unit=" documents", disable=not verbose, leave=False) as bar:
            self.engine.add(self._batches(corpus, bar))
        if self.manifest["next_key"] == first:
            raise ValueError(f"There is no document in {', '.join(corpus.files)}.")
        self._note(finished=True)

    def _note(self, **changes: Any) -> None:
        self.manifest.update(changes)
        _write(self.folder, self.manifest)

    def _batches(self, corpus: Corpus, bar: tqdm) -> Iterator[Batch]:
        """The documents of a corpus in chunks, with their vectors. Documents without an id get their key as one. The
        next key moves in memory; [`~Index._note`] writes it at the end."""
        assert self.encoder is not None, "open the index with an encoder"
        documents = replace(corpus, metadata_columns=self.manifest["corpus"]["metadata_columns"]).documents(
            self.layout.columns
        )
        first, seen = self.manifest["next_key"], set()
        while chunk := list(islice(documents, CHUNK)):
            keys = np.arange(len(chunk), dtype=np.int64) + self.manifest["next_key"]
            ids = [str(key) if document.id is None else document.id for key, document in zip(keys, chunk, strict=True)]
            known = self.engine.known(ids) if first else set()
            for id_, document in zip(ids, chunk, strict=True):
                if id_ in known or id_ in seen:
                    raise ValueError(f"{document.place}: the id {id_!r} is that of an earlier document.")
                seen.add(id_)
            vectors = embedded(self.encoder, self.plan, chunk)
            named = [Document(row.place, id_, row.text, row.metadata) for id_, row in zip(ids, chunk, strict=True)]
            yield Batch(keys, named, *(coder.pack(vectors) for coder in self.layout.coders.values()))
            self.manifest["next_key"] += len(chunk)
            bar.update(len(chunk))


def embedded(encoder: GridEncoder, plan: Plan, chunk: Sequence[Document]) -> torch.Tensor:
    """Embeddings of documents at their layer, as wide as the plan needs. ValueError if one is not finite."""
    vectors = encoder.encode([document.text for document in chunk], role="document").widest(plan.documents.layer)
    finite = torch.isfinite(vectors).all(dim=1)
    if not finite.all():
        raise ValueError(f"{chunk[int((~finite).nonzero()[0])].place}: the embedding is not finite.")
    return vectors


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


def _write(folder: Path, manifest: Mapping[str, Any]) -> None:
    replace_text(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def _begin(
    folder: Path, before: Mapping[str, Any], settings: Mapping[str, Any], plan: Plan, encoder: GridEncoder,
    corpus: Corpus, model: str | None,
) -> dict[str, Any]:  # fmt: skip
    """The manifest of a new index. Its layout needs the first documents. `before` is that of an interrupted build."""
    others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() and not before else []
    if others and others != [f"{MANIFEST}.draft"]:
        raise ValueError(f"{folder} is not empty and holds no index ({others[0]}): choose another folder.")
    documents = list(islice(corpus.documents(), SAMPLE * CHUNK))
    if not documents:
        raise ValueError(f"There is no document in {', '.join(corpus.files)}.")
    options = {"kind": settings["kind"], "url": settings["url"], "columns": column_types(documents)}
    if settings["url"]:
        name = f"{re.sub(r'[^A-Za-z0-9_-]+', '-', folder.resolve().name)}-{uuid4().hex[:8]}"
        options["collection"] = before["layout"]["collection"] if before else name
    sample = torch.zeros(1, encoder.full_width)
    find_engine(settings["engine"]).require(plan.layout(encoder, sample, **options))
    if plan.needs_sample:
        chunks = (documents[start : start + CHUNK] for start in range(0, len(documents), CHUNK))
        sample = torch.cat([embedded(encoder, plan, chunk) for chunk in chunks])
    columns = {name: getattr(corpus, name) for name in ("text_column", "id_column", "separator")}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        **settings,
        "model": model or unwrap_encoder(encoder.model).config.name_or_path,
        "layout": plan.layout(encoder, sample, **options).to_dict(),
        "corpus": {**columns, "metadata_columns": list(documents[0].metadata)},
        "next_key": 0,
        "finished": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, manifest)
    return manifest
