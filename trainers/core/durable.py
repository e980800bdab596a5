"""Files that are there whole or not at all, also after a killed process or a loss of power."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(file: Path, *, mark: str = "draft") -> Iterator[Path]:
    """
    A path to write to. When the block ends, the file there replaces `file` at once; if it fails, `file` stays as it
    was. Readers never see a part of a file.

    Args:
        file (`Path`): The file to write. Its folder must be there.
        mark (`str`, *optional*, defaults to `"draft"`): Last part of the name to write to. Where several processes
            may write the same file, each needs its own.
    """
    draft = file.with_name(f"{file.name}.{mark}")
    try:
        yield draft
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make new names in a folder survive a loss of power."""
    if os.name == "posix":  # elsewhere, folders cannot be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
