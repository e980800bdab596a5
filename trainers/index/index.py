"""An index of documents in one vector store: build it, add to it, delete from it, and search it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..core.durable import only_writer
from ..evaluation.encoding import GridEncoder
from ..evaluation.hybrid import CANDIDATES, Ranking, fused_by_scores
from .corpus import Corpus, Document, chunks, digest_of, is_of_type, require_types
from .engine import Engine, find_engine
from .layout import Layout
from .manifest import CHUNK, MANIFEST, begin, embedded, read_manifest
from .plan import Plan, encoder_identity, require_same_encoder
from .store import Batch, Store, Where


# How far a corpus was read: key of its first document, number of rows, and their digest.
NOTHING_READ = '{"first": 0, "rows": 0, "digest": ""}'


@dataclass(frozen=True)
class Hit:
    """
    A document that was found.

    Args:
        id (`str`): Its id.
        score (`float`): Its score: the cosine with the query, or what its precision makes of it.
        text (`str`, *optional*): Its text.
        metadata (`dict[str, Any]`): Its metadata.
    """

    id: str
    score: float
    text: str | None
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Target:
    """
    Where an index is built.

    Args:
        folder (`Path`): Folder of the index.
        engine (`str`): One of [`~index.engine.ENGINES`].
        kind (`str`, *optional*): One of [`~index.layout.KINDS`]. Default: the first one that the vector store has.
        url (`str`, *optional*): Address of the server, for a vector store that is one.
        words (`bool`, *optional*, defaults to `False`): Whether to index the words of documents, for hybrid search.
    """

    folder: Path
    engine: str
    kind: str | None = None
    url: str | None = None
    words: bool = False


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

    def __init__(self, folder: Path, manifest: Mapping[str, Any], encoder: GridEncoder | None = None):
        self.folder, self.manifest, self.encoder = folder, manifest, encoder
        self.plan = Plan.from_dict(manifest["plan"])
        self.layout = Layout.from_dict(manifest["layout"], encoder.quantizer if encoder is not None else None)
        self.store = Store(folder, self.layout)
        try:
            self.engine: Engine = find_engine(manifest["engine"])(folder, self.layout, self.store)
        except BaseException:
            self.store.close()
            raise

    @classmethod
    def build(
        cls, target: Target, plan: Plan, encoder: GridEncoder, corpus: Corpus, *, model: str | None = None,
        verbose: bool = False
    ) -> Index:  # fmt: skip
        """
        Embed the documents of a corpus, and build the index from their vectors. The same call continues an interrupted
        build: what was embedded is in the folder, and no text is embedded twice.

        Args:
            target ([`Target`]): Folder and vector store.
            plan ([`Plan`]): What to store, and how to search.
            encoder ([`GridEncoder`]): Encoder with the grid of the plan.
            corpus ([`Corpus`]): Documents.
            model (`str`, *optional*): Hub id or folder of the encoder, for those who search. Default: where it was
                loaded from.
            verbose (`bool`, *optional*, defaults to `False`): Whether to show progress.

        Returns:
            [`Index`]: the finished index.

        Raises:
            OSError: if a file cannot be read or written.
            ValueError: if the encoder is not that of the plan, the vector store does not have its precisions, a
                document has no text or its id is not new, the folder holds another index or other files, or the rows
                that an interrupted build read have changed. New rows after them are indexed, too. Also if another
                process writes to the folder.
        """
        identity = encoder_identity(encoder)
        require_same_encoder(plan.encoder, identity, "The plan")
        file = target.folder / MANIFEST
        settings = {
            "engine": target.engine,
            "plan": json.loads(json.dumps(plan.to_dict())),
            "encoder": identity,
            "kind": target.kind or find_engine(target.engine).kinds[0],
            "url": target.url,
        }
        with only_writer(target.folder):
            if not file.is_file():
                begin(target.folder, settings, plan, encoder, corpus, model)
            manifest = read_manifest(target.folder)
            for name, value in settings.items():
                if manifest[name] != value:
                    raise ValueError(
                        f"{target.folder} holds an index with another {name}; choose another --output_dir, or delete "
                        "it."
                    )
            index = cls(target.folder, manifest, encoder)
            try:
                if target.words and index.store.words is None and not index.store.next_key:
                    index.store.index_words()
                if target.words != (index.store.words is not None):
                    raise ValueError(f"{target.folder} holds an index {'without' if target.words else 'with'} words.")
                if index.pending is not None:
                    index._read(corpus, verbose)
            except BaseException:
                index.close()
                raise
            return index

    @classmethod
    def open(cls, folder: Path, encoder: GridEncoder | None = None) -> Index:
        """
        Open a finished index.

        Args:
            folder (`Path`): Folder of the index.
            encoder ([`GridEncoder`], *optional*): Encoder of queries, and of new documents.

        Raises:
            ValueError: if the folder holds no index, the index is not finished, or it was built with another model.
        """
        manifest = read_manifest(folder)
        if encoder is not None:
            require_same_encoder(manifest["encoder"], encoder_identity(encoder), f"The index {folder}")
        return cls(folder, manifest, encoder)

    @property
    def pending(self) -> dict[str, Any] | None:
        """How many rows of a corpus were read, and their digest; `None` if no corpus is being read."""
        return json.loads(self.store.state("pending") or NOTHING_READ)

    def __len__(self) -> int:
        return len(self.store)

    def close(self) -> None:
        """Give back files and connections."""
        self.engine.close()
        self.store.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, corpus: Corpus, *, verbose: bool = False) -> int:
        """
        Add documents, whose ids must be new. If it was interrupted, the same call continues it.

        Returns:
            `int`: number of documents that were added by this call.

        Raises:
            OSError: if a file cannot be read or written.
            ValueError: as [`Index.build`].
        """
        with only_writer(self.folder):
            before = len(self)
            self._read(corpus, verbose)
            return len(self) - before

    def delete(self, ids: Sequence[str]) -> None:
        """
        Delete documents by their ids.

        Raises:
            ValueError: if an id is not in the index, the index is not finished, or another process writes to it.
                Nothing is deleted then.
        """
        with only_writer(self.folder):
            self._require_finished()
            keys = self.store.keys_of(ids)
            if missing := [id_ for id_ in ids if id_ not in keys]:
                raise ValueError(f"{self.folder} has no document {missing[0]!r}.")
            numbers = np.array(sorted(keys.values()), dtype=np.int64)
            self.engine.delete(numbers)
            self.store.delete(numbers)

    def search(
        self, queries: Sequence[str], k: int = 10, where: Mapping[str, Any] | None = None, *, hybrid: bool = False
    ) -> list[list[Hit]]:
        """
        Find documents.

        Args:
            queries (`Sequence[str]`): Texts.
            k (`int`, *optional*, defaults to 10): Number of documents to find per query.
            where (`dict[str, Any]`, *optional*): Metadata that documents must have: column -> a value, or a list of
                values of which they must have one.
            hybrid (`bool`, *optional*, defaults to `False`): Whether to search by words (BM25), too, and to fuse the
                scores of both ([`fuse_scores`]). The index needs words.

        Returns:
            `list[list[Hit]]`: documents per query, best first.

        Raises:
            ValueError: if the index has no encoder, is not finished or lacks words that are needed, or a column is
                unknown.
        """
        if hybrid and self.store.words is None:
            raise ValueError(f"{self.folder} has no words to search by: build it with --hybrid.")
        if self.encoder is None:
            raise ValueError("Searching needs an encoder: open the index with one.")
        embeddings = self.encoder.encode(list(queries), role="query").require_finite()
        vectors = embeddings.widest(self.plan.query.layer)
        if not hybrid:
            return self.search_vectors(vectors, k, where)
        depth = max(k, CANDIDATES)
        near = self.search_vectors(vectors, depth, where)
        allowed = self._allowed(where)
        return [self._fused(query, hits, allowed, k) for query, hits in zip(queries, near, strict=True)]

    def _allowed(self, where: Mapping[str, Any] | None) -> set[int] | None:
        """Keys of the documents with this metadata; `None` if all have it."""
        filters = self._filters(where or {})
        return {*self.store.keys_where(filters).tolist()} if filters else None

    def _fused(self, query: str, near: list[Hit], allowed: set[int] | None, k: int) -> list[Hit]:
        """The documents near a query and those with its words, by the sum of their standardised scores."""
        assert self.store.words is not None
        found = self.store.words.search(query, CANDIDATES if allowed is None else len(self))
        found = [(key, score) for key, score in found if allowed is None or key in allowed][:CANDIDATES]
        if not found or not near:
            return near[:k]
        keys = self.store.keys_of([hit.id for hit in near])
        by_vectors = Ranking(np.array([[hit.score for hit in near]]), np.array([[keys[hit.id] for hit in near]]))
        by_words = Ranking(np.array([[score for _, score in found]]), np.array([[key for key, _ in found]]))
        fused = fused_by_scores(by_vectors, by_words, k)
        documents = self.store.documents(fused.rows[0])
        return [
            Hit(documents[key][0], score, *documents[key][1:])
            for score, key in zip(fused.scores[0].tolist(), fused.rows[0].tolist(), strict=True)
        ]

    def search_vectors(
        self, queries: torch.Tensor, k: int = 10, where: Mapping[str, Any] | None = None
    ) -> list[list[Hit]]:
        """
        [`Index.search`] by embeddings of queries `(queries, width)` at their layer; at all dims if the index has a
        learned precision.
        """
        self._require_finished()
        if k < 1:
            raise ValueError(f"k={k} must be 1 or more.")
        filters = self._filters(where or {})
        if not all(filters.values()):  # a column of which no value passes
            return [[] for _ in queries]
        scores, keys = self.engine.search(queries, k, filters)
        documents = self.store.documents(np.unique(keys[keys >= 0]))
        return [
            [Hit(documents[key][0], score, *documents[key][1:]) for score, key in zip(*row, strict=True) if key >= 0]
            for row in zip(scores.tolist(), keys.tolist(), strict=True)
        ]

    def _filters(self, where: Mapping[str, Any]) -> Where:
        """The values of filters as lists, checked."""
        legal = {name: kind for name, kind in self.layout.columns.items() if kind != "json"}
        filters = {}
        for name, wanted in where.items():
            if name not in legal:
                raise ValueError(f"Cannot filter by {name!r}; columns of the index: {', '.join(legal) or 'none'}.")
            filters[name] = list(wanted) if isinstance(wanted, list | tuple) else [wanted]
            for value in filters[name]:
                if not is_of_type(value, legal[name]):
                    raise ValueError(f"Cannot filter by {name}={value!r}: the column has the type {legal[name]}.")
        return filters

    def _require_finished(self) -> None:
        if self.pending is not None:
            raise ValueError(f"The index {self.folder} is not finished: run the command that was interrupted again.")

    def _read(self, corpus: Corpus, verbose: bool) -> None:
        """Embed the rows of a corpus that were not embedded yet, then make all of them searchable."""
        if self.encoder is None:
            raise ValueError("Adding documents needs an encoder: open the index with one.")
        pending = self.pending or {"first": self.store.next_key, "rows": 0, "digest": ""}
        documents, rows, digest = corpus.documents(), pending["rows"], ""
        for document in islice(documents, rows):
            digest = digest_of(digest, document)
        if digest != pending["digest"]:
            raise ValueError(
                f"{self.folder} is half built, and the first {rows:,} rows of {', '.join(corpus.files)} are not those "
                "that it was built from. Pass the same files in the same order, or delete the index and start again."
            )
        with tqdm(desc="Indexing", unit=" documents", initial=rows, disable=not verbose, leave=False) as bar:
            for chunk in chunks(documents, CHUNK):
                batch = self._batch(chunk)
                digest = reduce(digest_of, chunk, digest)
                rows += len(chunk)
                self.store.add(batch, {"pending": json.dumps({**pending, "rows": rows, "digest": digest})})
                bar.update(len(chunk))
        if not rows:
            raise ValueError(f"There is no document in {', '.join(corpus.files)}.")
        self.engine.add(self.store.keys(pending["first"]))
        self.store.set_state(pending="null")

    def _batch(self, chunk: Sequence[Document]) -> Batch:
        """Embed some documents. They are checked before."""
        assert self.encoder is not None
        first = self.store.next_key
        ids = [str(first + row) if document.id is None else document.id for row, document in enumerate(chunk)]
        taken = set(self.store.keys_of(ids))
        for id_, document in zip(ids, chunk, strict=True):
            if id_ in taken:
                raise ValueError(f"{document.place}: the id {id_!r} is that of an earlier document.")
            taken.add(id_)
            require_types(document, self.layout.columns)
        vectors = embedded(self.encoder, self.plan, chunk)
        return Batch(
            np.arange(first, first + len(chunk), dtype=np.int64),
            ids,
            [document.text for document in chunk],
            [document.metadata for document in chunk],
            self.layout.first.pack(vectors),
            None if self.layout.second is None else self.layout.second.pack(vectors),
        )
