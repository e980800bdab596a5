"""The interface of vector stores, and their list."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from ..encode.coding import Coder
from ..encode.precisions import bytes_per_vector, precision_of
from ..utils.durable import remove_files
from ..utils.extras import require_extra
from .corpus import Document, Metadata


if TYPE_CHECKING:
    from ..modeling.quantization_m3bert import M3BertQuantizer

# Name of a vector store -> module of the folder `engines`, and class.
ENGINES = {
    "faiss": ("faiss_engine", "FaissEngine"),
    "qdrant": ("qdrant_engine", "QdrantEngine"),
    "lancedb": ("lancedb_engine", "LanceDBEngine"),
}
# Metadata that documents must have: column -> values of its type, of which it must have one.
Where = Mapping[str, Sequence[bool | int | float | str]]


@dataclass(frozen=True)
class Hit:
    """
    A document that was found.

    Args:
        id (`str`): Its id.
        score (`float`): Dot product of the float query and the decoded document; for bits without a shortlist, the
            cosine of the bits as 1 and -1.
        text (`str`): Its text.
        metadata (`dict`): Its metadata.
    """

    id: str
    score: float
    text: str
    metadata: Metadata


@dataclass(frozen=True)
class Committed:
    """The documents that belong to an index during a change: with keys below `end`, and not `removed`."""

    end: int
    removed: Sequence[int]


@dataclass(frozen=True)
class Batch:
    """
    Some documents to store.

    Args:
        keys (`np.ndarray` of shape `(documents,)`): Numbers that identify them in the vector store.
        documents (`Sequence[Document]`): Ids, texts and metadata.
        vectors (`dict[str, np.ndarray]`): `first` and, if the layout has one, `second` -> vectors in this precision,
            uint8 `(documents, bytes)`.
    """

    keys: np.ndarray
    documents: Sequence[Document]
    vectors: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Layout:
    """
    What an index stores per document, and how it is searched.

    Args:
        first ([`Coder`]): Precision of the vectors that are searched.
        second ([`Coder`], *optional*): Precision of the vectors beside them, which rescore the shortlist. `None`: the
            first ones, decoded, rescore a shortlist of bits.
        shortlist (`int`, *optional*): Length of the shortlist. `None`: the first search is the result.
        kind (`str`, *optional*, defaults to `"flat"`): One of `Engine.kinds`. Only `"flat"` is exact.
        url (`str`, *optional*): Address of a Qdrant server.
        collection (`str`, *optional*): Name of the collection on this server.
        columns (`dict[str, str]`, *optional*): Metadata column -> type, as [`~index.corpus.column_types`].
    """

    first: Coder
    second: Coder | None = None
    shortlist: int | None = None
    kind: str = "flat"
    url: str | None = None
    collection: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def coders(self) -> dict[str, Coder]:
        """The precisions of the stored vectors: `first` and, if there is one, `second`."""
        return {"first": self.first} | ({} if self.second is None else {"second": self.second})

    @property
    def rescorer(self) -> str | None:
        """Which vectors score a shortlist: `first` or `second`; `None` without one."""
        return None if self.shortlist is None else list(self.coders)[-1]

    @property
    def bytes_per_document(self) -> int:
        """Bytes of the vectors of a document."""
        return sum(bytes_per_vector(coder.code, coder.dim) for coder in self.coders.values())

    def to_dict(self) -> dict[str, Any]:
        """The layout as JSON can hold it; the quantizer is left out."""
        coders = {
            name: {"code": coder.code, "dim": coder.dim, "ranges": None if (r := coder.ranges) is None else r.tolist()}
            for name, coder in self.coders.items()
        }
        return {"second": None, **vars(self), **coders}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], quantizer: M3BertQuantizer | None = None) -> Layout:
        """The layout that [`~Layout.to_dict`] wrote. Only the quantizer makes and compares learned precisions."""

        def coder(code: str, dim: int, ranges: list[list[float]] | None) -> Coder:
            array = None if ranges is None else np.array(ranges, dtype=np.float32)
            return Coder(code, dim, array, quantizer if precision_of(code).learned else None)

        coders = {name: coder(**content[name]) for name in ("first", "second") if content[name]}
        return cls(**{**content, **coders})


class Engine(ABC):
    """
    An index in one vector store, which holds vectors, ids, texts and metadata.

    Args:
        folder (`Path`): Folder of the index. A vector store writes to it, or to its server.
        layout ([`Layout`]): What is stored, and how it is searched.

    Raises:
        ValueError: if the vector store is not installed, or does not have the layout. The message names what it has.
    """

    name: ClassVar[str]
    module: ClassVar[str]  # the Python module of the engine
    codes: ClassVar[tuple[str, ...]]  # precisions of the searched vectors
    second_codes: ClassVar[tuple[str, ...]]  # precisions of the vectors beside them
    kinds: ClassVar[tuple[str, ...]]  # how vectors are compared: one by one, in clusters (IVF), or as a graph (HNSW)
    has_server: ClassVar[bool] = False
    files: ClassVar[tuple[str, ...]]  # what it writes to the folder

    def __init__(self, folder: Path, layout: Layout):
        self.require(layout)
        self.folder, self.layout = folder, layout

    @classmethod
    def library(cls) -> Any:
        """The module of the vector store. ValueError if it is not installed."""
        return require_extra(cls.module, cls.name, f"The vector store {cls.name}")

    @classmethod
    def require(cls, layout: Layout) -> None:
        """Raise a ValueError, with the legal values, if the vector store is not installed or lacks a layout."""
        cls.library()
        second = None if layout.second is None else layout.second.code
        for what, value, legal in (
            ("precision", layout.first.code, cls.codes),
            ("precision for rescoring", second, (None, *cls.second_codes)),
            ("index type", layout.kind, cls.kinds),
        ):
            if value not in legal:
                known = ", ".join(filter(None, legal))
                raise ValueError(f"The vector store {cls.name} has no {what} {value}; it has {known}.")
        if layout.url is not None and not cls.has_server:
            raise ValueError(f"url={layout.url!r} is for Qdrant; the vector store {cls.name} has no server.")

    @abstractmethod
    def truncate(self, first: int) -> None:
        """Remove the documents with this key and higher ones, as after an interruption. With 0, everything is made
        anew."""

    @abstractmethod
    def add(self, batches: Iterable[Batch]) -> None:
        """Add documents, whose keys are in ascending order and higher than those before. When it returns, they are
        found, and survive a killed process."""

    @abstractmethod
    def delete(self, keys: Sequence[int]) -> None:
        """Remove documents, at least one. Keys that are not there are ignored."""

    @abstractmethod
    def keys_of(self, ids: Sequence[str]) -> dict[str, int]:
        """Id -> key, of those ids, at least one, that documents have."""

    @abstractmethod
    def count(self, committed: Committed | None = None) -> int:
        """Number of documents."""

    @abstractmethod
    def search(
        self, queries: torch.Tensor, k: int, where: Where | None = None, committed: Committed | None = None
    ) -> list[list[Hit]]:
        """The up to `k` nearest documents per query, best first, for embeddings of queries `(queries, width)`. Of the
        metadata columns `where`, documents must have one of the values. With `committed`, no others are found."""

    @abstractmethod
    def close(self) -> None:
        """Give back files and connections."""

    def destroy(self) -> None:
        """Remove everything, also the folder if nothing else is in it."""
        self.close()
        remove_files(self.folder, self.files)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


def find_engine(name: str) -> type[Engine]:
    """The vector store of a name. ValueError if there is none: the message names the legal values."""
    if name not in ENGINES:
        raise ValueError(f"The vector store {name!r} is unknown; legal values: {', '.join(ENGINES)}.")
    module, class_name = ENGINES[name]
    return getattr(import_module(f".engines.{module}", __package__), class_name)


def rescored(coder: Coder, query: torch.Tensor, packed: np.ndarray) -> np.ndarray:
    """The second stage of a query `(width,)`: dot products with stored vectors `(shortlist, bytes)`, decoded."""
    return (coder.decode(packed) @ coder.float_queries(query[None])[0]).numpy()
