"""
An index of documents in one vector store: build it, add to it, delete from it, and search it.

The file `index.json` of its folder says how it was built, and which documents belong to it: those whose key is below
`next_key`, except those `removed`. A change writes to the vector store first, where searches do not see it, and takes
place when `index.json` is replaced. What a killed process left behind is removed by the next change.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from tqdm.auto import tqdm

from ..encode.encoder import GridEncoder
from ..encode.states import unwrap_encoder
from ..utils.durable import only_writer, replace_text
from ..utils.typed import read_json
from .corpus import Corpus, Document, is_of_type
from .engine import Batch, Committed, Engine, Hit, Layout, find_engine
from .plan import Plan, encoder_identity, require_same_encoder
from .rows import Rows, Survey, digest_of, surveyed


SCHEMA_VERSION = 4
# Version 2 kept the progress of an index in `documents.sqlite`.
OLDER_VERSIONS = (2, 3)
Manifest = dict[str, Any]  # content of the file
MANIFEST = "index.json"
CORPUS = ("text_column", "id_column", "separator", "metadata_columns")  # how documents are read, also additions
UNFINISHED = {  # of an index that is being built: what says after a killed process which documents belong to it
    "data": "",  # folder of the vector store; empty: the folder of the index
    "next_key": 0,  # documents with lower keys belong to the index; 0: it was never built to the end
    "documents": "",  # digest of the documents
    "finished": False,  # whether no change is in progress
    "removed": [],  # keys that the change in progress removes
    "replaced": None,  # vector store that the change in progress replaces
}


class Index:
    """
    An index in a folder. Made by [`Index.build`] or [`Index.open`].

    Args:
        folder (`Path`): The folder.
        manifest (`dict`): Content of its `index.json`.
        encoder ([`GridEncoder`], *optional*): Encoder of queries and new documents. Deleting needs none.

    ```python
    >>> index = Index.open(Path("runs/index"), encoder)  # doctest: +SKIP
    >>> index.search(["How do I remove a folder?"], 3)[0][0].id  # doctest: +SKIP
    'shutil.rmtree'
    ```
    """

    def __init__(self, folder: Path, manifest: Manifest, encoder: GridEncoder | None = None):
        self.folder, self.manifest, self.encoder = folder, manifest, encoder
        self.plan = Plan.from_dict(manifest["plan"])
        self.layout = Layout.from_dict(manifest["layout"], encoder.quantizer if encoder is not None else None)
        self.engine: Engine = find_engine(manifest["engine"])(folder / manifest["data"], self.layout)

    @classmethod
    def build(
        cls,
        folder: Path,
        engine: str,
        plan: Plan,
        encoder: GridEncoder,
        corpus: Corpus,
        *,
        kind: str | None = None,
        url: str | None = None,
        model: str | None = None,
        overwrite: bool = False,
        verbose: bool = False,
    ) -> Index:
        """
        Embed the documents of a corpus, and build the index from their vectors. If the folder has this index of these
        documents already, it is opened; an interrupted build starts again.

        Args:
            folder (`Path`): Folder of the index.
            engine (`str`): Vector store: one of [`~index.engine.ENGINES`].
            plan ([`Plan`]): What to store, and how to search.
            encoder ([`GridEncoder`]): Encoder with the grid of the plan.
            corpus ([`Corpus`]): Documents. They are read twice: all are checked before the first one is embedded.
            kind (`str`, *optional*): `"flat"`, `"ivf"` or `"hnsw"`. Default: the first of the store.
            url (`str`, *optional*): Address of a Qdrant server.
            model (`str`, *optional*): Hub id or folder of the encoder to record. Default: where it was loaded from.
            overwrite (`bool`, *optional*, defaults to `False`): Whether to replace the index of the folder. It is
                searched until the new one is finished.
            verbose (`bool`, *optional*, defaults to `False`): Whether to show progress.

        Raises:
            OSError: if a file cannot be read or written.
            ValueError: if the plan is of another encoder, the vector store lacks its precisions, a document has no
                text or its id is not new, the folder holds another index or other files, or is being written.
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
            before = _manifest_before(folder, settings, overwrite)
            rows = Rows(corpus.with_columns())
            survey = surveyed(rows)
            if before and before["next_key"] and not overwrite:
                if before["documents"] != survey.digest:
                    raise ValueError(f"{folder} holds an index of other documents: add to it, or overwrite it.")
                return cls(folder, before, encoder)
            layout = _layout(settings, plan, encoder, survey, None if overwrite else before, folder)
            source = model or unwrap_encoder(encoder.model).config.name_or_path
            reading = {name: getattr(rows.corpus, name) for name in CORPUS}
            manifest = {**settings, "model": source, "layout": layout.to_dict(), "corpus": reading, **UNFINISHED}
            return cls._started(folder, manifest, before, encoder, overwrite)._filled(rows, survey, verbose)

    def _filled(self, rows: Rows, survey: Survey, verbose: bool) -> Index:
        """The index with its first documents. It is closed if that fails."""
        try:
            self.engine.truncate(0)
            self._add(rows, survey, verbose)
        except BaseException:
            self.close()
            raise
        return self

    @classmethod
    def _started(
        cls, folder: Path, manifest: Manifest, before: Manifest, encoder: GridEncoder, overwrite: bool
    ) -> Index:
        """A new index without documents, in a place of its vector store that no finished index uses."""
        if before and overwrite:
            manifest |= {"data": f"build-{uuid4().hex[:8]}", "replaced": _place(before)}
            with cls(folder, before) as index:
                index._undo_interrupted()
                index._update_manifest(finished=False, replaced=_place(manifest))
        elif before:  # an interrupted build
            manifest |= {"data": before["data"], "replaced": before["replaced"]}
        (folder / manifest["data"]).mkdir(parents=True, exist_ok=True)
        if not before or not overwrite:
            _write(folder, manifest)
        return cls(folder, manifest, encoder)

    @classmethod
    def open(cls, folder: Path, encoder: GridEncoder | None = None) -> Index:
        """Open the index of a folder. ValueError if there is no index, or it was built with another model."""
        manifest = read_manifest(folder)
        if encoder is not None:
            require_same_encoder(manifest["encoder"], encoder_identity(encoder), f"The index {folder}")
        return cls(folder, manifest, encoder)

    def __len__(self) -> int:
        return self.engine.count(self._committed())

    def close(self) -> None:
        """Give back files and connections."""
        self.engine.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def change(self, delete: Sequence[str] = (), add: Corpus | None = None, *, verbose: bool = False) -> int:
        """
        Delete documents by their ids, and add others, whose ids must be new or among the deleted ones: both or
        neither. Everything is checked first. Until the end, and if the change is refused or killed, searches find the
        documents from before. Returns the number of added documents.

        Raises:
            OSError: if a file cannot be read or written.
            ValueError: if an id is not in the index, a document has no text, a taken id or metadata of other types,
                the index is not finished, or another process writes to it.
        """
        with only_writer(self.folder):
            self.manifest = self._built_manifest()
            self._undo_interrupted()
            keys = self.engine.keys_of(delete) if delete else {}
            if missing := [id_ for id_ in delete if id_ not in keys]:
                raise ValueError(f"{self.folder} has no document {missing[0]!r}.")
            documents, removed = self.manifest["documents"], sorted(keys.values())
            if removed:
                documents = digest_of(documents, removed)
            if add is None:
                self._commit(documents=documents, removed=removed)
                return 0

            def taken(ids: Sequence[str]) -> Set[str]:
                return self.engine.keys_of(ids).keys() - keys.keys()

            corpus = replace(add, metadata_columns=self.manifest["corpus"]["metadata_columns"])
            rows = Rows(corpus, self.manifest["next_key"], documents, taken, self.layout.columns)
            survey = surveyed(rows)
            self._update_manifest(finished=False)
            self._add(rows, survey, verbose, removed=removed)
            return survey.total

    def add(self, corpus: Corpus, *, verbose: bool = False) -> int:
        """Add documents, whose ids must be new: see [`Index.change`]."""
        return self.change(add=corpus, verbose=verbose)

    def delete(self, ids: Sequence[str]) -> None:
        """Delete documents by their ids: see [`Index.change`]."""
        self.change(ids)

    def search(
        self, queries: Sequence[str], k: int = 10, where: Mapping[str, object] | None = None
    ) -> list[list[Hit]]:
        """
        Find documents.

        Args:
            queries (`Sequence[str]`): Texts.
            k (`int`, *optional*, defaults to 10): Number of documents to find per query.
            where (`dict`, *optional*): Metadata that documents must have: column -> a value, or a list of values.

        Returns:
            `list[list[Hit]]`: documents per query, best first.

        Raises:
            ValueError: if the index is not finished or has no encoder, `k` is below 1, `queries` is a single text, or
                a column is unknown or of another type.
        """
        if k < 1:
            raise ValueError(f"k={k} must be at least 1.")
        if isinstance(queries, str):
            raise ValueError("queries must be a list of texts, and is a single one: pass [query].")
        encoder, committed = self._encoder(), self._committed()
        filters: dict[str, Any] = {}
        for name, values in (where or {}).items():
            filters[name] = values if isinstance(values, list | tuple) else [values]
            kind = self.layout.columns.get(name, "json")
            if kind == "json" or not all(is_of_type(value, kind) for value in filters[name]):
                raise ValueError(f"Cannot filter by {name}={values!r}; columns: {dict(self.layout.columns)}.")
        if not all(filters.values()):  # a column of which no value passes
            return [[] for _ in queries]
        embeddings = encoder.encode(list(queries), role="query").require_finite()
        return self.engine.search(embeddings.widest(self.plan.query.layer), k, filters, committed)

    def _encoder(self) -> GridEncoder:
        """The encoder. ValueError if the index was opened without one."""
        if self.encoder is None:
            raise ValueError(f"The index {self.folder} was opened without an encoder: Index.open(folder, encoder).")
        return self.encoder

    def _built_manifest(self) -> Manifest:
        """The manifest, which another process may have changed. ValueError if its index cannot be used here."""
        manifest = read_manifest(self.folder)
        if not manifest["next_key"]:
            raise ValueError(f"The index {self.folder} is not finished: run the command that was interrupted again.")
        if manifest["data"] != self.manifest["data"]:
            raise ValueError(f"The index {self.folder} was replaced: open it again.")
        return manifest

    def _committed(self) -> Committed | None:
        """Which documents belong to the index while it is being changed, or after a change that was interrupted."""
        manifest = self._built_manifest()
        return None if manifest["finished"] else Committed(manifest["next_key"], manifest["removed"])

    def _commit(self, **changes: object) -> None:
        """Let a change take place, and remove what does not belong to the index any more."""
        self._update_manifest(finished=False, **changes)
        if removed := self.manifest["removed"]:
            self.engine.delete(removed)
        if place := self.manifest["replaced"]:
            folder = self.folder / place["data"]
            if folder.is_dir():
                find_engine(place["engine"])(folder, Layout.from_dict(place["layout"])).destroy()
        self._update_manifest(finished=True, removed=[], replaced=None)

    def _undo_interrupted(self) -> None:
        """Remove what an interrupted change has left behind."""
        if not self.manifest["finished"]:
            self.engine.truncate(self.manifest["next_key"])
            self._commit()

    def _update_manifest(self, **changes: object) -> None:
        self.manifest |= changes
        _write(self.folder, self.manifest)

    def _add(self, rows: Rows, survey: Survey, verbose: bool, **changes: object) -> None:
        """Append documents, and let them and other changes take place."""
        with tqdm(desc="Indexing", total=survey.total, disable=not verbose, leave=False) as bar:
            self.engine.add(self._batches(rows, survey, bar))
        self._commit(next_key=rows.first + survey.total, documents=survey.digest, **changes)

    def _batches(self, rows: Rows, survey: Survey, bar: tqdm) -> Iterator[Batch]:
        """The documents in chunks, with their vectors."""
        encoder, key = self._encoder(), rows.first
        for chunk, digest in rows.chunks():  # noqa: B007  # the last one is of all documents
            vectors = embedded(encoder, self.plan, chunk)
            keys = np.arange(len(chunk), dtype=np.int64) + key
            yield Batch(keys, chunk, {name: coder.pack(vectors) for name, coder in self.layout.coders.items()})
            key += len(chunk)
            bar.update(len(chunk))
        if digest != survey.digest:
            raise ValueError(f"{', '.join(rows.corpus.files)} changed while they were read: run the command again.")


