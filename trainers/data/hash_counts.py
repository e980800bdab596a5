"""Count hashes in bounded memory: the newest in a dictionary, all others in sorted files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np


BLOCK = 2**16  # hashes of a file that are merged at a time


class HashCounts:
    """
    How often each of many 64-bit hashes was added. Memory does not grow with their number: when `limit` different
    hashes are in memory, they are written into a sorted file of 8 bytes per hash, and files of similar size are
    merged, so that there are few.

    Args:
        folder (`Path`): An empty folder.
        limit (`int`, *optional*, defaults to 262144): Different hashes in memory, about 100 bytes each.
    """

    def __init__(self, folder: Path, limit: int = 2**18):
        self.folder, self.limit = folder, limit
        self.recent: Counter[int] = Counter()
        self.files: list[tuple[Path, np.ndarray]] = []  # from large to small
        self._written = 0

    def add(self, value: int) -> None:
        """Add a hash once."""
        self.recent[value] += 1

    def on_disk(self, values: list[int]) -> list[int]:
        """How often each hash is in the files; [`recent`] has the rest. Only [`spill`] changes the files."""
        wanted = np.array(values, dtype=np.uint64)
        counts = np.zeros(len(wanted), dtype=np.int64)
        for _, found in self.files:
            counts += found.searchsorted(wanted, side="right") - found.searchsorted(wanted, side="left")
        return counts.tolist()

    def spill(self) -> None:
        """Write the hashes in memory to disk if there are `limit` or more."""
        if len(self.recent) < self.limit:
            return
        hashes = np.fromiter(self.recent.keys(), np.uint64, len(self.recent))
        counts = np.fromiter(self.recent.values(), np.int64, len(self.recent))
        self.recent.clear()
        self._write(iter([np.sort(hashes.repeat(counts))]))
        while len(self.files) > 1 and len(self.files[-2][1]) <= 2 * len(self.files[-1][1]):
            (small_file, small), (large_file, large) = self.files.pop(), self.files.pop()
            self._write(merged(large, small))
            small_file.unlink()
            large_file.unlink()

    def _write(self, blocks: Iterator[np.ndarray]) -> None:
        file = self.folder / f"{self._written}.u64"
        self._written += 1
        with file.open("wb") as opened:
            for block in blocks:
                block.tofile(opened)
        # As a plain array: looking up in a numpy.memmap is slower.
        self.files.append((file, np.asarray(np.memmap(file, dtype=np.uint64, mode="r"))))


def merged(one: np.ndarray, other: np.ndarray, block: int = BLOCK) -> Iterator[np.ndarray]:
    """The values of two sorted arrays in order, in parts of at most two blocks."""
    first = second = 0
    while first < len(one) or second < len(other):
        left, right = one[first : first + block], other[second : second + block]
        # Up to this value, both blocks are complete; more of the value itself may follow in the next part.
        bound = min(part[-1] for part in (left, right) if len(part))
        left, right = (part[: part.searchsorted(bound, side="right")] for part in (left, right))
        yield np.sort(np.concatenate([left, right]))
        first, second = first + len(left), second + len(right)
