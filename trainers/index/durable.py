"""Files that survive a killed process, and a loss of power."""

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


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path to write to. The file there then replaces another one at once, and survives a loss of power."""
    draft = file.with_name(f"{file.name}.draft")
    try:
        yield draft
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def append(file: Path, end: int, rows: np.ndarray) -> None:
    """Write rows at an offset. What a killed process left after it is removed."""
    with file.open("ab") as opened:
        opened.truncate(end)
        opened.write(np.ascontiguousarray(rows).data)
        opened.flush()
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a loss of power."""
    if os.name == "posix":  # elsewhere, folders cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
