"""Processes that are forked, killed, and given no room."""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.command import one_line
from trainers.data import teacher
from trainers.index import index


REFUSALS = (ValueError, OSError)
OPEN, REPLACE = builtins.open, os.replace


def start(work: Path, function: Callable[..., None], *arguments: Any) -> int:
    """A forked process that calls a function. It ends with 0, with 1 and one line in `said` for an error that a user
    can act on, or with 2 and a traceback."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    status = 2
    try:
        os.chdir(work)
        for number in (1, 2):
            os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC), number)
        torch.set_num_threads(1)
        teacher.ROWS_OF_A_BATCH, index.CHUNK = 8, 8
        (work / "said").unlink(missing_ok=True)
        try:
            function(*arguments)
            status = 0
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            builtins.open = io.open = OPEN
    except REFUSALS as error:
        status = 1
        (work / "said").write_text(one_line(error))
        traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def end(process: int, seconds: float | None = None) -> int:
    """The exit status of a process, which is killed after some seconds; -9 then."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is not None and time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    if deadline is not None:
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def call(work: Path, function: Callable[..., None], *arguments: Any) -> float:
    """Call a function in a process of its own, which must succeed. Returns its seconds."""
    begun = time.monotonic()
    status = end(start(work, function, *arguments))
    assert status == 0, f"exit status {status}: {(work / 'output').read_text()[-1500:]}"
    return time.monotonic() - begun


def fail_writes(function: Callable[..., None], *arguments: Any, limit: int | None, number: int | None) -> None:
    """Call a function without room for files over a limit, or whose n-th file cannot be opened or renamed."""
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    calls: Iterator[int] = iter(range(1, sys.maxsize))

    def open_(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if {*mode} & {*"wax+"} and next(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return OPEN(file, mode, *rest, **options)

    def replace(source: Any, target: Any) -> None:
        if next(calls) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        REPLACE(source, target)

    builtins.open, io.open, os.replace = open_, open_, replace
    function(*arguments)


def failed(work: Path, function: Callable[[], None]) -> bool:
    """Whether a function failed, in one line."""
    status = end(start(work, function))
    assert status in (0, 1), f"exit status {status}: {(work / 'output').read_text()[-1500:]}"
    if status == 1:
        said = (work / "said").read_text()
        assert said and "\n" not in said, said
    return status == 1
