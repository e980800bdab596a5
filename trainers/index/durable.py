"""Writing to the folder of an index."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """For code that writes to the folder of an index: an OSError names the folder."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"The index {folder} cannot be written: {error.strerror or error}") from error


def append(file: Path, end: int, rows: np.ndarray) -> None:
    """Write rows at an offset. What a killed process left after it is removed."""
    with file.open("ab") as opened:
        opened.truncate(end)
        opened.write(np.ascontiguousarray(rows).data)
        opened.flush()
        os.fsync(opened.fileno())
