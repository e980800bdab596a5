"""
Fitting the exits of all layers against encoding the texts once.

    python -m benchmarks.exit_fit
    python -m benchmarks.exit_fit --quick       # 400 texts instead of 4,096

The encoder is that of the extra `quickstart`, the texts are the documentation of Python's standard library. The fit is
timed whole, and inside it the encoding: tokens, layers and pooling. What the fit adds is the rest. Medians over
rounds. The last line printed is a JSON object: `fit_vs_encode` is the time beyond encoding, divided by the time of
encoding. A part of the rest does not grow with the texts, so more texts have a smaller ratio.
"""

from __future__ import annotations

import statistics
import time
from typing import Any
from unittest.mock import patch

import torch

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most
from scripts.command import run_command
from scripts.convert import converted
from scripts.sources import default_base
from trainers import fit_exits
from trainers.data.stdlib_docs import stdlib_pairs
from trainers.exits.passes import RawStates


BOUNDS: Bounds = {"fit_vs_encode": at_most(0.05)}
FULL, QUICK = (4096, 3), (400, 1)  # texts, rounds


def measure(run: Run) -> dict[str, float]:
    texts, rounds = QUICK if run.quick else FULL
    torch.manual_seed(SEED)
    model, tokenizer = converted(default_base())
    every = [text for pair in stdlib_pairs() for text in (pair.summary, pair.body)][:texts]
    encoding = 0.0
    encode = RawStates.pooled

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal encoding
        start = time.perf_counter()
        pooled = encode(*args, **kwargs)
        encoding += time.perf_counter() - start
        return pooled

    seconds: dict[str, list[float]] = {"encode": [], "beyond": []}
    fit_exits(model, tokenizer, every[:400], max_length=128)  # warm up
    with patch.object(RawStates, "pooled", timed):
        for _ in range(rounds):
            encoding, start = 0.0, time.perf_counter()
            fit_exits(model, tokenizer, every, max_length=128)
            seconds["encode"].append(encoding)
            seconds["beyond"].append(time.perf_counter() - start - encoding)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    run.record(f"exits fitted to {len(every):,} texts", medians)
    return {"fit_vs_encode": medians["beyond"] / medians["encode"]}


BENCHMARK = Benchmark("exit_fit", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
