"""What benchmarks share: options, bounds, timings in turn, memory in new processes, and results files."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import torch
from transformers.utils.logging import disable_progress_bar

from m3bert.commands.command import argument_parser
from m3bert.evaluation.latency import times_in_turn


RESULTS = Path(__file__).parent / "results"
SEED = 0
QUICK = "Quick run: the sizes are smaller than those that the bounds are for."
Value = TypeVar("Value")


def seconds_in_turn(functions: Mapping[Value, Callable[[], object]], rounds: int) -> dict[Value, float]:
    """Median seconds per call of each function. Every round calls each function once; a first round is not counted."""
    return {name: median(values) for name, values in times_in_turn(functions, rounds).items()}


@dataclass(frozen=True)
class Bound:
    """
    The limit of a figure, at full size.

    Args:
        relation (`str`): `"<="` or `">="`.
        limit (`float`): The limit.
        one_thread (`float`, *optional*): The limit with one thread. Default: `limit`.
    """

    relation: Literal["<=", ">="]
    limit: float
    one_thread: float | None = None

    def with_threads(self, threads: int) -> float:
        """The limit with this number of threads."""
        return self.one_thread if threads == 1 and self.one_thread is not None else self.limit

    def holds(self, value: float, threads: int) -> bool:
        """Whether a figure, measured with this number of threads, is within the limit."""
        limit = self.with_threads(threads)
        return value <= limit if self.relation == "<=" else value >= limit


def at_most(limit: float, one_thread: float | None = None) -> Bound:
    return Bound("<=", limit, one_thread)


def at_least(limit: float) -> Bound:
    return Bound(">=", limit)


Bounds = Mapping[str, Bound | None]  # every figure of a benchmark -> its bound, if it has one


class Run:
    """
    One run of a benchmark. It prints a line for each case and keeps what was measured.

    Args:
        quick (`bool`): Whether sizes are small.
        threads (`int`): Threads of torch, also in new processes.
    """

    def __init__(self, quick: bool, threads: int) -> None:
        self.quick, self.threads = quick, threads
        self.measured: dict[str, dict[str, dict[str, float]]] = {"seconds": {}, "megabytes": {}}
        self.notes: dict[str, str] = {}
        self._since = time.perf_counter()

    def time(self, case: str, functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        """Median seconds per call of each function, called in turn; see [`seconds_in_turn`]."""
        return self.record(case, seconds_in_turn(functions, rounds))

    def memory(self, case: str, functions: Mapping[str, Callable[[], float]]) -> dict[str, float]:
        """The megabytes that each function returns in a new process; see [`added_peak`]."""
        peaks = {name: in_new_process(function, self.threads) for name, function in functions.items()}
        return self.record(case, peaks, "megabytes")

    def note(self, name: str, text: str) -> None:
        """Keep a text with the results, and print it."""
        self.notes[name] = text
        print(f"{name}: {text}", flush=True)

    def record(self, case: str, values: dict[str, float], unit: str = "seconds") -> dict[str, float]:
        """Keep the values of a case and print them, with the time since the previous case."""
        rounded = {name: significant(value) for name, value in values.items()}
        self.measured.setdefault(unit, {})[case] = rounded
        listed = ", ".join(f"{name} {value:g}" for name, value in rounded.items())
        now = time.perf_counter()
        print(f"{case}, {unit}: {listed} (took {now - self._since:.0f} s)", flush=True)
        self._since = now
        return values


@dataclass(frozen=True)
class Benchmark:
    """
    A benchmark with its command line.

    Args:
        name (`str`): Its module in `benchmarks`, and the name of its results files.
        description (`str`, *optional*): Text of its help.
        bounds (`dict`): Every figure -> its bound, or `None`.
        measure (`Callable`): Takes a [`Run`] and returns the value of every figure.
        packages (`tuple[str, ...]`, *optional*): Packages whose versions matter, besides torch and transformers.
    """

    name: str
    description: str | None
    bounds: Bounds
    measure: Callable[[Run], Mapping[str, float]]
    packages: tuple[str, ...] = ()

    def main(self, arguments: list[str]) -> None:
        """Measure, write the results file, and print the figures as a last line of JSON."""
        parser = argument_parser(self.description)
        add_options(parser)
        options = parser.parse_args(arguments)
        file = results_file(self.name, options.quick, options.threads)
        disable_progress_bar()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        run = Run(options.quick, torch.get_num_threads())
        # Before the measurements, because the tree may change meanwhile.
        described = about(packages=self.packages) | {"quick": run.quick}
        if options.quick:
            print(QUICK, flush=True)
        result = self.result(run, self.measure(run)) | described
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(result | run.measured | run.notes, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(result), flush=True)

    def result(self, run: Run, figures: Mapping[str, float]) -> dict[str, Any]:
        """
        The figures to write.

        Raises:
            ValueError: if they are not those that `bounds` lists.
        """
        if figures.keys() != self.bounds.keys():
            raise ValueError(f"{self.name} has the figures {list(figures)}, but bounds for {list(self.bounds)}.")
        return {name: significant(value) for name, value in figures.items()}


def add_options(parser: Any) -> None:
    """Add the options of all benchmarks to a parser."""
    parser.add_argument("--quick", action="store_true", help="smaller sizes, at most a minute per benchmark")
    parser.add_argument("--threads", type=int, help="threads of torch (default: those that torch chooses)")


def results_file(name: str, quick: bool, threads: int | None) -> Path:
    """
    Where a benchmark writes its result: `NAME.json`, with `1thread` and `quick` between the dots where they apply.

    Raises:
        ValueError: if `threads` is below 1.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"--threads {threads} must be 1 or more.")
    parts = [name]
    if threads is not None and threads != torch.get_num_threads():
        parts.append("1thread" if threads == 1 else f"{threads}threads")
    return RESULTS / ".".join([*parts, *(["quick"] if quick else []), "json"])


