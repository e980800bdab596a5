"""
Scoring a whole grid against encoding once: STS-B's test set, every layer of the real encoder (extra `quickstart`) x
six dims, from texts to 36 Spearman correlations. Needs M3BERT_DATA.

    python -m benchmarks.grid_evaluation              # three minutes on two cores
    python -m benchmarks.grid_evaluation --quick      # 128 pairs, three layers x three dims

The last line printed is a JSON object. `grid_vs_one_encode`: time of all 36 scores relative to encoding the same texts
once at full depth and width with the same settings. `grid_vs_each_alone`: the same time relative to loading and
scoring each granularity alone. `largest_difference`: the largest difference between a granularity's score from the
grid and its score when loaded alone.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most
from m3bert.commands.command import run_command
from m3bert.commands.convert import convert
from m3bert.commands.sources import data_folder, default_base
from m3bert.evaluation import STS, GridEncoder, find_task, score_grid
from m3bert.evaluation.readers import load_task
from m3bert.modeling import M3BertModel
from m3bert.trainers import Granularity, Grid, NestedStates


BOUNDS: Bounds = {
    "grid_vs_one_encode": at_most(1.25),
    "grid_vs_each_alone": None,
    "largest_difference": at_most(1e-5),
    "spearman_full": None,
}
FULL = (Grid.parse("1,2,3,4,5,6 x 16,32,64,128,256,384"), None, 7)  # grid, pairs, rounds
QUICK = (Grid.parse("2,4,6 x 32,128,384"), 128, 3)
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


def measure(run: Run) -> dict[str, float]:
    grid, pairs, rounds = QUICK if run.quick else FULL
    torch.manual_seed(SEED)
    evaluator = load_task(find_task("stsb"), data_folder())
    assert isinstance(evaluator, STS)
    evaluator = STS({side: texts[:pairs] for side, texts in evaluator.texts.items()}, evaluator.scores[:pairs])
    tokenizer = AutoTokenizer.from_pretrained(default_base())

    model = AutoModel.from_pretrained(default_base())
    whole = GridEncoder(model, tokenizer, grid, **SETTINGS)
    full = GridEncoder(model, tokenizer, Grid((grid.full,)), **SETTINGS)
    texts = list(dict.fromkeys([*evaluator.texts["sentence1"], *evaluator.texts["sentence2"]]))
    seconds = run.time(
        f"{len(texts):,} texts, {len(grid)} granularities",
        {"one encode": lambda: full.encode(texts), "grid": lambda: score_grid(whole, evaluator)},
        rounds,
    )

    with tempfile.TemporaryDirectory() as folder:
        elastic = convert(default_base(), folder)
        scores = score_grid(GridEncoder(elastic, AutoTokenizer.from_pretrained(folder), grid, **SETTINGS), evaluator)
        start = time.perf_counter()
        alone = {g: score_alone(Path(folder), g, evaluator) for g in grid}
        each_alone = run.record("each granularity loaded alone", {"all": time.perf_counter() - start})["all"]
    return {
        "grid_vs_one_encode": seconds["grid"] / seconds["one encode"],
        "grid_vs_each_alone": seconds["grid"] / each_alone,
        "largest_difference": max(abs(scores[g]["spearman"] - alone[g]) for g in grid),
        "spearman_full": scores[grid.full]["spearman"],
    }


BENCHMARK = Benchmark("grid_evaluation", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
