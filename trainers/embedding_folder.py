"""Embeddings on disk: memory-mapped arrays that are filled in parts, by one process or several."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .distributed import rank, wait_for_all_ranks, world_size


logger = logging.getLogger(__name__)
Shape = tuple[np.dtype, tuple[int, ...]]


def fingerprint_of(texts: Sequence[str]) -> str:
    """A digest of a list of texts that tells where one ends and the next begins."""
    digest = blake2b(digest_size=16)
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


class EmbeddingFolder:
    """
    Memory-mapped arrays that processes of one machine fill together, batch by batch. What is filled stays: a run that
    was interrupted goes on where it stopped, with any number of processes.

    The folder holds `{name}.npy`, `(texts, width)`, for each array; `checksums.npy`, a number a batch, 0 where it is
    missing; and `manifest.json`, which says of what they are. All room that they need is taken at once, so that a disk
    that is too small says so before the work, and not in the middle of it.

    Args:
        folder (`Path`): Made if need be.
        manifest (`dict`): All that the arrays depend on, as JSON: written into a new folder, compared in an old one.
        widths (`dict[str, int]`): Name of an array -> its width.
        batches (`Sequence[Sequence[int]]`): The rows of each batch; together all rows, each once.
        dtype (`torch.dtype`): Of the arrays: float32 or float16.

    Raises:
        ValueError: if the folder holds embeddings of something else (names what differs), or a file that cannot be
            read.
        OSError: if there is no room for the arrays; nothing is left behind.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        widths: Mapping[str, int],
        batches: Sequence[Sequence[int]],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.folder, self.batches = folder, batches
        number = torch.empty(0, dtype=dtype).numpy().dtype
        shapes: dict[str, Shape] = {name: (number, (sum(map(len, batches)), width)) for name, width in widths.items()}
        shapes["checksums"] = (np.dtype(np.uint64), (len(batches),))
        if rank() == 0:
            if (folder / "manifest.json").is_file():
                self._compare(manifest)
                self._mend(shapes)
            else:
                self._prepare(manifest, shapes)
        wait_for_all_ranks()
        self._compare(manifest)
        self._arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r+") for name in shapes}
        self._checksums = self._arrays.pop("checksums")

    def _prepare(self, manifest: Mapping[str, Any], shapes: Mapping[str, Shape]) -> None:
        new = not self.folder.is_dir()
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            for name, (number, shape) in shapes.items():
                np.lib.format.open_memmap(self.folder / f"{name}.npy", "w+", number, shape).flush()
                _take_room(self.folder / f"{name}.npy")
            # Last, and in one move: a folder with a manifest has all its arrays.
            draft = self.folder / "manifest.draft"
            draft.write_text(json.dumps(dict(manifest), indent=2) + "\n", encoding="utf-8")
            draft.replace(self.folder / "manifest.json")
        except OSError as error:
            for name in (*(f"{name}.npy" for name in shapes), "manifest.draft"):
                (self.folder / name).unlink(missing_ok=True)
            if new:
                self.folder.rmdir()
            gigabytes = sum(number.itemsize * math.prod(shape) for number, shape in shapes.values()) / 1e9
            raise OSError(
                error.errno, f"No room for {gigabytes:.3f} GB of embeddings in {self.folder}: {error.strerror}"
            ) from error

    def _mend(self, shapes: Mapping[str, Shape]) -> None:
        """Bring files that are cut short to their length: checksums tell which batches that leaves damaged."""
        for name, (number, shape) in shapes.items():
            file = self.folder / f"{name}.npy"
            try:
                with file.open("rb") as opened:
                    np.lib.format.read_magic(opened)
                    found = np.lib.format.read_array_header_1_0(opened)
                    size = opened.tell() + number.itemsize * math.prod(shape)
            except (OSError, ValueError) as error:
                raise ValueError(f"{file} cannot be read ({error}): delete {self.folder}.") from error
            if found != (shape, False, number):
                raise ValueError(f"{file} is of shape {found[0]}, not {shape}: delete {self.folder}.")
            if file.stat().st_size < size:
                logger.warning(f"{file} is cut short: what is missing is embedded again.")
                with file.open("r+b") as opened:
                    opened.truncate(size)
                _take_room(file)

    def _compare(self, manifest: Mapping[str, Any]) -> None:
        found = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        wanted = json.loads(json.dumps(dict(manifest)))
        differing = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
        if differing:
            raise ValueError(
                f"{self.folder} holds embeddings of something else: {', '.join(differing)} differ. "
                "Name another folder, or delete this one."
            )

    def missing(self) -> list[int]:
        """This rank's batches that are not there, or damaged (their checksum tells)."""
        damaged, missing = 0, []
        for batch in range(rank(), len(self.batches), world_size()):
            there = self._checksums[batch] != 0
            if not there or self._checksum(batch) != self._checksums[batch]:
                missing.append(batch)
                damaged += int(there)
        if damaged:
            logger.warning(f"{damaged} batches of {self.folder} are damaged and are embedded again.")
        return missing

    def write(self, batch: int, vectors: Mapping[str, torch.Tensor]) -> None:
        """Write a batch: name of an array -> embeddings of the batch's rows."""
        for name, array in self._arrays.items():
            array[self.batches[batch]] = vectors[name].numpy()
        self._checksums[batch] = self._checksum(batch)  # after the data: what is marked is there

    def read(self) -> dict[str, np.memmap]:
        """Name -> embeddings, memory-mapped."""
        for array in (*self._arrays.values(), self._checksums):
            array.flush()
        return self._arrays

    def _checksum(self, batch: int) -> int:
        digest = blake2b(digest_size=8)
        for array in self._arrays.values():
            digest.update(np.ascontiguousarray(array[self.batches[batch]]).data)
        return int.from_bytes(digest.digest(), "big") or 1


def _take_room(file: Path) -> None:
    """Take the disk's room for a whole file: a write to memory that finds none later would kill the process."""
    size = file.stat().st_size
    with file.open("r+b") as opened:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(opened.fileno(), 0, size)
        elif shutil.disk_usage(file).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
