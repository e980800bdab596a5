"""What an engine does for an index, and the list of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..core.extras import require_extra
from .layout import Layout


# Name of an engine -> module of this folder and class.
ENGINES = {
    "faiss": ("faiss_engine", "FaissEngine"),
    "qdrant": ("qdrant_engine", "QdrantEngine"),
    "lancedb": ("lancedb_engine", "LanceDBEngine"),
    "usearch": ("usearch_engine", "USearchEngine"),
    "sqlite-vec": ("sqlite_vec_engine", "SqliteVecEngine"),
}
# Values of metadata that documents must have: column -> one value, or several of which it must have one.
Where = Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """
    Some documents, with their vectors.

    Args:
        keys (`np.ndarray` of shape `(documents,)`, int64): Numbers that identify the documents in the engine.
        ids (`Sequence[str]`): Ids that the user gave.
        texts (`Sequence[str]`): Texts.
        metadata (`Sequence[dict[str, Any]]`): Values of the metadata columns.
        first (`np.ndarray` of shape `(documents, bytes)`, uint8): Vectors to search, in the layout's first code.
        second (`np.ndarray` of shape `(documents, bytes)`, uint8, *optional*): Vectors in the layout's second code.
    """

    keys: np.ndarray
    ids: Sequence[str]
    texts: Sequence[str]
    metadata: Sequence[dict[str, Any]]
    first: np.ndarray
    second: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)


class Engine(ABC):
    """
    An index in one engine. It knows documents by their keys; [`DocumentStore`] knows their ids.

    Args:
        folder (`Path`): Folder of the index. An engine writes to it, or to its server.
        layout ([`Layout`]): What is stored, and how it is searched.

    Raises:
        ValueError: if the engine is not installed, or does not have the layout. The message names what it has.
    """

    name: ClassVar[str]
    module: ClassVar[str]  # the Python module of the engine
    codes: ClassVar[tuple[str, ...]]  # codes of the searched vectors
    second_codes: ClassVar[tuple[str, ...]]  # codes of the vectors beside them
    kinds: ClassVar[tuple[str, ...]]
    filters: ClassVar[bool]  # whether a search can be limited to documents with certain metadata
    holds_documents: ClassVar[bool]  # whether the engine stores texts and metadata, too
    one_range: ClassVar[bool] = False  # whether `int8` needs one range for all dims: see `fit_coder`

    def __init__(self, folder: Path, layout: Layout):
        self.require(layout)
        self.folder, self.layout = folder, layout

    @classmethod
    def library(cls) -> Any:
        """The module of the engine. ValueError if it is not installed."""
        return require_extra(cls.module, cls.name, f"The engine {cls.name}")

    @classmethod
    def require(cls, layout: Layout) -> None:
        """
        Check that the engine is installed and has a layout.

        Raises:
            ValueError: names what is missing, and the legal values.
        """
        cls.library()
        if layout.first.code not in cls.codes:
            raise ValueError(f"The engine {cls.name} has no {layout.first.code}; it has {', '.join(cls.codes)}.")
        if layout.second is not None and layout.second.code not in cls.second_codes:
            raise ValueError(
                f"The engine {cls.name} cannot score a shortlist by {layout.second.code}; it can by "
                f"{', '.join(cls.second_codes)}."
            )
        if layout.kind not in cls.kinds:
            raise ValueError(f"--kind {layout.kind}: the engine {cls.name} has {', '.join(cls.kinds)}.")
        if layout.url is not None and cls.name != "qdrant":
            raise ValueError(f"--url is for Qdrant; the engine {cls.name} has no server.")

    @abstractmethod
    def write(self, batch: Batch) -> None:
        """Store documents. When it returns, they survive a killed process. Documents whose keys are stored already
        are replaced, so that the same batch can be written again."""

    @abstractmethod
    def finish(self) -> None:
        """Make everything that was written searchable. It can be called again, also after it was interrupted."""

    @abstractmethod
    def delete(self, keys: np.ndarray) -> None:
        """Remove documents; keys that are not stored are left out. When it returns, they are not found any more."""

    @abstractmethod
    def search(
        self, queries: torch.Tensor, k: int, where: Where | None = None, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Find the nearest documents.

        Args:
            queries (`torch.Tensor` of shape `(queries, width)`): Embeddings, as wide as those that were coded; need
                not be normalised.
            k (`int`): Number of documents to find per query.
            where (`dict[str, Any]`, *optional*): Metadata that documents must have, for an engine that holds it.
            allowed (`np.ndarray`, *optional*): Keys of the documents that may be found, for one that does not.

        Returns:
            `tuple[np.ndarray, np.ndarray]`, both of shape `(queries, k)`: scores (float32) and keys (int64), best
            first. Where fewer documents are found, the rest has the score `-inf` and the key -1. The score is the dot
            product of the float query and the decoded document; for bits without a shortlist, it is the cosine of the
            bits as 1 and -1.
        """

    @abstractmethod
    def packed(self, keys: np.ndarray) -> np.ndarray:
        """Stored bytes `(keys, bytes_per_vector)` of the vectors that score a shortlist: the second ones, or else the
        first ones."""

    @abstractmethod
    def disk_bytes(self) -> int:
        """Bytes that the vectors take on the disk, with everything that the engine keeps with them."""

    @abstractmethod
    def example(self) -> str:
        """Lines of Python that search this index without this package. They read `query`, the float32 embedding
        `(width,)` of a query, not normalised, and set `found`: a list of pairs (id, score), best first."""

    def documents(self, keys: np.ndarray) -> dict[int, tuple[str, str | None, dict[str, Any]]]:
        """Key -> id, text and metadata, for an engine that holds documents."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Give back files and connections."""

    def scored_again(self, queries: torch.Tensor, keys: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """
        The second stage: sort a shortlist by the dot product of the float queries and the decoded documents.

        Args:
            queries (`torch.Tensor` of shape `(queries, width)`): Embeddings.
            keys (`np.ndarray` of shape `(queries, shortlist)`): Keys that the first stage found; -1 is none.
            k (`int`): Number of documents to keep.

        Returns:
            `tuple[np.ndarray, np.ndarray]`: as [`~Engine.search`].
        """
        coder = self.layout.second or self.layout.first
        floats = coder.float_queries(queries)
        every, places = np.unique(keys, return_inverse=True)
        vectors = torch.zeros(len(every), floats.shape[1])
        stored = every >= 0
        if stored.any():
            vectors[torch.from_numpy(stored)] = coder.decode(self.packed(every[stored]))
        scores = torch.einsum("qd,qsd->qs", floats, vectors[torch.from_numpy(places.reshape(keys.shape))])
        scores[torch.from_numpy(keys < 0)] = -torch.inf
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
        return scores.gather(1, order).numpy(), np.take_along_axis(keys, order.numpy(), axis=1)


def find_engine(name: str) -> type[Engine]:
    """
    The engine of a name.

    Raises:
        ValueError: if there is none. The message names the legal values.
    """
    if name not in ENGINES:
        raise ValueError(f"--engine {name} is unknown; legal values: {', '.join(ENGINES)}.")
    module, class_name = ENGINES[name]
    return getattr(import_module(f".engines.{module}", __package__), class_name)


def filled(scores: np.ndarray, keys: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Results of a search as arrays of width k: the rest has the score -inf and the key -1."""
    missing = ((0, 0), (0, max(0, k - keys.shape[1])))
    return (
        np.pad(scores[:, :k].astype(np.float32), missing, constant_values=-np.inf),
        np.pad(keys[:, :k].astype(np.int64), missing, constant_values=-1),
    )
