"""Embeddings on disk: memory-mapped arrays that one or more processes fill batch by batch."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.durable import only_writer, replace_text, sync_folder
from ..core.parallel.ranks import rank, wait_for_all_ranks, world_size


logger = logging.getLogger(__name__)
Shape = tuple[np.dtype, tuple[int, ...]]


def fingerprint_of(texts: Iterable[str], digest: blake2b | None = None) -> str:
    """
    A digest of texts. Texts that differ only in where they begin and end have different digests.

    Args:
        texts (`Iterable[str]`): The texts.
        digest (`blake2b`, *optional*): The digest of the texts before them, which is continued.
    """
    digest = blake2b(digest_size=16) if digest is None else digest
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


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

    The folder has one file `{name}.npy` of shape `(texts, width)` per array, which is named `{name}.npy.unfinished`
    until all batches are there; `checksums.npy`, one number per batch, 0 for a missing batch; and `manifest.json`,
    which describes the embeddings. Disk space is preallocated, so that a disk that is too small is noticed before the
    embeddings are computed.

    Args:
        folder (`Path`): Folder; created if it does not exist.
        manifest (`dict`): Everything that the embeddings depend on, as JSON values. It is written to a new folder, and
            compared with the manifest of an existing one.
        widths (`dict[str, int]`): Name of each array -> its hidden size.
        batches (`Sequence[Sequence[int]]`): Rows of each batch. Every row is in exactly one batch.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Type of the arrays: `torch.float32` or
            `torch.float16`.

    Raises:
        ValueError: when it is entered, if the folder has a different manifest (the message names the differences), or
            a file that cannot be read.
        OSError: when it is entered, if the disk is too small for the arrays. No files are left behind.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        widths: Mapping[str, int],
        batches: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.folder, self.batches, self.manifest = folder, batches, manifest
        number = torch.empty(0, dtype=dtype).numpy().dtype
        texts = sum(map(len, batches))
        self.shapes: dict[str, Shape] = {name: (number, (texts, width)) for name, width in widths.items()}
        self.shapes["checksums"] = (np.dtype(np.uint64), (len(batches),))

    def __enter__(self) -> EmbeddingStore:
        with ExitStack() as stack:
            if rank() == 0:
                stack.enter_context(only_writer(self.folder, wait=True))
                if (self.folder / "manifest.json").is_file():
                    self._compare()
                    self._mend()
                else:
                    self._prepare()
            wait_for_all_ranks()
            self._compare()
            self._arrays = {name: np.load(self._file(name), mmap_mode="r+") for name in self.shapes}
            self._checksums = self._arrays.pop("checksums")
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _file(self, name: str) -> Path:
        """Where an array is now."""
        file = self.folder / f"{name}.npy"
        return file if name == "checksums" or file.is_file() else unfinished(file)

    def _prepare(self) -> None:
        new = not self.folder.is_dir()
        self.folder.mkdir(parents=True, exist_ok=True)
        files = {name: self.folder / f"{name}.npy" for name in self.shapes}
        files |= {name: unfinished(file) for name, file in files.items() if name != "checksums"}
        try:
            for name, (number, shape) in self.shapes.items():
                np.lib.format.open_memmap(files[name], "w+", number, shape).flush()
                _take_room(files[name])
            # Written last and atomically: a folder with a manifest has all its arrays.
            replace_text(self.folder / "manifest.json", json.dumps(dict(self.manifest), indent=2) + "\n")
        except OSError as error:
            for file in files.values():
                file.unlink(missing_ok=True)
            if new:
                self.folder.rmdir()
            gigabytes = sum(number.itemsize * math.prod(shape) for number, shape in self.shapes.values()) / 1e9
            raise OSError(
                error.errno, f"Cannot allocate {gigabytes:.3f} GB for embeddings in {self.folder}: {error.strerror}"
            ) from error

    def _mend(self) -> None:
        """Extend truncated files to their full length. The checksums then show which batches are damaged."""
        for name, (number, shape) in self.shapes.items():
            file = self._file(name)
            try:
                with file.open("rb") as opened:
                    np.lib.format.read_magic(opened)
                    found = np.lib.format.read_array_header_1_0(opened)
                    size = opened.tell() + number.itemsize * math.prod(shape)
            except (OSError, ValueError) as error:
                raise ValueError(f"{file} cannot be read ({error}): delete {self.folder}.") from error
            if found != (shape, False, number):
                raise ValueError(f"{file} has shape {found[0]}, not {shape}: delete {self.folder}.")
            if file.stat().st_size < size:
                logger.warning(f"{file} is truncated: its missing embeddings are computed again.")
                with file.open("r+b") as opened:
                    opened.truncate(size)
                _take_room(file)

    def _compare(self) -> None:
        found = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        wanted = json.loads(json.dumps(dict(self.manifest)))
        differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        if differing:
            raise ValueError(
                f"{self.folder} has embeddings made with other settings: {', '.join(differing)} differ. "
                "Choose another folder, or delete this one."
            )

    def missing(self) -> list[int]:
        """Batches of this rank that are missing or damaged (checksum mismatch)."""
        damaged, missing = 0, []
        for batch in range(rank(), len(self.batches), world_size()):
            there = self._checksums[batch] != 0
            if not there or self._checksum(batch) != self._checksums[batch]:
                missing.append(batch)
                damaged += int(there)
        if damaged:
            logger.warning(f"{damaged} batches of {self.folder} are damaged (checksum mismatch) and computed again.")
        return missing

    def write(self, batch: int, vectors: Mapping[str, torch.Tensor]) -> None:
        """Write a batch: name of each array -> embeddings of the batch's rows."""
        for name, array in self._arrays.items():
            array[self.batches[batch]] = vectors[name].numpy()
        self._checksums[batch] = self._checksum(batch)  # after the data: a checksum means that the batch is complete

    def read(self) -> dict[str, np.memmap]:
        """Name of each array -> memory-mapped embeddings. All ranks call it, after their last batch."""
        for array in (*self._arrays.values(), self._checksums):
            array.flush()
        wait_for_all_ranks()
        if rank() == 0:
            for name in self._arrays:
                os.replace(self._file(name), self.folder / f"{name}.npy")
            sync_folder(self.folder)
        wait_for_all_ranks()
        return {name: np.load(self.folder / f"{name}.npy", mmap_mode="r+") for name in self._arrays}

    def _checksum(self, batch: int) -> int:
        digest = blake2b(digest_size=8)
        for array in self._arrays.values():
            digest.update(np.ascontiguousarray(array[self.batches[batch]]).data)
        return int.from_bytes(digest.digest(), "big") or 1


def unfinished(file: Path) -> Path:
    """The name of an array that lacks batches: nobody takes its zeros for embeddings."""
    return file.with_name(f"{file.name}.unfinished")


def _take_room(file: Path) -> None:
    """Preallocate disk space for a whole file: a write to a memory-mapped file on a full disk kills the process."""
    size = file.stat().st_size
    with file.open("r+b") as opened:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(opened.fileno(), 0, size)
        elif shutil.disk_usage(file).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
