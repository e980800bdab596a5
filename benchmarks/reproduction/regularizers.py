"""
MIPIC and MIC against SimCSE, MRL and ESE, with the papers' sources and protocol at our scale: how they change the
prefixes of an encoder's last layer. `m3bert paper_corpus` writes a corpus of the papers' sizes.

    python -m benchmarks.reproduction.regularizers --encoder reinitialised --seeds 0 1 2
    python -m benchmarks.reproduction.regularizers --encoder reinitialised --pooling cls --steps 300 --runs MRL
    python -m benchmarks.reproduction.regularizers --encoder contrastive --steps 300 --runs MRL "MIPIC (paper)"
    python -m benchmarks.reproduction.regularizers --encoder reinitialised --terms       # each term before training
    python -m benchmarks.reproduction.regularizers --encoder reinitialised --table       # print the tables

Encoders: `contrastive` is all-MiniLM-L6-v2 (extra `quickstart`), which was already trained on pairs; `reinitialised`
is its first four layers with the fourth reinitialised, which were never trained as an embedding. Corpus: sentences of
the training sets of Banking77, TweetEval (sentiment), STS-B, SICK, MRPC and WiC, up to 4,000 per set, without those
that occur in an evaluation set. Two dropout views per text, batches of 16, cosine schedule, bfloat16; all runs with
the same seed see the same texts in the same order. Tests: seven of semantic similarity, three of classification, three
of pairs, at all dims of the last layer.

RUNS defines the runs; NOTES.md says what was tried and why.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, set_seed

from benchmarks._measure import about
from benchmarks.reproduction.backbones import contrastive, reinitialised
from benchmarks.reproduction.study import (
    Run,
    Scores,
    add_results,
    held_out_sentences,
    print_gradients,
    print_table,
)
from scripts.command import run_command
from scripts.sources import data_folder, default_base
from trainers import (
    PIC,
    SCR,
    SIA,
    SIR,
    Contrastive,
    ContrastiveConfig,
    ContrastiveTrainer,
    EspressoConfig,
    EspressoTrainer,
    Grid,
    MICConfig,
    MICTrainer,
    MIPICConfig,
    MIPICTrainer,
    Objective,
    SimCSEConfig,
    SimCSETrainer,
    TextColumnsCollator,
)
from trainers.core.states import Pooling
from trainers.evaluation import GridEncoder, Task, evaluate_grid, find_tasks
from trainers.evaluation.readers import read_rows
from trainers.objectives.pic import default_chain


DIMS = [16, 32, 64, 128, 256, 384]
GROUPS = {
    "semantic similarity": ["stsb", "sick", "sts12", "sts13", "sts14", "sts15", "sts16"],
    "classification": ["banking77", "emotion", "tweeteval-emotion"],
    "pairs": ["mrpc", "wic", "scitail"],
}
TESTS = [name for names in GROUPS.values() for name in names]
RESULTS = Path(__file__).with_name("results")
SOURCES = [
    ("banking77", "train"),
    ("tweeteval-sentiment", "train_reconstructed"),
    *((name, "train") for name in ("stsb", "sick", "mrpc", "wic")),
]
TEXTS_PER_SOURCE = 4000


def corpus(data: Path) -> list[str]:
    """The distinct training sentences, in a fixed random order."""
    held_out = held_out_sentences(
        row
        for name in TESTS
        for split in ("dev", "test")
        for file in [data / name / f"{split}.jsonl.gz"]
        if file.is_file()
        for row in read_rows(file)
    )
    draw, texts = random.Random(0), []
    for name, split in SOURCES:
        rows = read_rows(data / name / f"{split}.jsonl.gz")
        found = {row[side].strip() for row in rows for side in ("text", "sentence1", "sentence2") if side in row}
        own = sorted(text for text in found if text.lower() not in held_out)
        texts += draw.sample(own, min(TEXTS_PER_SOURCE, len(own)))
    texts = sorted(set(texts))
    draw.shuffle(texts)
    return texts


ENCODERS = {"contrastive": contrastive, "reinitialised": reinitialised}
# At about the papers' relative depth (MIC, appendix D: layers 2 and 4 of TinyBERT's 6).
ISOTROPY_LAYERS = {"contrastive": [2, 4], "reinitialised": [2, 3]}
# The papers' 2e-5, or 1e-4 where it was better for MRL on the development sets.
LEARNING_RATES = {("contrastive", "mean"): 2e-5, ("reinitialised", "mean"): 1e-4, ("reinitialised", "cls"): 2e-5}
# PIC on mean-pooled embeddings, without gradient to its targets, with projectors that learn fast enough to be useful.
CHAIN = {"pic": {"pooling": "mean", "detach_target": True}, "projector_learning_rate": 1e-3}
# SIR's uniformity alone, with a wide kernel: t = 2 mostly drives the nearest texts of a batch apart.
SPREAD = {"variation_weight": 0.0, "scale": 0.5}
CKA = {"attention_weight": 0.0}  # SIA's CKA alone
RUNS = {
    "SimCSE": Run(SimCSEConfig, SimCSETrainer),
    "MRL": Run(ContrastiveConfig, ContrastiveTrainer),
    "ESE": Run(EspressoConfig, EspressoTrainer),
    "MIPIC (paper)": Run(MIPICConfig, MIPICTrainer),
    "MIC (paper)": Run(MICConfig, MICTrainer),
    "MIPIC (ours)": Run(MIPICConfig, MIPICTrainer, {"weights": {"mrl": 1, "sia": 0.1, "pic": 1}, **CHAIN, "sia": CKA}),
    "MIC (ours)": Run(MICConfig, MICTrainer, {"gamma": 0.1, "scr": {"variance_weight": 0.0}}),
    # MIC averages MRL over the six dims: this weight gives PIC the same share as in MIPIC (ours).
    "MIC with PIC (ours)": Run(
        MICConfig,
        MICTrainer,
        {
            "gamma": 0.01,
            "weights": {"pic": 0.17},
            "scr": {"variance_weight": 0.0},
            "sir": {"variation_weight": 0.0},
            **CHAIN,
        },
    ),
}
# Tried on the development sets.
VARIANTS = {
    "CKA 1": Run(MIPICConfig, MIPICTrainer, {"weights": {"mrl": 1, "sia": 1, "pic": 0}, "sia": CKA}),
    "CKA 0.3": Run(MIPICConfig, MIPICTrainer, {"weights": {"mrl": 1, "sia": 0.3, "pic": 0}, "sia": CKA}),
    "CKA 1, all tokens": Run(
        MIPICConfig,
        MIPICTrainer,
        {"weights": {"mrl": 1, "sia": 1, "pic": 0}, "sia": {**CKA, "token_shares": [1.0] * 5}},
    ),
    "attention 1, tau 1": Run(
        MIPICConfig,
        MIPICTrainer,
        {
            "weights": {"mrl": 1, "sia": 1, "pic": 0},
            "sia": {"cka_weight": 0.0, "temperature": 1.0},
            "projector_learning_rate": 1e-3,
        },
    ),
    "PIC 0.3": Run(MIPICConfig, MIPICTrainer, {"weights": {"mrl": 1, "sia": 0, "pic": 0.3}, **CHAIN}),
    "PIC 1": Run(MIPICConfig, MIPICTrainer, {"weights": {"mrl": 1, "sia": 0, "pic": 1}, **CHAIN}),
    "PIC 0.3, CKA 0.3": Run(
        MIPICConfig, MIPICTrainer, {"weights": {"mrl": 1, "sia": 0.3, "pic": 0.3}, **CHAIN, "sia": CKA}
    ),
    "SIR 0.1": Run(MICConfig, MICTrainer, {"weights": {"scr": 0}, "gamma": 0.1}),
    "SIR 0.3": Run(MICConfig, MICTrainer, {"weights": {"scr": 0}, "gamma": 0.3}),
    "SIR 0.03": Run(MICConfig, MICTrainer, {"weights": {"scr": 0}, "gamma": 0.03}),
    "SIR 0.3, variation": Run(
        MICConfig, MICTrainer, {"weights": {"scr": 0}, "gamma": 0.3, "sir": {"uniformity_weight": 0.0}}
    ),
    "SIR 0.3, uniformity": Run(
        MICConfig, MICTrainer, {"weights": {"scr": 0}, "gamma": 0.3, "sir": {"variation_weight": 0.0}}
    ),
    "SIR 0.3, uniformity, t 0.5": Run(MICConfig, MICTrainer, {"weights": {"scr": 0}, "gamma": 0.3, "sir": SPREAD}),
    "MIC, SIR 0.02, uniformity": Run(
        MICConfig, MICTrainer, {"gamma": 0.02, "scr": {"variance_weight": 0.0}, "sir": {"variation_weight": 0.0}}
    ),
    "MIC, SIR 0.3, t 0.5": Run(MICConfig, MICTrainer, {"gamma": 0.3, "scr": {"variance_weight": 0.0}, "sir": SPREAD}),
    "MIC, SIR 0.3, t 0.5, floor": Run(MICConfig, MICTrainer, {"weights": {"scr": 0.1, "sir": 0.3}, "sir": SPREAD}),
    "SCR 0.6, floor 1": Run(
        MICConfig, MICTrainer, {"weights": {"sir": 0}, "gamma": 0.6, "scr": {"variance_weight": 1.0}}
    ),
}
AT_THE_LAST_LAYER = {"MIPIC (ours)", "MIC (ours)", "MIC with PIC (ours)", *VARIANTS}


def development_tasks(data: Path, folder: Path) -> list[Task]:
    """Write parts of development sets, or of training sets where there are none, to `folder`, and return them."""
    draw = random.Random(3)

    def write(name: str, source: str, **parts: slice) -> None:
        rows = read_rows(data / name / f"{source}.jsonl.gz")
        draw.shuffle(rows)
        (folder / name).mkdir(exist_ok=True)
        for split, part in parts.items():
            with gzip.open(folder / name / f"{split}.jsonl.gz", "wt", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows[part])

    write("banking77", "train", train=slice(2400), dev=slice(2400, 3300))
    write("emotion", "train", train=slice(1600))
    write("emotion", "dev", dev=slice(800))
    for name, size in (("stsb", 1000), ("sick", 500), ("scitail", 700)):
        write(name, "dev", dev=slice(size))
    write("mrpc", "train", dev=slice(600))
    pairs = "pair_classification"
    types = {"stsb": "sts", "sick": "sts", "scitail": pairs, "mrpc": pairs}
    types |= {"banking77": "classification", "emotion": "classification"}
    return [Task(f"{name}-dev", task_type, folder=name, splits=("dev",)) for name, task_type in types.items()]


def measure(model: Any, tokenizer: Any, data: Path, tasks: list[Task], pooling: Pooling = "mean") -> dict[str, Scores]:
    """The main score of each data set at every dim of the last layer, with weights in bfloat16."""
    grid = Grid.product([model.config.num_hidden_layers], DIMS)
    encoder = GridEncoder(model.to(torch.bfloat16), tokenizer, grid, pooling=pooling, batch_size=128, max_length=128)
    results = evaluate_grid(encoder, tasks, data)
    return {task.name: results.quality([task.name]) for task in tasks}


def average(scores: dict[str, Scores]) -> dict[int, float]:
    grid = next(iter(scores.values()))
    return {g.dim: statistics.mean(table[g] for table in scores.values()) for g in grid}


def settings_of(name: str, options: argparse.Namespace, depth: int, seed: int) -> dict[str, Any]:
    """What all runs share, and the layers of the regularisers, which depend on the encoder."""
    parts: dict[str, Any] = {}
    if name in AT_THE_LAST_LAYER:
        layers = {"layers": [depth]}
        parts = {"sia": layers, "scr": layers, "sir": layers | {"pooling": options.pooling}}
    elif name == "MIC (paper)":
        layers = {"layers": ISOTROPY_LAYERS[options.encoder]}
        parts = {"scr": layers, "sir": layers}
    # SimCSE trains the full size by default; ESE trains every layer.
    layers_of_grid = range(1, depth + 1) if name == "ESE" else [depth]
    return {
        **parts,
        "grid": None if name == "SimCSE" else str(Grid.product(layers_of_grid, DIMS)),
        "unsupervised": True,
        "pooling": options.pooling,
        "per_device_train_batch_size": options.batch_size,
        "learning_rate": LEARNING_RATES[options.encoder, options.pooling],
        "max_steps": options.steps,
        "lr_scheduler_type": "cosine",
        "max_length": 32,
        "bf16": True,
        "use_cpu": True,
        "seed": seed,
    }


def train(name: str, tokenizer: Any, texts: list[str], options: argparse.Namespace, seed: int) -> Any:
    """The encoder after training."""
    model = ENCODERS[options.encoder]()
    settings = settings_of(name, options, model.config.num_hidden_layers, seed)
    set_seed(seed)
    (RUNS | VARIANTS)[name].train(model, tokenizer, Dataset.from_dict({"text": texts}), **settings)
    return model.eval()


def terms_alone(grid: Grid, layers: list[int]) -> dict[str, Objective]:
    """Each term of MIPIC and MIC alone, with its paper's settings, and the variants that were tried."""
    every = Grid.product(range(1, grid.full.layer + 1), grid.dims)
    chain = default_chain(grid)
    return {
        "MRL (sum over dims)": Contrastive(grid),
        "SIA, attention, tau 0.05": SIA(every, cka_weight=0.0),
        "SIA, attention, tau 1": SIA(every, cka_weight=0.0, temperature=1.0),
        "SIA, CKA": SIA(every, attention_weight=0.0),
        "PIC": PIC(chain),
        "PIC, target detached": PIC(chain, detach_target=True),
        "PIC, mean pooling, target detached": PIC(chain, detach_target=True, pooling="mean"),
        "SCR": SCR(Grid.product(layers, grid.dims)),
        "SIR": SIR(Grid.product(layers, grid.dims)),
        "SIR at the last layer": SIR(grid),
    }


