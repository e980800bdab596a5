"""What a vector store does for an index, and the list of vector stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..core.extras import require_extra
from ..evaluation.coding import Coder
from .layout import Layout
from .store import Store, Where


# Name of an engine -> module of this folder and class.
ENGINES = {
    "faiss": ("faiss_engine", "FaissEngine"),
    "qdrant": ("qdrant_engine", "QdrantEngine"),
    "lancedb": ("lancedb_engine", "LanceDBEngine"),
}
# Engines that search what `m3bert embed` wrote with a few lines of their own.
BY_HAND = ("usearch", "sqlite-vec")


class Engine(ABC):
    """
    An index in one vector store, made of what is in the [`Store`]. It knows documents by their keys.

    Args:
        folder (`Path`): Folder of the index. A vector store writes to it, or to its server.
        layout ([`Layout`]): What is stored, and how it is searched.
        store ([`Store`]): The documents, with their vectors.

    Raises:
        ValueError: if the vector store is not installed, or does not have the layout. The message names what it has.
    """

    name: ClassVar[str]
    module: ClassVar[str]  # the Python module of the engine
    codes: ClassVar[tuple[str, ...]]  # codes of the searched vectors
    second_codes: ClassVar[tuple[str, ...]]  # codes of the vectors beside them
    kinds: ClassVar[tuple[str, ...]]

    def __init__(self, folder: Path, layout: Layout, store: Store):
        self.require(layout)
        self.folder, self.layout, self.store = folder, layout, store

    @classmethod
    def library(cls) -> Any:
        """The module of the vector store. ValueError if it is not installed."""
        return require_extra(cls.module, cls.name, f"The vector store {cls.name}")

    @classmethod
    def require(cls, layout: Layout) -> None:
        """
        Check that the vector store is installed and has a layout.

        Raises:
            ValueError: names what is missing, and the legal values.
        """
        cls.library()
        if layout.first.code not in cls.codes:
            raise ValueError(f"The vector store {cls.name} has no {layout.first.code}; it has {', '.join(cls.codes)}.")
        if layout.second is not None and layout.second.code not in cls.second_codes:
            raise ValueError(
                f"The vector store {cls.name} cannot score a shortlist by {layout.second.code}; it can by "
                f"{', '.join(cls.second_codes)}."
            )
        if layout.kind not in cls.kinds:
            raise ValueError(f"--index_type {layout.kind}: the vector store {cls.name} has {', '.join(cls.kinds)}.")
        if layout.url is not None and cls.name != "qdrant":
            raise ValueError(f"--url is for Qdrant; the vector store {cls.name} has no server.")

    @abstractmethod
    def add(self, keys: np.ndarray) -> None:
        """Make documents of the store searchable: those of the highest keys, in ascending order. When it returns, they
        survive a killed process. After a kill, the same call completes what was begun."""

    @abstractmethod
    def delete(self, keys: np.ndarray) -> None:
        """Remove documents; keys that are not there are left out. The store still has them. When it returns, they are
        not found any more."""

    @abstractmethod
    def search(self, queries: torch.Tensor, k: int, where: Where | None = None) -> tuple[np.ndarray, np.ndarray]:
        """
        Find the `k` nearest documents for embeddings of queries `(queries, width)`, as wide as those that were coded.
        Of the metadata columns `where`, documents must have one of the values.

        Returns:
            `tuple[np.ndarray, np.ndarray]`, both of shape `(queries, k)`: scores (float32) and keys (int64), best
            first. Where fewer documents are found, the rest has the score `-inf` and the key -1. The score is the dot
            product of the float query and the decoded document; for bits without a shortlist, it is the cosine of the
            bits as 1 and -1.
        """

    @abstractmethod
    def example(self) -> list[str]:
        """Lines of Python that search this index without this package, but for their imports. They read `query`, the
        float32 embedding `(width,)` of a query, not normalised, and set `found`: pairs (id, score), best first."""

    @abstractmethod
    def close(self) -> None:
        """Give back files and connections."""

    @property
    def rescorer(self) -> tuple[str, Coder] | None:
        """Name and precision of the vectors that score a shortlist; `None` without one."""
        layout = self.layout
        if layout.shortlist is None:
            return None
        return ("first", layout.first) if layout.second is None else ("second", layout.second)

    def scored_again(
        self, queries: torch.Tensor, keys: np.ndarray, k: int, rescorer: tuple[str, Coder]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The second stage: sort the keys `(queries, shortlist)` of the first, where -1 is none, by the dot product of
        the float queries and the decoded documents. Returns the best `k`, as [`~Engine.search`]."""
        name, coder = rescorer
        floats, none = coder.float_queries(queries), keys < 0
        every, places = np.unique(np.where(none, keys.max(initial=0), keys), return_inverse=True)
        vectors = coder.decode(self.store.vectors(name)[every]) if not none.all() else torch.zeros(1, floats.shape[1])
        scores = torch.einsum("qd,qsd->qs", floats, vectors[torch.from_numpy(places.reshape(keys.shape))])
        scores[torch.from_numpy(none)] = -torch.inf
        order = scores.argsort(dim=1, descending=True, stable=True).numpy()
        return filled(np.take_along_axis(scores.numpy(), order, axis=1), np.take_along_axis(keys, order, axis=1), k)


def find_engine(name: str) -> type[Engine]:
    """The vector store of a name. ValueError if there is none: the message names the legal values."""
    if name in BY_HAND:
        raise ValueError(
            f"--vector_store {name}: m3bert builds no index there; docs/deploy.md, 'Other vector stores', has the few "
            "lines that store and search in it what `m3bert embed` wrote."
        )
    if name not in ENGINES:
        raise ValueError(f"--vector_store {name} is unknown; legal values: {', '.join(ENGINES)}.")
    module, class_name = ENGINES[name]
    return getattr(import_module(f".engines.{module}", __package__), class_name)


def filled(scores: np.ndarray, keys: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Results of a search as arrays of k columns. Where there is no document, the score is -inf and the key -1."""
    missing = ((0, 0), (0, max(0, k - keys.shape[1])))
    keys = np.pad(keys[:, :k].astype(np.int64), missing, constant_values=-1)
    scores = np.pad(scores[:, :k].astype(np.float32), missing)
    return np.where(keys < 0, np.float32(-np.inf), scores), keys
