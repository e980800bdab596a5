"""
Run benchmarks one after another, each in its own process, and print their figures beside the bounds:

    python -m benchmarks --quick                  # within ten minutes on two cores
    python -m benchmarks                          # an hour or two
    python -m benchmarks masked_lm_head peers     # only these

Bounds are for full sizes: a quick run marks a missed bound but does not fail. Otherwise the command fails if a bound
is missed, and always if a benchmark does not end well. Without --threads, the masked-LM head also runs with one
thread, for which it has its own bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from benchmarks._measure import QUICK, Bounds, add_options, results_file
from m3bert.commands.command import argument_parser, run_command
from m3bert.hub_cards.tables import markdown


NAMES = (
    "masked_lm_head",
    "packing",
    "objectives",
    "elastic_loading",
    "static_query",
    "quantised_search",
    "index_engines",
    "mistakes",
    "peers",
)
ONE_THREAD = "masked_lm_head"
MISSED, FAILED = "MISSED", "FAILED"
Row = list[str]


def figure_rows(name: str, result: Mapping[str, Any], bounds: Bounds) -> list[Row]:
    """One row per figure: benchmark, figure, value, bound, and whether the bound holds."""
    rows = []
    for figure, bound in bounds.items():
        value, threads = result[figure], result["threads"]
        limit = verdict = ""
        if bound is not None:
            limit = f"{bound.relation} {bound.with_threads(threads):g}"
            verdict = "ok" if bound.holds(value, threads) else MISSED
        rows.append([name, figure, f"{value:.3g}", limit, verdict])
    return rows


def run_one(name: str, quick: bool, threads: int | None) -> list[Row]:
    """Run a benchmark in its own process, which prints its progress, and read its results file."""
    label = name if threads is None else f"{name} --threads {threads}"
    print(f"== {label}", flush=True)
    options = [*(["--quick"] if quick else []), *(["--threads", str(threads)] if threads is not None else [])]
    start = time.perf_counter()
    status = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options]).returncode
    print(f"== {label}: {time.perf_counter() - start:.0f} s\n", flush=True)
    if status != 0:
        return [[label, "", "", "", FAILED]]
    result = json.loads(results_file(name, quick, threads).read_text(encoding="utf-8"))
    return figure_rows(label, result, import_module(f"benchmarks.{name}").BOUNDS)


def succeeded(rows: Sequence[Row], quick: bool) -> bool:
    """Whether every benchmark ended and, unless the run is quick, every bound holds."""
    return not any(row[-1] == FAILED or (row[-1] == MISSED and not quick) for row in rows)


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"benchmarks to run, of {', '.join(NAMES)}")
    add_options(parser)
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in NAMES]:
        raise ValueError(f"There is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}.")
    rows: list[Row] = []
    for name in options.names or NAMES:
        rows += run_one(name, options.quick, options.threads)
        if name == ONE_THREAD and options.threads is None:
            rows += run_one(name, options.quick, 1)
    if options.quick:
        print(f"{QUICK} A miss does not fail this command.\n")
    print(markdown(["benchmark", "figure", "value", "bound", "holds"], rows, words=2))
    if not succeeded(rows, options.quick):
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