def print_terms(options: argparse.Namespace, tokenizer: Any, texts: list[str], batches: int = 8) -> None:
    """Print every term, and its gradient, before training."""
    model = ENCODERS[options.encoder]()
    depth = model.config.num_hidden_layers
    set_seed(options.seeds[0])
    objectives = terms_alone(Grid.product([depth], DIMS), ISOTROPY_LAYERS[options.encoder])
    collator = TextColumnsCollator(tokenizer, ["text"], 32, views=2)
    starts = range(0, batches * options.batch_size, options.batch_size)
    print_gradients(
        model,
        objectives,
        [collator([{"text": text} for text in texts[start : start + options.batch_size]]) for start in starts],
    )
    print(json.dumps(about(options.seeds[0])))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", choices=list(ENCODERS), default="reinitialised", help="encoder to train")
    parser.add_argument("--pooling", choices=["mean", "cls"], default="mean", help="pooling of all runs")
    parser.add_argument("--steps", type=int, default=400, help="training steps")
    parser.add_argument("--batch-size", type=int, default=16, help="texts per batch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds to train with")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=[*RUNS, *VARIANTS], help="runs to train")
    parser.add_argument(
        "--development", action="store_true", help="score parts of development and training sets instead"
    )
    parser.add_argument("--terms", action="store_true", help="print each term and its gradient before training")
    parser.add_argument("--table", action="store_true", help="print the tables of the results file")
    options = parser.parse_args(arguments)
    if (options.encoder, options.pooling) not in LEARNING_RATES:
        known = ", ".join(" ".join(pair) for pair in LEARNING_RATES)
        raise ValueError(f"There is no learning rate for {options.encoder} {options.pooling}, only for: {known}.")
    study_name = options.encoder if options.pooling == "mean" else f"{options.encoder}_{options.pooling}"
    file = RESULTS / f"regularizers_{study_name}.json"
    if options.table:
        print_tables(json.loads(file.read_text(encoding="utf-8")))
        return

    data = data_folder()
    texts = corpus(data)
    print(f"{len(texts):,} texts")
    tokenizer = AutoTokenizer.from_pretrained(default_base())
    if options.terms:
        print_terms(options, tokenizer, texts)
        return
    settings = {name: getattr(options, name) for name in ("encoder", "steps", "batch_size")}
    if options.pooling != "mean":
        settings["pooling"] = options.pooling
    study = {
        "command": "python -m benchmarks.reproduction.regularizers",
        "settings": settings
        | {"learning_rate": LEARNING_RATES[options.encoder, options.pooling], "texts": len(texts)},
        "metric": "Spearman correlation of cosines, macro F1 of a logistic regression, accuracy at the best threshold",
    }
    with tempfile.TemporaryDirectory() as folder:
        if options.development:
            tasks, data = development_tasks(data, Path(folder)), Path(folder)
            file = RESULTS / f"regularizers_{study_name}_development.json"
        else:
            tasks = find_tasks(TESTS)
        results = add_results(file, {}, study)
        if "untouched" not in results["scores"]:
            untouched = measure(ENCODERS[options.encoder](), tokenizer, data, tasks, options.pooling)
            results = add_results(file, {"untouched": {"0": untouched}}, study)
        for seed, name in itertools.product(options.seeds, options.runs):
            start = time.perf_counter()
            model = train(name, tokenizer, texts, options, seed)
            seconds = time.perf_counter() - start
            scores = measure(model, tokenizer, data, tasks, options.pooling)
            results = add_results(file, {name: {str(seed): scores}}, study)
            line = " ".join(f"{dim}:{100 * value:.2f}" for dim, value in average(scores).items())
            print(f"seed {seed} {name} ({seconds:.0f} s): {line}", flush=True)
    print_tables(results)


def print_tables(results: dict[str, Any]) -> None:
    tests = results["scores"]["untouched"]["0"]
    grid = Grid.parse(",".join(next(iter(tests.values()))))
    groups = [[name for name in tests if name.removesuffix("-dev") in names] for names in GROUPS.values()]
    for names in (list(tests), *groups):
        print_table(results, ["untouched", *RUNS, *VARIANTS], names, grid)


if __name__ == "__main__":
    run_command(main)
