"""The documents to add to an index: numbered, checked and counted before the first one is embedded."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from .corpus import Corpus, Document, column_types


CHUNK = 2048  # documents that are encoded, and then written, together
SAMPLE = 5  # chunks at the beginning that a precision is fitted to


def digest_of(before: str, *values: object) -> str:
    """A digest of some values, and of all those before them."""
    return hashlib.sha256(json.dumps([before, *values], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Rows:
    """Documents to add to an index."""

    corpus: Corpus
    first: int = 0  # key of the first one
    digest: str = ""  # of the documents of the index
    taken: Callable[[Sequence[str]], Set[str]] = lambda ids: set()  # which of some ids the index has
    columns: Mapping[str, str] = field(default_factory=dict)  # types of its metadata

    def chunks(self) -> Iterator[tuple[list[Document], str]]:
        """The documents in chunks, each with the digest of all documents up to its end. A document without an id gets
        its key as one. Raises as [`Corpus.documents`], or a ValueError if an id is taken or there is no document."""
        documents, key, digest, seen = self.corpus.documents(self.columns), self.first, self.digest, set()
        while chunk := list(islice(documents, CHUNK)):
            chunk = [
                replace(row, id=str(number) if row.id is None else row.id) for number, row in enumerate(chunk, key)
            ]
            taken = self.taken([str(row.id) for row in chunk])
            for row in chunk:
                if row.id in seen or row.id in taken:
                    raise ValueError(f"{row.place}: the id {row.id!r} is that of an earlier document.")
                seen.add(row.id)
                digest = digest_of(digest, row.id, row.text, row.metadata)
            key += len(chunk)
            yield chunk, digest
        if not seen:
            raise ValueError(f"There is no document in {', '.join(self.corpus.files)}.")


class Survey(NamedTuple):
    """Number and digest of documents, the first chunks of them, and the types of their metadata."""

    total: int
    digest: str
    sample: list[list[Document]]
    columns: dict[str, str]


def surveyed(rows: Rows) -> Survey:
    """Read and check all documents, before any is embedded. Raises as [`Rows.chunks`]."""
    total, kinds = 0, defaultdict[str, set[type]](set)
    sample: list[list[Document]] = []
    for chunk, digest in rows.chunks():  # noqa: B007  # the last one is of all documents
        total += len(chunk)
        if len(sample) < SAMPLE:
            sample.append(chunk)
        for document in chunk:
            for name, value in document.metadata.items():
                kinds[name].add(type(value))
    return Survey(total, digest, sample, column_types(kinds))
