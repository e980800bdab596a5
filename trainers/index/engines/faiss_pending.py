"""Documents that were written, and are not in an index of faiss yet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree

import numpy as np

from ..engine import Batch
from .durable import replacing, sync_folder, writing


DROPPED = -1  # the key of a document that was deleted before it came into the index


class Pending:
    """
    Documents that wait for [`FaissEngine.finish`]: a file of their keys, and one for the bytes of each vector. Files
    only grow. Keys are written last, so that a document counts once all of it is on the disk.

    Args:
        folder (`Path`): Folder of the files. It exists only while there are such documents.
        sizes (`dict[str, int]`): Name of a vector, `"first"` or `"second"` -> its bytes per document.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int]):
        self.folder, self.sizes = folder, sizes

    def __len__(self) -> int:
        file = self.folder / "keys"
        return file.stat().st_size // 8 if file.is_file() else 0

    @property
    def keys(self) -> np.ndarray:
        """Keys in the order of writing. One that was written again is there twice, and the last one counts."""
        count = len(self)
        return np.fromfile(self.folder / "keys", dtype=np.int64, count=count) if count else np.empty(0, np.int64)

    def vectors(self, name: str) -> np.ndarray:
        """Bytes `(documents, bytes)` in the order of `keys`, memory-mapped."""
        return mapped(self.folder / name, len(self), self.sizes[name])

    def append(self, batch: Batch) -> None:
        """Store documents. They survive a killed process once this returns."""
        with writing(self.folder.parent):
            self.folder.mkdir(exist_ok=True)
            count = len(self)
            for name, size in self.sizes.items():
                _append(self.folder / name, count * size, batch.first if name == "first" else batch.second)
            sync_folder(self.folder)
            _append(self.folder / "keys", count * 8, batch.keys.astype(np.int64))
            sync_folder(self.folder)
            sync_folder(self.folder.parent)

    def drop(self, keys: np.ndarray) -> None:
        """Leave documents out."""
        own = self.keys
        dropped = np.isin(own, keys)
        if dropped.any():
            with writing(self.folder.parent), replacing(self.folder / "keys") as draft:
                draft.write_bytes(np.where(dropped, DROPPED, own).tobytes())

    def clear(self) -> None:
        """Remove all documents. They are gone with their keys, which are removed first."""
        (self.folder / "keys").unlink(missing_ok=True)
        if self.folder.is_dir():
            sync_folder(self.folder)
            rmtree(self.folder)


def mapped(file: Path, count: int, size: int) -> np.ndarray:
    """A file as an array `(count, size)` of bytes, memory-mapped."""
    if not count:  # an empty file cannot be mapped
        return np.empty((0, size), dtype=np.uint8)
    return np.memmap(file, np.uint8, "r", shape=(count, size))


def _append(file: Path, end: int, rows: np.ndarray | None) -> None:
    """Write rows at an offset. What a killed process left after it is removed."""
    assert rows is not None  # a batch has the vectors of its layout
    with os.fdopen(os.open(file, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as opened:
        opened.truncate(end)
        opened.seek(end)
        opened.write(np.ascontiguousarray(rows).data)
        opened.flush()
        os.fsync(opened.fileno())
