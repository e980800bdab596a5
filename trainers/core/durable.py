"""Files that are there whole or not at all, also after a killed process or a loss of power, and folders that one process
writes at a time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


logger = logging.getLogger(__name__)


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


def replace_text(file: Path, text: str) -> None:
    """Write a text file, all or nothing; see [`replacing`]."""
    with replacing(file) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def only_writer(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """
    Keep other processes that ask for the same folder from it. The lock is on a file `.NAME.lock` beside the folder, and
    ends with the process, however that ends. Systems other than POSIX, and file systems without locks, have none.

    Args:
        folder (`Path`): The folder, which need not exist.
        wait (`bool`, *optional*, defaults to `False`): Whether to wait for another process that has the folder.

    Raises:
        ValueError: if another process has the folder, and `wait` is not set.
    """
    if os.name != "posix":
        yield
        return
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    file, told = folder.with_name(f".{folder.name}.lock"), False
    while (descriptor := _lock(file)) is None:
        if not wait:
            raise ValueError(f"Another process writes to {folder}: wait until it ends, or name another folder.")
        if not told:
            logger.warning(f"Waiting for another process that writes to {folder}.")
        told = True
        time.sleep(0.2)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(file: Path) -> int | None:
    """The descriptor of a file that is now locked; `None` if another process has it."""
    import fcntl

    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # Not `flock`: worker processes would inherit it, and outlive a killed parent for some seconds.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        except OSError as error:
            logger.warning(f"{file} cannot be locked ({error.strerror}): do not start two runs in one folder.")
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # the process that had it has removed it
