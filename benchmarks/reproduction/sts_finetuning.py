"""
Fine-tuning a real encoder on pairs with every contrastive objective: how it changes semantic similarity at every layer
and dim of a grid.

    python -m benchmarks.reproduction.sts_finetuning                  # takes half an hour on two CPU cores
    python -m benchmarks.reproduction.sts_finetuning --seeds 1        # adds another seed to the results file
    python -m benchmarks.reproduction.sts_finetuning --table          # print the tables

Encoder: all-MiniLM-L6-v2 (extra `quickstart`), mean pooling. Pairs: entailed sentences of SNLI, and two captions of
the same image of multi30k, without pairs that have a sentence of an evaluation set. Tests: STS-B, STS12 to STS16 and
SICK, from the data sets in `M3BERT_DATA`. All objectives see the same pairs in the same order, with the same learning
rate, batch size and number of steps, which were checked on STS-B's development set (`--development`, MRL over three
layers and ESE). MRL trains the dims of the full depth, as its papers do; a second run, the dims of three layers.
SimCSE trains the full size alone; ESE and 2DMSE train three layers; Starbucks trains its own sizes, 1x16, 2x32, 3x64,
4x128, 5x256 and 6x384, and no other granularity of the table. NOTES.md lists the other runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from transformers import AutoModel, AutoTokenizer, set_seed

from benchmarks.reproduction.study import Run, Scores, add_results, print_table
from benchmarks.reproduction.training_data import STS_TESTS, pair_dataset
from scripts.command import run_command
from scripts.sources import data_folder, default_base
from trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    EspressoConfig,
    EspressoTrainer,
    Granularity,
    Grid,
    Matryoshka2dConfig,
    Matryoshka2dTrainer,
    SimCSEConfig,
    SimCSETrainer,
    StarbucksConfig,
    StarbucksTrainer,
)
from trainers.evaluation import GridEncoder, Task, evaluate_grid, find_tasks


GRID = Grid.parse("2,4,6 x 16,32,64,128,256,384")
SIZES = "1x16,2x32,3x64,4x128,5x256,6x384"
TESTS = list(STS_TESTS)
RESULTS = Path(__file__).with_name("results") / "sts_finetuning.json"
RUNS = {
    "SimCSE": Run(SimCSEConfig, SimCSETrainer, {"unsupervised": False}),
    "MRL": Run(ContrastiveConfig, ContrastiveTrainer, {"grid": "6 x 16,32,64,128,256,384"}),
    "MRL, 3 layers": Run(ContrastiveConfig, ContrastiveTrainer, {"grid": str(GRID)}),
    "ESE": Run(EspressoConfig, EspressoTrainer, {"grid": str(GRID)}),
    "2DMSE": Run(Matryoshka2dConfig, Matryoshka2dTrainer, {"grid": str(GRID)}),
    "Starbucks": Run(StarbucksConfig, StarbucksTrainer, {"grid": SIZES}),
}


def measure(model: Any, tokenizer: Any, data: Path, tasks: list[Task]) -> dict[str, Scores]:
    """Spearman correlation on each data set, at every granularity."""
    results = evaluate_grid(GridEncoder(model, tokenizer, GRID, max_length=128), tasks, data)
    return {task.name: results.quality([task.name]) for task in tasks}


def average(scores: dict[str, Scores]) -> Scores:
    return {g: statistics.mean(table[g] for table in scores.values()) for g in GRID}


def print_tables(results: dict[str, Any]) -> None:
    for tests in (["stsb"], TESTS):
        print_table(results, ["untouched", *RUNS], tests, GRID)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per batch")
    parser.add_argument("--learning-rate", type=float, default=5e-5, help="of AdamW")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds to train with")
    parser.add_argument("--objectives", nargs="+", default=list(RUNS), choices=list(RUNS), help="runs to train")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file to add the scores to")
    parser.add_argument("--development", action="store_true", help="score STS-B's development set and write nothing")
    parser.add_argument("--table", action="store_true", help="print the tables of the results file")
    options = parser.parse_args(arguments)
    if options.table:
        print_tables(json.loads(options.results.read_text(encoding="utf-8")))
        return

    data, base = data_folder(), default_base()
    tasks = [Task("stsb-dev", "sts", folder="stsb", splits=("dev",))] if options.development else find_tasks(TESTS)
    dataset = pair_dataset(data)
    print(f"{len(dataset)} pairs")
    tokenizer = AutoTokenizer.from_pretrained(base)

    untouched = measure(AutoModel.from_pretrained(base), tokenizer, data, tasks)
    scores: dict[str, dict[str, Any]] = {"untouched": {"0": untouched}}
    seconds: dict[str, float] = {}
    for seed in options.seeds:
        for name in options.objectives:
            set_seed(seed)
            model, start = AutoModel.from_pretrained(base), time.perf_counter()
            RUNS[name].train(
                model,
                tokenizer,
                dataset,
                per_device_train_batch_size=options.batch_size,
                learning_rate=options.learning_rate,
                max_steps=options.steps,
                warmup_steps=0.1,
                lr_scheduler_type="linear",
                max_length=64,
                seed=seed,
            )
            seconds[name] = time.perf_counter() - start
            scores.setdefault(name, {})[str(seed)] = measured = measure(model, tokenizer, data, tasks)
            means = average(measured)
            line = " ".join(f"{dim}:{100 * means[Granularity(6, dim)]:.1f}" for dim in GRID.dims)
            print(f"seed {seed} {name} ({seconds[name]:.0f} s), 6 layers: {line}", flush=True)
    if options.development:
        means = average(untouched)
        print("untouched", " ".join(f"{dim}:{100 * means[Granularity(6, dim)]:.1f}" for dim in GRID.dims))
        return
    settings = {name: getattr(options, name) for name in ("steps", "batch_size", "learning_rate")}
    about = {
        "command": "python -m benchmarks.reproduction.sts_finetuning",
        "settings": settings | {"pairs": len(dataset)},
        "metric": "Spearman correlation of cosines, mean pooling, test sets",
    }
    print_tables(add_results(options.results, scores, about))


if __name__ == "__main__":
    run_command(main)
