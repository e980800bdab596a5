"""
Processes for tests that start in milliseconds: each is forked from a server that has imported the large libraries,
which costs seconds of a core in a process of its own. The server runs isolated (`python -I`) and never imports this
project. What those libraries read from the environment when they are imported is the server's: offline, one thread,
and an empty `HF_MODULES_CACHE` for every run.
"""

import atexit
import functools
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn


LIBRARIES = (
    "torch", "transformers.trainer", "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto", "transformers.models.bert.modeling_bert", "safetensors.torch",
    "datasets", "sentence_transformers",
)  # fmt: skip
MODULES = "modules"  # the folder of HF_MODULES_CACHE, beside the output of the processes


class Server:
    """The server's end in the process of the tests; it ends with it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warm-"))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "HF_MODULES_CACHE": str(self.folder / MODULES), "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(self.folder)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what libraries say while they are imported
            text=True,
        )
        atexit.register(self.close)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, code: str, folder: Path, environments: Sequence[Mapping[str, str]], **job: Any) -> list[Any]:
        """
        Run code in one process for each of the environments, at the same time; see [`serve`] for the rest of the job.

        Returns:
            `list[subprocess.CompletedProcess]`
        """
        job |= {"code": code, "folder": str(folder), "environments": [dict(each) for each in environments]}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        texts = [[(self.folder / f"{row}.{kind}").read_text() for kind in ("out", "err")] for row in range(len(codes))]
        return [subprocess.CompletedProcess("code", code, *both) for code, both in zip(codes, texts, strict=True)]


@functools.cache
def server() -> Server:
    """The server of this process, which starts with the first use."""
    return Server()


def serve(folder: Path) -> None:
    """
    Read jobs, a line of JSON each, and answer each with a list of exit codes. A job has `code`, the `folder` to run it
    in, `environments`, and may have `arguments`, `path` (folders to import from) and `timeout` in seconds.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        shutil.rmtree(folder / MODULES, ignore_errors=True)
        processes = []
        for row, environment in enumerate(job["environments"]):
            process = os.fork()
            if process == 0:
                run_job(job, environment, folder / str(row))
            processes.append(process)
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


def run_job(job: Mapping[str, Any], environment: Mapping[str, str], output: Path) -> NoReturn:
    """Be a process of a job: its output goes to files, and the code is the module `__main__`."""
    signal.alarm(job.get("timeout", 300))
    for number, kind in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output.with_suffix(kind), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(job["folder"])
    sys.argv = ["code", *job.get("arguments", ())]
    sys.path[:0] = job.get("path", ())
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(job["code"], "code", "exec"), main.__dict__)
    except SystemExit as end:  # whose code may be a message, as for the interpreter itself
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
