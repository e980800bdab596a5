"""Vectors with keys in `.npy` files that grow, and that NumPy maps into memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import IO

import numpy as np

from .durable import replacing, sync_folder


KEYS = "keys"
AT_ONCE = 16384  # rows that are copied together


class Rows:
    """
    Vectors with keys: the files `keys.npy` and one `.npy` per kind of vector, with the same order of rows. The number
    of rows is that of `keys.npy`, which is written last. So half a batch of a killed process does not count.

    Args:
        folder (`Path`): Folder of the files; it is made with the first rows.
        columns (`dict[str, tuple[str, int]]`): Name of a file -> type of its numbers, and numbers per vector.
    """

    def __init__(self, folder: Path, columns: Mapping[str, tuple[str, int]]):
        self.folder, self.columns = folder, columns
        self._install()

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    @property
    def keys(self) -> np.ndarray:
        """Keys in ascending order, memory-mapped."""
        file = self.file(KEYS)
        return np.load(file, mmap_mode="r") if file.is_file() else np.empty(0, np.int64)

    def vectors(self, name: str) -> np.ndarray:
        """Vectors `(rows, numbers)` in the order of the keys, memory-mapped."""
        count = len(self.keys)
        if not count:
            kind, width = self.columns[name]
            return np.empty((0, width), kind)
        return np.load(self.file(name), mmap_mode="r")[:count]

    def places(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of keys, and whether the keys are stored at all; other rows mean nothing."""
        stored = self.keys
        places = np.searchsorted(stored, keys)
        known = places < len(stored)
        known[known] = stored[places[known]] == keys[known]
        return places, known

    def write(self, keys: np.ndarray, vectors: Mapping[str, np.ndarray]) -> None:
        """
        Store vectors. They survive a killed process once this returns. Stored keys get the new vectors.

        Args:
            keys (`np.ndarray` of shape `(vectors,)`): Keys, ascending. New ones are above the stored ones.
            vectors (`dict[str, np.ndarray]`): Name of a file -> vectors.
        """
        places, known = self.places(keys)
        before = len(self.keys)
        places[~known] = before + np.arange((~known).sum())
        self.folder.mkdir(exist_ok=True)
        for name, rows in (*vectors.items(), (KEYS, keys.astype(np.int64))):
            if not self.file(name).is_file():
                with replacing(self.file(name)) as draft, draft.open("wb") as file:
                    np.save(file, rows[:0])
            _put(self.file(name), places, rows, before + int((~known).sum()))
        sync_folder(self.folder)
        sync_folder(self.folder.parent)

    def delete(self, keys: np.ndarray) -> None:
        """Remove rows, by writing all others anew, from file to file."""
        places, known = self.places(keys)
        if not known.any():
            return
        kept = np.ones(len(self.keys), dtype=bool)
        kept[places[known]] = False
        draft = self.folder / "kept.draft"
        rmtree(draft, ignore_errors=True)
        draft.mkdir()
        for name in (*self.columns, KEYS):
            _copy(self.keys if name == KEYS else self.vectors(name), kept, draft / f"{name}.npy")
        sync_folder(draft)
        os.replace(draft, self.folder / "kept")  # from here on, the rows are deleted
        sync_folder(self.folder)
        self._install()

    def clear(self) -> None:
        """Remove all rows, with the folder."""
        self.file(KEYS).unlink(missing_ok=True)
        if self.folder.is_dir():
            sync_folder(self.folder)
            rmtree(self.folder)

    def _install(self) -> None:
        """Put the files that a deletion wrote in their places; a killed process may have left some of them."""
        written = self.folder / "kept"
        if not written.is_dir():
            return
        for file in written.iterdir():
            os.replace(file, self.folder / file.name)
        sync_folder(self.folder)
        written.rmdir()


def _put(path: Path, places: np.ndarray, rows: np.ndarray, count: int) -> None:
    """Write rows to their places in a `.npy` file, and then that it has `count` rows. NumPy leaves room for a longer
    number in the header, so that it always takes the same bytes."""
    rows = np.ascontiguousarray(rows)
    with path.open("r+b") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        start = file.tell()
        runs = np.flatnonzero(np.diff(places) != 1) + 1
        for run, numbers in zip(np.split(places, runs), np.split(rows, runs), strict=True):
            file.seek(start + int(run[0]) * numbers[0].nbytes)
            file.write(numbers.data)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        _write_header(file, rows, count)
        assert file.tell() == start, path
        file.flush()
        os.fsync(file.fileno())


def _copy(rows: np.ndarray, kept: np.ndarray, path: Path) -> None:
    """Write some rows of an array to a new `.npy` file."""
    with path.open("wb") as file:
        _write_header(file, rows, int(kept.sum()))
        for start in range(0, len(rows), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            file.write(np.ascontiguousarray(rows[some][kept[some]]).data)
        file.flush()
        os.fsync(file.fileno())


def _write_header(file: IO[bytes], rows: np.ndarray, count: int) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(rows.dtype),
        "fortran_order": False,
        "shape": (count, *rows.shape[1:]),
    }
    np.lib.format.write_array_header_1_0(file, header)
