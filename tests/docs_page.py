"""
Runs one page of the documentation: its commands and its code, in order, in one process and one namespace.

    python -m tests.docs_page docs/train.md     # in a folder that holds the files that the page reads

What takes long is made short: two small steps per training, few texts of the standard library, few documents in the
timed search, and a tiny encoder as the default one (in `stand-ins/default`).
"""

import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
import urllib.request
from importlib import import_module
from pathlib import Path
from typing import Any

from m3bert import cli
from tests.snippets import ROOT, read, snippets


DEFAULT_ENCODER = Path("stand-ins", "default").absolute()
DATA = Path("stand-ins", "data").absolute()
LONGEST = 48  # tokens of a text in training, which is all that the small models have positions for
FILE = re.compile(r"# (\w+\.(?:py|sh|yaml))\n")  # the first line of a block that is a file


def make_short() -> None:
    """Replace what takes long, before a command imports it."""
    from m3bert.commands import sources
    from m3bert.data import stdlib_docs
    from m3bert.evaluation import latency
    from m3bert.trainers.core.arguments import NestedTrainingArguments

    check, measure = NestedTrainingArguments.__post_init__, latency.measure_latency

    def with_two_steps(self: Any) -> None:
        self.max_steps, self.save_strategy = 2, "no"
        self.per_device_train_batch_size = min(self.per_device_train_batch_size, 8)
        self.max_length = min(self.max_length or LONGEST, LONGEST)
        check(self)

    def measured(*arguments: Any, **options: Any) -> Any:
        return measure(*arguments, **options | {"documents": 1000, "rounds": 1})

    NestedTrainingArguments.__post_init__ = with_two_steps
    stdlib_docs.module_pairs = lambda: iter(())  # what is left is that of the built-in functions and of `help()`
    stdlib_docs.split_by_module.__defaults__ = (40,)
    latency.measure_latency = measured
    sources.default_base = lambda *options: str(DEFAULT_ENCODER)


def run_line(line: str) -> None:
    """Run one line of a shell: a command of this package in this process."""
    if not line or line.startswith(("#", "make ", "pip install ")):  # other tests look at these
        return
    if " bash " in line:  # a script, in processes of its own
        subprocess.run(["bash", "-c", line], check=True)
        return
    words = expand(line)
    start = time.process_time()
    if words[:4] == ["hf", "jobs", "uv", "run"]:
        run_job(words)
        return
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        import_module(words[2]).main(words[3:])
        return
    assert words[0] == "m3bert", f"not a command of this package: {line}"
    if words[1] == "demo" and "--space" not in words:
        serve(words[1:])
        return
    if "--mteb" in words:
        replace_mteb_tasks()
    if words[1] == "choose":
        make_fast(Path(words[2]))
    run_command(words[1:])
    if words[1] == "mine":
        add_negatives(Path(words[words.index("--output_file") + 1]))
    print(f"## {time.process_time() - start:.1f} s: {line}")


def run_job(words: list[str]) -> None:
    """A job: the client reads the line and the script, and starts nothing; the script then runs here."""
    local = [str(ROOT / word) if word.startswith("scripts/") else word for word in words]
    subprocess.run([*local[:4], "--dry-run", *local[4:]], check=True, stdout=subprocess.PIPE)
    place = next(row for row, word in enumerate(words) if word.endswith(".py"))
    mounted = [words[row + 1] for row in range(place) if words[row] == "--volume"]
    assert all(volume.startswith(("./dist:", "hf://buckets/user/")) for volume in mounted)
    folders = tuple(volume.rpartition(":")[2] for volume in mounted)
    here = [f"mounted{word}" if word.startswith(folders) else word for word in words[place + 1 :]]
    before = sys.argv
    sys.argv = [words[place], *here]
    try:
        runpy.run_path(local[place], run_name="__main__")
    finally:
        sys.argv = before


def expand(line: str) -> list[str]:
    """The words of a line, as bash reads it."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, text=True, check=True)
    return done.stdout.removesuffix("\0").split("\0")


def run_command(arguments: list[str]) -> None:
    """`m3bert ARGUMENTS`."""
    before = sys.argv
    try:
        cli.main(arguments)
    except SystemExit as end:
        assert not end.code, f"m3bert {' '.join(arguments)}: {end.code}"
    finally:
        sys.argv = before


def serve(arguments: list[str]) -> None:
    """Start a page in a process of its own, and wait for its answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.docs_page", "--command", *arguments]
    page = subprocess.Popen(command, env={**os.environ, "GRADIO_SERVER_PORT": port})
    try:
        while True:
            assert page.poll() is None, "the page did not start"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}").read()
                return
            except OSError:
                time.sleep(0.5)
    finally:
        page.kill()
        page.wait()


def make_fast(file: Path) -> None:
    """Make the latencies in a results file small: how busy this machine is has nothing to do with the page."""
    results = json.loads(file.read_text(encoding="utf-8"))
    for times in (results["latency"]["encode_ms"], results["latency"]["search_ms"]):
        times.update(dict.fromkeys(times, 1e-3))
    file.write_text(json.dumps(results), encoding="utf-8")


def add_negatives(file: Path) -> None:
    """A teacher with random weights, to which all texts are alike, may find no negative: take other positives."""
    if file.read_text(encoding="utf-8"):
        return
    rows = [json.loads(line) for line in Path("pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    others = [row["positive"] for row in rows][::-1]
    lines = (json.dumps(row | {"negative": other}) + "\n" for row, other in zip(rows, others, strict=True))
    file.write_text("".join(lines), encoding="utf-8")


def run_python(code: str, heading: str, namespace: dict[str, Any]) -> None:
    """Run a block of Python, or write it to its file if its first line names one."""
    if file := FILE.match(code):
        Path(file[1]).write_text(code, encoding="utf-8")
        return
    if "mteb.get_tasks" in code:
        replace_mteb_tasks()
    exec(compile(code, heading, "exec"), namespace)


def replace_mteb_tasks() -> None:
    """The data of MTEB's tasks is on the Hub; a local task stands in for them."""
    import mteb

    from m3bert.evaluation import find_task, load_task
    from tests.evaluation.local_mteb import similarity_task

    local = load_task(find_task("stsb"), DATA)
    mteb.get_tasks = lambda tasks: [similarity_task(local)]
    mteb.get_task = lambda name: similarity_task(local)


def run_page(page: str) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for language, code, heading in snippets(read(page)):
        print("##", heading, flush=True)
        if language == "bash":
            for line in re.sub(r"\\\n\s*", " ", code).splitlines():
                run_line(line.strip())
        elif language in ("sh", "yaml"):
            if file := FILE.match(code):
                Path(file[1]).write_text(code, encoding="utf-8")
        elif language == "json":
            json.loads(code)
        elif language != "javascript":  # which tests/ecosystem/test_onnx_clients.py runs
            assert language == "python", language
            run_python(code, heading, namespace)
    print("the end")


def main(arguments: list[str]) -> None:
    make_short()
    if arguments[0] == "--command":
        run_command(arguments[1:])
    else:
        run_page(arguments[0])


if __name__ == "__main__":
    main(sys.argv[1:])