def about(seed: int = SEED, packages: Sequence[str] = ()) -> dict[str, Any]:
    """What a result depends on: date, machine, threads, seed, commit, and versions of torch, transformers and other
    packages."""
    return {
        "date": date.today().isoformat(),
        "machine": ", ".join([platform.machine(), *gpus()]),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "seed": seed,
        "commit": commit(),
        "versions": {name: version(name) for name in ("torch", "transformers", *packages)},
    }


def gpus() -> list[str]:
    """The name of each GPU."""
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def processor() -> str | None:
    """The processor's name as Linux gives it; `None` where it gives none."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def commit() -> str:
    """The commit of the work tree, with `-dirty` if files other than results differ from it."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=True)

    changed = git("status", "--porcelain", "--", ":/", ":(top,exclude,glob)benchmarks/**/results/**").stdout
    return git("rev-parse", "--short=12", "HEAD").stdout.strip() + ("-dirty" if changed else "")


def significant(value: float) -> float:
    """A value with four significant digits."""
    return float(f"{value:.4g}")


def resident_megabytes(field: str = "VmRSS") -> float:
    """Memory of this process: `VmRSS` is the current value, `VmHWM` the highest so far. Linux only."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def added_peak(function: Callable[[], object]) -> float:
    """The peak memory, in megabytes, that a call adds to this process."""
    before = resident_megabytes()
    function()
    return resident_megabytes("VmHWM") - before


def in_new_process(function: Callable[[], Value], threads: int) -> Value:
    """
    What a function returns in a new process.

    Args:
        function (`Callable`): A function of a module, or a `partial` of one.
        threads (`int`): Threads of torch in the new process.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once for all new processes
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_prepared, function, threads).result()


def _prepared(function: Callable[[], Value], threads: int) -> Value:
    torch.set_num_threads(threads)
    disable_progress_bar()
    return function()
