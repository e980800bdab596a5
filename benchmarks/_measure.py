"""Memory for benchmarks, and what each says of its run. Times are `trainers.evaluation.seconds_in_turn`."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import date


def resident_megabytes(field: str = "VmRSS") -> float:
    """Memory of this process: `VmRSS` now, `VmHWM` the most it ever was. Linux only."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def report_peak(function: Callable[[], object]) -> None:
    """Print by how many megabytes a call raises this process's memory at most."""
    before = resident_megabytes()
    function()
    print(resident_megabytes("VmHWM") - before)


def peak_megabytes(module: str, name: str, *options: str) -> float:
    """Peak memory of a variant in a process of its own, `python -m MODULE --memory NAME` (see `report_peak`)."""
    command = [sys.executable, "-m", module, "--memory", name, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def about(seed: int) -> dict[str, object]:
    """What every result says of its run."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {"date": date.today().isoformat(), "machine": machine, "seed": seed}
