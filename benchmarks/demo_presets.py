"""
The questions that `m3bert demo` offers: how many of the first five documents the look-up shares with the full model,
and in what part of its time.

    m3bert quickstart
    python -m benchmarks.demo_presets --threads 1              # a minute
    python -m benchmarks.demo_presets --threads 1 --quick      # fewer rounds

Encoder: that of the quickstart, in `runs/quickstart/model`. Documents: the 800 of the demo, embedded by all layers and
stored in int8 for the look-up, in float32 for the full model. Times are those of one question, embedded and searched,
as 10th percentiles of calls in turn. With one thread, other work on the machine slows the full model down least.
`fewest_shared` and `highest_share_of_time` are the worst over the questions. The last line printed is a JSON object.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks._measure import Benchmark, Bounds, Run, at_least, at_most
from m3bert.commands.command import run_command
from m3bert.commands.demo import PRESETS, ROUNDS, library, load, search
from m3bert.commands.encoder import EncoderArguments
from m3bert.evaluation.latency import milliseconds_in_turn
from m3bert.trainers import Granularity, Grid


BOUNDS: Bounds = {"fewest_shared": at_least(4), "highest_share_of_time": at_most(0.1)}


def measure(run: Run) -> dict[str, float]:
    encoder = load(EncoderArguments())
    corpus, full = library(encoder), encoder.grid.full
    sizes = {"look-up": Granularity(0, full.dim, "int8"), "full model": full}
    readers = {name: replace(encoder, grid=Grid.product([g.layer], [full.dim])) for name, g in sizes.items()}
    shared, shares = [], []
    for question in PRESETS:
        encode = {name: partial(reader.encode, [question]) for name, reader in readers.items()}
        ms = milliseconds_in_turn(encode, ROUNDS if run.quick else 10 * ROUNDS)
        found = {name: search(encoder, corpus, encode[name](), g, ms[name]) for name, g in sizes.items()}
        rows = [{*its.rows} for its in found.values()]
        shared.append(len(rows[0] & rows[1]))
        run.record(question, {"shared": shared[-1]}, "documents")
        times = run.record(question, {name: its.ms for name, its in found.items()}, "milliseconds")
        shares.append(times["look-up"] / times["full model"])
    return {"fewest_shared": min(shared), "highest_share_of_time": max(shares)}


if __name__ == "__main__":
    benchmark = Benchmark("demo_presets", __doc__, BOUNDS, measure, packages=("faiss-cpu", "tokenizers"))
    run_command(benchmark.main)
