"""
IBKD and its baselines (IBKD, Tables 2 to 4), at our scale: all-MiniLM-L6-v2 teaches its own first three layers.

    python -m benchmarks.reproduction.ibkd --seeds 0 1
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer, set_seed

from benchmarks.reproduction._study import Run, Scores, add_results, held_out_sentences, print_table
from scripts._command import run_command
from scripts._sources import data_folder, default_base
from modeling_m3bert import convert_to_m3bert
from trainers import (
    Grid,
    IBKDConfig,
    IBKDFinetuningConfig,
    IBKDFinetuningTrainer,
    IBKDTrainer,
    Teacher,
)
from trainers.evaluation import STS, GridEncoder, Task, evaluate_grid, find_tasks, read_rows


DIMS = [384]
STS_TESTS = ["stsb", "sts12", "sts13", "sts14", "sts15", "sts16", "sick"]
RETRIEVAL_TESTS = ["cranfield", "npl"]


def unlabelled(data: Path) -> list[str]:
    """Sentences of SNLI, captions of multi30k, news, each once, none of an evaluation set."""
    held_out = held_out_sentences(
        row
        for name, split in [("stsb", "dev"), ("sick", "dev"), *((name, "test") for name in STS_TESTS)]
        for row in read_rows(data / name / f"{split}.jsonl.gz")
    )
    draw = random.Random(0)
    nli = {
        row[side].strip() for row in read_rows(data / "snli" / "train.jsonl.gz") for side in ("sentence1", "sentence2")
    }
    captions = {
        caption.strip()
        for row in read_rows(data / "multi30k-captions" / "train.jsonl.gz")
        for caption in row["captions"]
    }
    import gzip

    news = set()
    with gzip.open(data / "text-english" / "news.txt.gz", "rt", encoding="utf-8") as file:
        news = {line.strip() for line in file if line.strip() and len(line.split()) <= 20}
    texts = []
    for found, count in ((nli, 24000), (captions, 12000), (news, 24000)):
        own = sorted(text for text in found if text.lower() not in held_out)
        texts += draw.sample(own, min(count, len(own)))
    texts = sorted(set(texts))
    draw.shuffle(texts)
    return texts


def student() -> Any:
    encoder = convert_to_m3bert(AutoModel.from_pretrained(default_base()))
    encoder.layers = encoder.layers[:3]
    encoder.config.num_hidden_layers = 3
    return encoder


BETA = {"method": "ibkd"}
RUNS = {
    "MSE": {"method": "mse"},
    "CRD": {"method": "crd"},
    "CKD": {"method": "ckd"},
    "IBKD": {"method": "ibkd"},
    "IBKD norm": {"method": "ibkd", "hsic_normalize": True},
    "IBKD norm 10": {"method": "ibkd", "hsic_normalize": True, "beta": 10.0},
    "IBKD norm 100": {"method": "ibkd", "hsic_normalize": True, "beta": 100.0},
    "IBKD gamma .01": {"method": "ibkd", "hsic_gamma": 0.01},
    "IBKD linear": {"method": "ibkd", "hsic_kernel": "linear"},
    "IBKD linear 10": {"method": "ibkd", "hsic_kernel": "linear", "beta": 10.0},
}


def measure(model, tokenizer, data, tasks):
    grid = Grid.product([model.config.num_hidden_layers], DIMS)
    encoder = GridEncoder(model.to(torch.bfloat16), tokenizer, grid, batch_size=128, max_length=128)
    results = evaluate_grid(encoder, tasks, data)
    return {task.name: results.quality([task.name]) for task in tasks}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--runs", nargs="+", default=list(RUNS))
    options = parser.parse_args(arguments)
    data = data_folder()
    texts = unlabelled(data)
    print(len(texts), flush=True)
    teacher = Teacher(default_base(), max_length=64, batch_size=128).embed(
        texts, "runs/teachers", description="Teacher"
    )
    tokenizer = AutoTokenizer.from_pretrained(default_base())
    tasks = [
        Task("stsb-dev", STS, folder="stsb", splits=("dev",)),
        Task("sick-dev", STS, folder="sick", splits=("dev",)),
    ]
    m = student()
    s = measure(m, tokenizer, data, tasks)
    print("untouched", {k: list(v.values()) for k, v in s.items()}, flush=True)
    for seed, name in itertools.product(options.seeds, options.runs):
        set_seed(seed)
        model, start = student(), time.perf_counter()
        Run(IBKDConfig, IBKDTrainer, RUNS[name]).train(
            model,
            tokenizer,
            Dataset.from_dict({"text": texts}),
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.lr,
            max_steps=options.steps,
            warmup_steps=0.05,
            lr_scheduler_type="cosine",
            max_length=64,
            bf16=True,
            use_cpu=True,
            seed=seed,
            objects={"teacher": teacher},
        )
        seconds = time.perf_counter() - start
        s = measure(model.eval(), tokenizer, data, tasks)
        print(
            seed,
            name,
            f"({seconds:.0f} s)",
            {k: [round(100 * x, 2) for x in v.values()] for k, v in s.items()},
            flush=True,
        )


if __name__ == "__main__":
    run_command(main)
