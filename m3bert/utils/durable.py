"""Files that are whole or not there, also after a killed process, and folders with one writer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def replacing(file: Path, *, mark: str = "draft") -> Iterator[Path]:
    """
    A path to write to. When the block ends, what was written there replaces `file` at once (its folder must exist). If
    the block fails, `file` stays as it was. Each process that may write the same file needs its own `mark`.
    """
    draft = file.with_name(f"{file.name}.{mark}")
    try:
        yield draft
        os.replace(draft, file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def replace_text(file: Path, text: str) -> None:
    """Write a text file, all or nothing; see [`replacing`]."""
    with replacing(file) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def replacing_files(folder: Path, *, last: str = "config.json", stale: Sequence[str] = ()) -> Iterator[Path]:
    """
    A folder to write to. When the block ends, its files are moved into `folder`, which is made if needed. Files there
    that match `stale` are removed, others stay. If the block fails, nothing changes. The file `last` is moved last: no
    reader opens a folder without it, so a killed process leaves no half model. OSError, which names the folder, if a
    file cannot be written.
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
    """Re-raise errors of writing as an OSError that names `what`, also from PyTorch and libraries in Rust."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError | RuntimeError) and "os error" not in str(error):
            raise
        raise OSError(f"{what} cannot be written; the disk may be full: {' '.join(str(error).split())}") from error


@contextmanager
def only_writer(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder, which need not exist, by the file `.NAME.lock` beside it, until the block or the process ends. If
    another process holds it, wait if `wait` is set, else raise a ValueError."""
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"), timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"Another process writes to {folder}: wait until it ends, or name another folder.") from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
