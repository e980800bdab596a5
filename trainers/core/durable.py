"""Files that are whole or not there, also after a killed process or a loss of power, and folders with one writer."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
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
def replacing_files(folder: Path, *, last: str = "config.json", stale: Sequence[str] = ()) -> Iterator[Path]:
    """
    A folder to write to. When the block ends, its files replace those of `folder`, where others stay; if it fails,
    nothing changes there. A process that is killed in between leaves a folder without the file `last`, which is
    removed first and put back last.

    Args:
        folder (`Path`): The folder; created if it does not exist.
        last (`str`, *optional*, defaults to `"config.json"`): The file without which no reader opens the folder.
        stale (`Sequence[str]`, *optional*): As for [`remove_files`]: what else is replaced.

    Raises:
        OSError: if a file cannot be written. The message names the folder.
    """
    draft, new = folder / ".draft", not folder.is_dir()
    shutil.rmtree(draft, ignore_errors=True)  # of a killed process
    try:
        with writing(str(folder)):
            draft.mkdir(parents=True)
            yield draft
    except BaseException:
        shutil.rmtree(folder if new else draft, ignore_errors=True)
        raise
    written = [file.relative_to(draft) for file in draft.rglob("*") if file.is_file()]
    (folder / last).unlink(missing_ok=True)
    remove_files(folder, stale)
    for file in sorted(written, key=lambda name: str(name) == last):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(draft / file, folder / file)
    shutil.rmtree(draft)


def remove_files(folder: str | Path, files: Sequence[str]) -> None:
    """Remove the files and folders whose names match one of the patterns; all others stay."""
    for pattern in files:
        for path in Path(folder).glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


@contextmanager
def writing(what: str) -> Iterator[None]:
    """For code that writes files: what goes wrong there is an OSError that names `what`, also in PyTorch and in
    libraries in Rust, which have errors of their own."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{what} cannot be written: {error.strerror or error}") from error
    except Exception as error:
        if found := re.search(r"([\w ]+) \(os error (\d+)\)", str(error)):
            raise OSError(int(found[2]), f"{what} cannot be written: {found[1].strip()}") from error
        if re.search(r"inline_container|PytorchStreamWriter|iostream error", str(error)):
            raise OSError(errno.EIO, f"{what} cannot be written; the disk may be full") from error
        raise


@contextmanager
def only_writer(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """
    Keep other processes that ask for the same folder from it. The lock is on a file `.NAME.lock` beside the folder,
    and ends with the process, however that ends. There is none on other systems than POSIX, and on file systems
    without locks.

    Args:
        folder (`Path`): The folder, which need not exist.
        wait (`bool`, *optional*, defaults to `False`): Whether to wait for another process that has the folder.

    Raises:
        ValueError: if another process has the folder, and `wait` is not set.
    """
    folder = folder.absolute()
    file, told = folder.with_name(f".{folder.name}.lock"), False
    while True:
        try:
            descriptor = _locked(file) if os.name == "posix" else None
            break
        except BlockingIOError:
            if not wait:
                raise ValueError(
                    f"Another process writes to {folder}: wait until it ends, or name another folder."
                ) from None
        except OSError as error:
            logger.warning(f"{file} cannot be locked ({error.strerror}): do not start two runs in one folder.")
            descriptor = None
            break
        if not told:
            logger.warning(f"Waiting for another process that writes to {folder}.")
        told = True
        time.sleep(0.2)
    try:
        yield
    finally:
        if descriptor is not None:
            file.unlink(missing_ok=True)
            os.close(descriptor)


def _locked(file: Path) -> int:
    """The descriptor of a file that is now locked. Raises a BlockingIOError if another process has it."""
    import fcntl

    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # Not `flock`: worker processes would inherit it, and outlive a killed parent for some seconds.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # the process that had it has removed it
