"""
Matryoshka distillation inside one model (m3BERT, Table 5) at our scale: a small m3BERT is pretrained with
multigranular MLM, then trained for the same number of further steps with and without distillation.

    python -m benchmarks.reproduction.matryoshka_distillation --pretrain    # takes 40 minutes on one CPU core
    python -m benchmarks.reproduction.matryoshka_distillation --seeds 0 1   # adds to the results file
    python -m benchmarks.reproduction.matryoshka_distillation --table       # print the tables

Model: all-MiniLM-L6-v2 (extra `quickstart`) converted to m3BERT, with the MLM projection initialised from its token
embeddings; layers 2, 4, 6 x dims 16, 32, 64, 384. Text: `text-english` of `M3BERT_DATA`, in pieces of 64 tokens; 4,000
lines are held out. The student is 2x32, the shallowest layer at a small dim, like the paper's 4x64 of twelve layers.
Constant learning rate, bfloat16. Measures at every granularity: the cross-entropy of masked tokens of held-out text,
with the same masks for all runs; and the Spearman correlation on STS-B, STS13 and STS16 after the same fine-tuning on
pairs (MRL over the whole grid).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, set_seed

from benchmarks.reproduction.backbones import corpus, pieces, untrained_head
from benchmarks.reproduction.study import Run, Scores, add_results, print_table
from benchmarks.reproduction.training_data import pair_dataset
from modeling_m3bert import M3BertForMaskedLM
from scripts.command import run_command
from scripts.sources import data_folder, default_base
from trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    Granularity,
    Grid,
    MatryoshkaDistillationConfig,
    MatryoshkaDistillationTrainer,
    MultigranularMLMConfig,
    MultigranularMLMTrainer,
)
from trainers.evaluation import GridEncoder, evaluate_grid, find_tasks


GRID = Grid.parse("2,4,6 x 16,32,64,384")
HELD_OUT_LINES = 4000
HELD_OUT_TEXTS = 800
RESULTS = Path(__file__).with_name("results") / "matryoshka_distillation.json"
MASKED = "masked tokens"
TESTS = ["stsb", "sts13", "sts16"]
RUNS = {
    "MLM": Run(MultigranularMLMConfig, MultigranularMLMTrainer),
    **{
        pairs: Run(MatryoshkaDistillationConfig, MatryoshkaDistillationTrainer, {"pairs": pairs})
        for pairs in ("6x384>all", "6x32>2x32", "6x384>2x32")
    },
    "6x384>2x32, forward": Run(
        MatryoshkaDistillationConfig,
        MatryoshkaDistillationTrainer,
        {"pairs": "6x384>2x32", "distillation_direction": "forward"},
    ),
}
# Shared by the pretraining and all runs that continue it.
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 32,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "bf16": True,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
}


def pretrain(folder: Path, texts: list[str], tokenizer: Any, steps: int) -> None:
    """Train with multigranular MLM and save the model in `folder`."""
    set_seed(0)
    args = MultigranularMLMConfig(
        output_dir=str(folder), max_steps=steps, warmup_steps=200, logging_steps=100, save_steps=500, **SETTINGS
    )
    trainer = MultigranularMLMTrainer(untrained_head(GRID), args, tokenizer, pieces(texts, tokenizer))
    trainer.train()
    trainer.save_model()


def masked_loss(model: Any, tokenizer: Any, texts: Dataset, folder: Path) -> Scores:
    """Cross-entropy of masked held-out tokens at every granularity."""
    args = MultigranularMLMConfig(
        output_dir=str(folder), per_device_eval_batch_size=50, bf16=True, use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    trainer = MultigranularMLMTrainer(model, args, tokenizer, eval_dataset=texts)
    set_seed(0)  # the same masks for all runs
    metrics = trainer.evaluate()
    return {g: metrics[f"eval_mlm_{g}"] for g in GRID}


def similarity(model: Any, tokenizer: Any, data: Path, seed: int) -> dict[str, Scores]:
    """Spearman correlation on each STS test set at every granularity, after fine-tuning on pairs."""
    dataset = pair_dataset(data)
    settings: dict[str, Any] = {
        "learning_rate": 5e-5,
        "lr_scheduler_type": "linear",
        "per_device_train_batch_size": 64,
    }
    encoder = model.model
    set_seed(seed)
    Run(ContrastiveConfig, ContrastiveTrainer).train(
        encoder, tokenizer, dataset, grid=str(GRID), max_steps=40, warmup_steps=0.1, max_length=32, bf16=True,
        use_cpu=True, seed=seed, **settings,
    )  # fmt: skip
    grid_encoder = GridEncoder(encoder.to(torch.bfloat16), tokenizer, GRID, batch_size=128, max_length=64)
    results = evaluate_grid(grid_encoder, find_tasks(TESTS), data)
    return {name: results.quality([name]) for name in TESTS}


def print_tables(results: dict[str, Any]) -> None:
    print_table(results, ["pretrained", *RUNS], [MASKED], GRID, percent=False, best=min)
    print_table(results, ["pretrained", *RUNS], TESTS, GRID)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", action="store_true", help="pretrain the model, and train no run")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/matryoshka_distillation"), help="folder of the model"
    )
    parser.add_argument("--pretraining-steps", type=int, default=1500, help="steps of pretraining")
    parser.add_argument("--steps", type=int, default=200, help="steps of every run after it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds to train with")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=list(RUNS), help="runs to train")
    parser.add_argument("--table", action="store_true", help="print the tables of the results file")
    options = parser.parse_args(arguments)
    if options.table:
        print_tables(json.loads(RESULTS.read_text(encoding="utf-8")))
        return
    data, tokenizer = data_folder(), AutoTokenizer.from_pretrained(default_base())
    texts = corpus(data)
    training, held_out = texts[HELD_OUT_LINES:], texts[:HELD_OUT_LINES]
    pretrained = options.folder / "pretrained"
    if options.pretrain:
        pretrain(pretrained, training, tokenizer, options.pretraining_steps)
        return

    test_texts = pieces(held_out[:HELD_OUT_TEXTS], tokenizer)
    about = {
        "command": "python -m benchmarks.reproduction.matryoshka_distillation",
        "settings": {name: getattr(options, name) for name in ("pretraining_steps", "steps")},
        "metric": "cross-entropy of masked tokens in nats (of 1, not percent), and Spearman correlation after "
        "fine-tuning",
    }
    results = add_results(RESULTS, {}, about)
    if "pretrained" not in results["scores"]:
        model = M3BertForMaskedLM.from_pretrained(pretrained)
        scores = {MASKED: masked_loss(model, tokenizer, test_texts, options.folder)}
        scores |= similarity(model, tokenizer, data, 0)
        results = add_results(RESULTS, {"pretrained": {"0": scores}}, about)
    dataset = pieces(training, tokenizer)
    for seed, name in itertools.product(options.seeds, options.runs):
        set_seed(seed)
        model, start = M3BertForMaskedLM.from_pretrained(pretrained), time.perf_counter()
        settings = {**SETTINGS, "max_steps": options.steps, "warmup_steps": 20, "seed": 1000 + seed}
        RUNS[name].train(model, tokenizer, dataset, **settings)
        seconds = time.perf_counter() - start
        scores = {MASKED: masked_loss(model, tokenizer, test_texts, options.folder)}
        student = scores[MASKED][Granularity(2, 32)]
        print(f"seed {seed} {name} ({seconds:.0f} s): 2x32 {student:.4f}", flush=True)
        scores |= similarity(model, tokenizer, data, seed)
        results = add_results(RESULTS, {name: {str(seed): scores}}, about)
    print_tables(results)


if __name__ == "__main__":
    run_command(main)
