"""Embeddings on disk: memory-mapped arrays that one or more processes fill batch by batch."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from ..utils.durable import only_writer, replace_text
from ..utils.typed import read_json
from .ranks import rank, wait_for_all_ranks, world_size


logger = logging.getLogger(__name__)
VERSION = 1  # raise it where the same manifest stands for other embeddings, or a folder has another form


class EmbeddingStore:
    """
    Memory-mapped arrays that the processes of one machine fill together, batch by batch. An interrupted run can be
    resumed with any number of processes. Another run that wants the same folder waits:

    ```python
    with EmbeddingStore(...) as store:
        for batch in store.missing():
            store.write(batch, ...)
        arrays = store.read()
    ```

    The folder has one file `{name}.npy` of shape `(texts, width)` per array and `manifest.json`, everything that the
    embeddings depend on. Until all `batches` of rows are there, the arrays are named `{name}.npy.unfinished`, and
    `done.npy` says which batches they have. On entry, a ValueError says that the folder has a different manifest or a
    broken file, a warning what an earlier version did not record, and an OSError that the disk is too small.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, object],
        widths: Mapping[str, int],
        batches: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.folder, self.batches, self.widths = folder, batches, widths
        self.manifest = json.loads(json.dumps({**manifest, "version": VERSION}))
        self.dtype = torch.empty(0, dtype=dtype).numpy().dtype

    def __enter__(self) -> EmbeddingStore:
        with ExitStack() as stack:
            if rank() == 0:
                stack.enter_context(only_writer(self.folder, wait=True))
                if not (self.folder / "manifest.json").is_file():
                    self._create()
            wait_for_all_ranks()
            stored = {"version": 1, **read_json(self.folder / "manifest.json")}
            ours = self.manifest.items()
            if differing := sorted(name for name, value in ours if stored.get(name, value) != value):
                raise ValueError(
                    f"{self.folder} has embeddings made with other settings: {', '.join(differing)} differ. "
                    "Choose another folder, or delete this one."
                )
            if unknown := sorted(self.manifest.keys() - stored.keys()):
                logger.warning(f"{self.folder} does not say with which {', '.join(unknown)} its embeddings were made.")
            self._arrays = {name: self._opened(self._file(name)) for name in self.widths}
            whole = all((self.folder / f"{name}.npy").is_file() for name in self.widths)
            self._done = np.ones(len(self.batches), dtype=bool) if whole else self._opened(self.folder / "done.npy")
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _file(self, name: str) -> Path:
        """Path of an array, finished or not."""
        file = self.folder / f"{name}.npy"
        return file if file.is_file() else file.with_name(f"{file.name}.unfinished")

    def _create(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = sum(map(len, self.batches))
        size = rows * sum(self.widths.values()) * self.dtype.itemsize
        if shutil.disk_usage(self.folder).free < size:
            raise OSError(errno.ENOSPC, f"{self.folder} has no room for {size / 1e9:.1f} GB of embeddings")
        for name, width in self.widths.items():
            (self.folder / f"{name}.npy").unlink(missing_ok=True)
            np.lib.format.open_memmap(self._file(name), "w+", self.dtype, (rows, width)).flush()
        np.save(self.folder / "done.npy", np.zeros(len(self.batches), dtype=bool))
        # Written last and atomically: a folder with a manifest has all its arrays.
        replace_text(self.folder / "manifest.json", json.dumps(self.manifest, indent=2) + "\n")

    @staticmethod
    def _opened(file: Path) -> np.memmap:
        try:
            np.load(file, mmap_mode="r")  # refuses a truncated file, which "r+" fills with zeros
            return np.load(file, mmap_mode="r+")
        except Exception as error:  # a broken head raises errors of many kinds
            raise ValueError(f"{file} cannot be read ({error}): delete {file.parent}.") from error

    def missing(self) -> list[int]:
        """Batches of this rank that are missing."""
        return [batch for batch in range(rank(), len(self.batches), world_size()) if not self._done[batch]]

    def write(self, batch: int, vectors: Mapping[str, torch.Tensor]) -> None:
        """Write a batch: name of each array -> embeddings of the batch's rows."""
        for name, array in self._arrays.items():
            array[self.batches[batch]] = vectors[name].numpy()
            array.flush()
        self._done[batch] = True  # after the data: it means that the batch is complete

    def read(self) -> dict[str, np.memmap]:
        """Name of each array -> memory-mapped embeddings. All ranks call it, after their last batch."""
        wait_for_all_ranks()
        files = {name: self.folder / f"{name}.npy" for name in self.widths}
        if rank() == 0:
            for name, file in files.items():
                os.replace(self._file(name), file)
            (self.folder / "done.npy").unlink(missing_ok=True)
        wait_for_all_ranks()
        return {name: self._opened(file) for name, file in files.items()}
