"""What benchmarks share: memory measurements, and the description of a run that every result includes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import date


def resident_megabytes(field: str = "VmRSS") -> float:
    """Memory of this process: `VmRSS` is the current value, `VmHWM` the highest so far. Linux only."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def report_peak(function: Callable[[], object]) -> None:
    """Print the peak memory, in megabytes, that a call adds to this process."""
    before = resident_megabytes()
    function()
    print(resident_megabytes("VmHWM") - before)


def peak_megabytes(module: str, name: str, *options: str) -> float:
    """Peak memory of a variant in a separate process: `python -m MODULE --memory NAME` (see `report_peak`)."""
    command = [sys.executable, "-m", module, "--memory", name, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def about(seed: int) -> dict[str, object]:
    """Date, machine and seed of a run."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {"date": date.today().isoformat(), "machine": machine, "seed": seed}
