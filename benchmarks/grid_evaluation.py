"""
Scoring a whole grid against encoding once: STS-B's test set, every layer of the real encoder (extra `quickstart`) x
six dims, from texts to 36 Spearman correlations.

    python -m benchmarks.grid_evaluation                  # takes three minutes on two cores; needs M3BERT_DATA

The last line printed is a JSON object. `grid_vs_one_encode`: time of all 36 scores relative to encoding the same texts
once at full depth and width with the same settings. `grid_vs_each_alone`: the same time relative to loading and
scoring each granularity alone. `largest_difference`: the largest difference between a granularity's score from the
grid and its score when loaded alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, set_seed
from transformers.utils import logging

from benchmarks._measure import about
from modeling_m3bert import M3BertModel
from scripts.command import run_command
from scripts.convert import convert
from scripts.sources import data_folder, default_base
from trainers import Granularity, Grid, NestedStates
from trainers.evaluation import STS, GridEncoder, find_task, score_grid
from trainers.evaluation.latency import seconds_in_turn
from trainers.evaluation.readers import load_task


GRID = Grid.parse("1,2,3,4,5,6 x 16,32,64,128,256,384")
SETTINGS: dict[str, Any] = {"batch_size": 64, "max_length": 128}


@torch.no_grad()
def score_alone(folder: Path, granularity: Granularity, evaluator: STS) -> float:
    """The score of one granularity, loaded alone from the checkpoint; batches hold texts of similar length."""
    model = M3BertModel.from_pretrained(folder, output_layer=granularity.layer, output_dim=granularity.dim).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sides = [evaluator.texts[side] for side in ("sentence1", "sentence2")]
    texts = list(dict.fromkeys([*sides[0], *sides[1]]))
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]), reverse=True)
    vectors = torch.empty(len(texts), granularity.dim)
    for start in range(0, len(texts), SETTINGS["batch_size"]):
        rows = order[start : start + SETTINGS["batch_size"]]
        inputs = tokenizer(
            [texts[row] for row in rows],
            padding=True,
            truncation=True,
            max_length=SETTINGS["max_length"],
            return_tensors="pt",
        )
        states = NestedStates({0: model(**inputs).last_hidden_state}, inputs["attention_mask"])
        vectors[rows] = states.pooled(0)
    position = {text: row for row, text in enumerate(texts)}
    first, second = (vectors[[position[text] for text in side]] for side in sides)
    return evaluator.score({"sentence1": first, "sentence2": second})["spearman"]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timings of each variant")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    options = parser.parse_args(arguments)
    set_seed(options.seed)
    logging.disable_progress_bar()
    evaluator = load_task(find_task("stsb"), data_folder())
    assert isinstance(evaluator, STS)
    tokenizer = AutoTokenizer.from_pretrained(default_base())

    model = AutoModel.from_pretrained(default_base())
    whole = GridEncoder(model, tokenizer, GRID, **SETTINGS)
    full = GridEncoder(model, tokenizer, Grid((GRID.full,)), **SETTINGS)
    texts = list(dict.fromkeys([*evaluator.texts["sentence1"], *evaluator.texts["sentence2"]]))
    seconds = seconds_in_turn(
        {"one encode": lambda: full.encode(texts), "grid": lambda: score_grid(whole, evaluator)}, options.rounds
    )

    with tempfile.TemporaryDirectory() as folder:
        elastic = convert(default_base(), folder)
        scores = score_grid(GridEncoder(elastic, AutoTokenizer.from_pretrained(folder), GRID, **SETTINGS), evaluator)
        start = time.perf_counter()
        alone = {g: score_alone(Path(folder), g, evaluator) for g in GRID}
        each_alone = time.perf_counter() - start
    for g in GRID:
        print(f"{g}: {scores[g]['spearman']:.6f}, loaded alone {alone[g]:.6f}")
    result = {
        "grid_vs_one_encode": round(seconds["grid"] / seconds["one encode"], 3),
        "grid_vs_each_alone": round(seconds["grid"] / each_alone, 3),
        "largest_difference": max(abs(scores[g]["spearman"] - alone[g]) for g in GRID),
        "spearman_full": round(scores[GRID.full]["spearman"], 4),
        "seconds": {name: round(value, 2) for name, value in seconds.items()} | {"each alone": round(each_alone, 1)},
        "texts": len(texts),
        "granularities": len(GRID),
        "threads": torch.get_num_threads(),
        **about(options.seed),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    run_command(main)