def embedded(encoder: GridEncoder, plan: Plan, chunk: Sequence[Document]) -> torch.Tensor:
    """Embeddings of documents at their layer, as wide as the plan needs. ValueError if one is not finite."""
    vectors = encoder.encode([document.text for document in chunk], role="document").widest(plan.documents.layer)
    finite = torch.isfinite(vectors).all(dim=1)
    if not finite.all():
        raise ValueError(f"{chunk[int((~finite).nonzero()[0])].place}: the embedding is not finite.")
    return vectors


def read_manifest(folder: Path) -> Manifest:
    """The content of `index.json`. ValueError if the folder holds no index, or one of another version."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} holds no index: it has no {MANIFEST}.")
    manifest = read_json(folder / MANIFEST)
    if manifest.get("schema_version") not in (SCHEMA_VERSION, *OLDER_VERSIONS):
        raise ValueError(f"{folder / MANIFEST} is of another version of m3bert: build the index again.")
    if "finished" not in manifest:
        with closing(sqlite3.connect(folder / "documents.sqlite")) as database:
            state = dict(database.execute("SELECT name, value FROM state"))
        pending = json.loads(state.get("pending", '{"first": 0}'))  # where an interrupted addition began
        manifest |= {"next_key": pending["first"] if pending else int(state["next_key"]), "finished": not pending}
        manifest["layout"]["collection"] = state.get("collection")
    # Older versions do not say which documents they hold.
    return {"documents": "unknown", "data": "", "removed": [], "replaced": None} | manifest


def _write(folder: Path, manifest: Manifest) -> None:
    content = {**manifest, "schema_version": SCHEMA_VERSION}
    replace_text(folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _place(manifest: Manifest) -> Manifest:
    """Where the vector store of an index is."""
    return {name: manifest[name] for name in ("engine", "layout", "data")}


def _manifest_before(folder: Path, settings: Manifest, overwrite: bool) -> Manifest:
    """The manifest of a folder, empty if there is none. ValueError unless it is the one to build, or is
    overwritten."""
    if (folder / MANIFEST).is_file():
        before = read_manifest(folder)
        if not overwrite:
            require_same_encoder(before["encoder"], settings["encoder"], f"The index {folder}")
            for name in settings.keys() - {"encoder"}:
                if before.get(name) != settings[name]:
                    raise ValueError(
                        f"{folder} holds an index with another {name}: choose another folder, or overwrite it."
                    )
        return before
    others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if others and others != [f"{MANIFEST}.draft"]:
        raise ValueError(f"{folder} is not empty and holds no index ({others[0]}): choose another folder.")
    return {}


def _layout(
    settings: Manifest, plan: Plan, encoder: GridEncoder, survey: Survey, before: Manifest | None, folder: Path
) -> Layout:
    """The layout of a new index, in the collection of the one `before`. ValueError if the vector store lacks it."""
    collection = before["layout"]["collection"] if before else None
    if not before and settings["url"]:
        collection = f"{re.sub(r'[^A-Za-z0-9_-]+', '-', folder.resolve().name)}-{uuid4().hex[:8]}"
    options = {"kind": settings["kind"], "url": settings["url"], "columns": survey.columns, "collection": collection}
    sample = torch.zeros(1, encoder.full_width)
    find_engine(settings["engine"]).require(plan.layout(encoder, sample, **options))
    if plan.needs_sample:
        sample = torch.cat([embedded(encoder, plan, chunk) for chunk in survey.sample])
    return plan.layout(encoder, sample, **options)
