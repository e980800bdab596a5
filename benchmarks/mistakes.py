"""
Mistakes on the command line: seconds until each is answered, in a new process.

    python -m benchmarks.mistakes              # a minute
    python -m benchmarks.mistakes --quick      # each mistake once

A mistake is answered before the libraries that load a model are imported, which takes longer than all else.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks._measure import Benchmark, Bounds, Run, at_most
from m3bert.commands.command import run_command


BOUNDS: Bounds = {"slowest_seconds": at_most(2.0), "median_seconds": None}
# What lies in the folder, and mistakes there -> the beginning of the answer.
FILES = {
    "pairs.jsonl": '{"anchor": "a", "positive": "b"}\n',
    "cut.jsonl": '{"anchor": "a", "positive": "b"}\n{"anchor": \n',
    "columns.jsonl": '{"summary": "a", "body": "b"}\n',
    "empty.txt": "",
    "trained/config.json": "{}",
}
TRAIN, OUT = "train contrastive --train_files", "--output_dir out"
MISTAKES = {
    "evalute --tasks stdlib": "unknown command 'evalute' (did you mean evaluate?); commands: fit, ",
    f"train contrastve --train_files pairs.jsonl {OUT}": "'contrastve' is not a method (did you mean contrastive?)",
    f"train contrastive --config msmarco {OUT}": "msmarco is neither a recipe nor a file (did you mean msmarco_trip",
    "evaluate --tasks stdlb": "There is no task 'stdlb' (did you mean stdlib?). Tasks: ",
    "evaluate --taks stdlib": "unknown option --taks (did you mean --tasks?)",
    "evaluate --tasks stdlib --grid 2,x": "'2,x' is not a grid. Write layers x dims",
    "fit encoder out --files missing.txt": "missing.txt: No such file or directory",
    "fit encoder trained --files pairs.jsonl": "trained holds config.json: pass --overwrite",
    "trim encoder out --files empty.txt": "empty.txt cannot be read: it is empty",
    f"{TRAIN} pairs.jsonl": "Training needs --output_dir",
    f"{TRAIN} missing.jsonl {OUT}": "missing.jsonl: No such file or directory",
    f"{TRAIN} cut.jsonl {OUT}": "cut.jsonl cannot be read: line 2 is not JSON",
    f"{TRAIN} columns.jsonl {OUT}": "columns.jsonl has the column(s) summary, body; ",
    f"{TRAIN} pairs.jsonl --text_columns anchor reply {OUT}": "pairs.jsonl lacks the column(s) reply; it has anchor, ",
    f"{TRAIN} pairs.jsonl --output_dir trained": "trained holds config.json: pass --overwrite",
    "embed --files missing.jsonl": "missing.jsonl: No such file or directory",
    "embed --files pairs.jsonl": "pairs.jsonl lacks the column(s) text (text_column names another); it has ",
    f"index plan.json --files pairs.jsonl --vector_store faiss {OUT}": "plan.json: No such file or directory",
    "index trained --add pairs.jsonl --files pairs.jsonl": "--files is for building an index: omit it with --add and ",
    "search folder question": "folder/index.json: No such file or directory",
    "push folder user/model": "folder is not a folder: name the folder of a checkpoint",
    "push trained user/model --output_dir trained": "--output_dir trained exists: name a new folder",
    "export --granularity 9y": "'9y' is not a grid. Write layers x dims",
}


def write_files(folder: Path) -> None:
    """Write [`FILES`] into a folder."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def figures(run: Run) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        calls = {
            line: partial(
                subprocess.run, [sys.executable, "-m", "m3bert", *line.split()], cwd=folder, capture_output=True
            )
            for line in MISTAKES
        }
        seconds = sorted(run.time("until the answer", calls, 1 if run.quick else 3).values())
    return {"slowest_seconds": seconds[-1], "median_seconds": seconds[len(seconds) // 2]}


BENCHMARK = Benchmark("mistakes", __doc__, BOUNDS, figures)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
