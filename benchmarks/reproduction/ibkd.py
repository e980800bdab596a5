"""
IBKD and its baselines (IBKD, Tables 2 to 4, Figures 4 and 5) at our scale: all-MiniLM-L6-v2 teaches its own first
three layers.

    python -m benchmarks.reproduction.ibkd --seeds 0 1               # adds to the results file
    python -m benchmarks.reproduction.ibkd --table                   # print the table
    python -m benchmarks.reproduction.ibkd --figures                 # draw the students of seed 0
    python -m benchmarks.reproduction.ibkd --prefixes                # score their prefixes
    python -m benchmarks.reproduction.ibkd --development --steps 150 --runs CKD "IBKD, beta 100"

Student: the first three layers (extra `quickstart`), converted to m3BERT, mean pooling. Stage 1: sentences of SNLI,
captions of multi30k, and lines of news of at most 20 words, without those that occur in an evaluation set. Stage 2:
all entailed pairs of SNLI, each with one hard negative: a contradiction of the same premise where there is one,
otherwise a text that the teacher mined. bfloat16; all runs with the same seed see the same texts in the same order.

Tests: STS-B, STS12 to STS16, SICK (Spearman); Cranfield and CISI (nDCG@10, Recall@100, 128 tokens per text); alignment
and uniformity on STS-B. FIRST and SECOND define the runs. Settings were chosen on the development sets of STS-B and
SICK (`--development --steps 150`). The figures show the students that the runs save in runs/ibkd.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer, set_seed

from benchmarks.reproduction.ibkd_figures import draw_alignment_and_uniformity, draw_covariances
from benchmarks.reproduction.study import Run, Scores, add_results, held_out_sentences
from modeling_m3bert import convert_to_m3bert
from scripts.command import run_command
from scripts.mine_negatives import MiningArguments, mine
from scripts.sources import data_folder, default_base
from trainers import (
    Granularity,
    Grid,
    IBKDConfig,
    IBKDFinetuningConfig,
    IBKDFinetuningTrainer,
    IBKDTrainer,
    Projection,
    Teacher,
    TeacherEmbeddings,
)
from trainers.evaluation import GridEncoder, Task, evaluate_grid, find_tasks
from trainers.evaluation.geometry import feature_covariance
from trainers.evaluation.readers import read_rows


STUDENT_LAYERS = 3
STS_TESTS = ["stsb", "sts12", "sts13", "sts14", "sts15", "sts16", "sick"]
RETRIEVAL_TESTS = ["cranfield", "cisi"]
MEASURES = {
    **{name: (name, "spearman") for name in STS_TESTS},
    **{
        f"{name} {metric}": (name, metric)
        for name in (*RETRIEVAL_TESTS, "msmarco-mini")
        for metric in ("ndcg@10", "recall@100")
    },
    **{name: ("stsb-geometry", name) for name in ("alignment", "uniformity")},
}
FOLDER = Path("runs/ibkd")
RESULTS = Path(__file__).with_name("results")
TEXTS = {"snli": 24_000, "captions": 12_000, "news": 24_000}
LONGEST_NEWS = 20  # words

OURS: dict[str, Any] = {"hsic": {"normalize": True}, "beta": 100.0}
PREFIXES = Grid.product([STUDENT_LAYERS], [16, 32, 64, 128, 384])
FIRST = {
    "MSE": Run(IBKDConfig, IBKDTrainer, {"method": "mse"}),
    "MSE, normalised": Run(IBKDConfig, IBKDTrainer, {"method": "mse", "normalize_targets": True}),
    "CRD": Run(IBKDConfig, IBKDTrainer, {"method": "crd"}),
    "HPD-128, normalised": Run(
        IBKDConfig, IBKDTrainer, {"method": "hpd", "projection_dim": 128, "normalize_targets": True}
    ),
    "CKD": Run(IBKDConfig, IBKDTrainer, {"method": "ckd"}),
    "IBKD (paper)": Run(IBKDConfig, IBKDTrainer),
    "IBKD (ours)": Run(IBKDConfig, IBKDTrainer, OURS),
    "IBKD (ours), nested": Run(IBKDConfig, IBKDTrainer, OURS | {"grid": str(PREFIXES)}),
}
# Second stages, which continue "IBKD (ours)" of the same seed.
SECOND = {
    "IBKD (ours), fine-tuned": Run(IBKDFinetuningConfig, IBKDFinetuningTrainer),
    "IBKD (ours), fine-tuned, 128": Run(IBKDFinetuningConfig, IBKDFinetuningTrainer, {"projection_dim": 128}),
}
# Tried on the development sets.
VARIANTS = {
    f"IBKD, {name}beta {beta}": Run(IBKDConfig, IBKDTrainer, {"hsic": hsic, "beta": float(beta)})
    for name, hsic in (("", {"normalize": True}), ("input detached, ", {"normalize": True, "detach_input": True}))
    for beta in (10, 30, 100, 300, 1000)
}


def held_out(data: Path) -> set[str]:
    """The sentences of the evaluation sets."""
    splits = [("stsb", "dev"), ("sick", "dev"), *((name, "test") for name in STS_TESTS)]
    return held_out_sentences(row for name, split in splits for row in read_rows(data / name / f"{split}.jsonl.gz"))


def unlabelled(data: Path) -> list[str]:
    """The distinct texts of stage 1, in a fixed random order."""
    with gzip.open(data / "text-english" / "news.txt.gz", "rt", encoding="utf-8") as file:
        news = {line.strip() for line in file if 0 < len(line.split()) <= LONGEST_NEWS}
    found = {
        "snli": {row[side].strip() for row in snli(data) for side in ("sentence1", "sentence2")},
        "captions": {
            caption.strip()
            for row in read_rows(data / "multi30k-captions" / "train.jsonl.gz")
            for caption in row["captions"]
        },
        "news": news,
    }
    excluded, draw, texts = held_out(data), random.Random(0), set()
    for name, count in TEXTS.items():
        own = sorted(text for text in found[name] if text.lower() not in excluded)
        texts |= set(draw.sample(own, min(count, len(own))))
    shuffled = sorted(texts)
    draw.shuffle(shuffled)
    return shuffled


def snli(data: Path) -> list[dict[str, Any]]:
    return read_rows(data / "snli" / "train.jsonl.gz")


def triplets(data: Path) -> Dataset:
    """The pairs of stage 2, each with a hard negative."""
    excluded = held_out(data)
    by_premise: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in snli(data):
        if not any(row[side].strip().lower() in excluded for side in ("sentence1", "sentence2")):
            by_premise[row["sentence1"]][row["label_text"]].append(row["sentence2"])
    own, without = [], []
    for premise, labelled in by_premise.items():
        for index, hypothesis in enumerate(labelled["entailment"]):
            pair = {"anchor": premise, "positive": hypothesis}
            contradictions = labelled["contradiction"]
            if contradictions:
                own.append(pair | {"negative": contradictions[index % len(contradictions)]})
            else:
                without.append(pair)
    options = MiningArguments(
        negatives=1, range_min=10, range_max=100, relative_margin=0.1, sampling="random", batch_size=128
    )
    mined = mine(Dataset.from_list(without), Teacher(default_base(), max_length=64), options)
    mined = mined.rename_column(next(name for name in mined.column_names if name.startswith("negative")), "negative")
    print(f"stage 2: {len(own):,} pairs with a contradiction, {len(mined):,} with a mined negative", flush=True)
    rows = own + mined.to_list()
    random.Random(0).shuffle(rows)
    return Dataset.from_list(rows)


def untrained_student() -> Any:
    """The teacher's first layers, loaded alone from the converted teacher."""
    folder = FOLDER / "converted"
    if not folder.is_dir():
        convert_to_m3bert(AutoModel.from_pretrained(default_base())).save_pretrained(folder)
    return AutoModel.from_pretrained(folder, output_layer=STUDENT_LAYERS)


def measure(
    model: Any, tokenizer: Any, data: Path, tasks: list[Task], projection: Projection | None = None
) -> dict[str, Scores]:
    """Every measure at the full size of the model, or of its projection, with weights in bfloat16."""
    granularity = Granularity(
        model.config.num_hidden_layers, projection.out_features if projection else model.config.hidden_size
    )
    encoder = GridEncoder(
        model.to(torch.bfloat16), tokenizer, Grid((granularity,)), batch_size=128, max_length=128,
        projection=projection,
    )  # fmt: skip
    results = evaluate_grid(encoder, tasks, data)
    values = {(score.task.removesuffix("-dev"), score.metric): score.value for score in results.scores}
    return {name: {granularity: values[key]} for name, key in MEASURES.items() if key in values}


def development_tasks() -> list[Task]:
    tasks = [Task(f"{name}-dev", "sts", folder=name, splits=("dev",)) for name in ("stsb", "sick")]
    return [*tasks, *find_tasks(["msmarco-mini"])]


def mean_of(results: dict[str, Any], name: str, measures: list[str]) -> list[float]:
    """The mean of a run over some measures, one number per seed."""
    return [
        statistics.mean(next(iter(seed[measure].values())) for measure in measures)
        for seed in results["scores"][name].values()
    ]


def print_rows(results: dict[str, Any]) -> None:
    """Print one row per run: means over seeds, and for the STS tests also the mean of each seed."""
    others = [name for name in MEASURES if name not in STS_TESTS and "msmarco" not in name]
    print("| run | size | STS (7) | each seed | " + " | ".join(others) + " |")
    print("| --- | --- | --: | --- |" + " --: |" * len(others))
    for name in ("teacher", "untrained", *FIRST, *SECOND):
        if name in results["scores"]:
            seeds = mean_of(results, name, STS_TESTS)
            (size,) = {g for seed in results["scores"][name].values() for g in seed["stsb"]}
            cells = [f"{statistics.mean(mean_of(results, name, [other])):.3f}" for other in others]
            each = ", ".join(f"{100 * value:.2f}" for value in seeds)
            print(f"| {name} | {size} | {100 * statistics.mean(seeds):.2f} | {each} | " + " | ".join(cells) + " |")


def print_prefixes(data: Path, tokenizer: Any) -> None:
    """Print the mean over the STS tests of the students of seed 0 at prefixes of the last layer."""
    tasks = find_tasks(STS_TESTS)
    print("| run | " + " | ".join(map(str, PREFIXES)) + " |\n| --- |" + " --: |" * len(PREFIXES))
    for name in ("MSE, normalised", "CKD", "IBKD (ours)", "IBKD (ours), nested"):
        model = AutoModel.from_pretrained(FOLDER / f"{name}-0").to(torch.bfloat16)
        encoder = GridEncoder(model, tokenizer, PREFIXES, batch_size=128, max_length=128)
        quality = evaluate_grid(encoder, tasks, data).quality(STS_TESTS)
        print(f"| {name} | " + " | ".join(f"{100 * quality[g]:.1f}" for g in PREFIXES) + " |", flush=True)


def draw(results: dict[str, Any], data: Path, tokenizer: Any) -> None:
    """Draw the paper's Figures 4 and 5: covariances of the first dims on SNLI, alignment and uniformity on STS-B."""
    points = {
        name: (
            statistics.mean(mean_of(results, name, ["uniformity"])),
            statistics.mean(mean_of(results, name, ["alignment"])),
        )
        for name in results["scores"]
    }
    draw_alignment_and_uniformity(points, RESULTS / "ibkd_alignment_uniformity.png")
    draw_state = random.Random(0)
    sentences = draw_state.sample(sorted({row["sentence1"] for row in snli(data)}), 10_000)
    covariances = {}
    for name in ("CKD", "IBKD (paper)", "IBKD (ours)"):
        model = AutoModel.from_pretrained(FOLDER / f"{name}-0")
        encoder = GridEncoder(model, tokenizer, Grid.full_size(model.config), batch_size=128, max_length=64)
        vectors = encoder.encode(sentences).layers[STUDENT_LAYERS]
        covariances[name] = feature_covariance(vectors).numpy()
    draw_covariances(covariances, RESULTS / "ibkd_covariance.png")


class Study:
    """The data, teacher and settings that all runs share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.data = options, data_folder()
        self.tokenizer = AutoTokenizer.from_pretrained(default_base())
        self.texts = unlabelled(self.data)
        self.pairs: Dataset | None = None
        self.shared = {
            "per_device_train_batch_size": options.batch_size,
            "warmup_steps": 0.05,
            "lr_scheduler_type": "cosine",
            "max_length": 64,
            "bf16": True,
            "use_cpu": True,
        }

    def teacher(self) -> TeacherEmbeddings:
        whole = Teacher(default_base(), max_length=64, batch_size=128)
        return whole.embed(self.texts, "runs/teachers", description="Teacher")

    def train(self, name: str, seed: int) -> tuple[Any, Projection | None]:
        """The student after training, which is also saved on disk, and its projection."""
        set_seed(seed)
        if name in SECOND:
            if self.pairs is None:
                self.pairs = triplets(self.data)
            start = AutoModel.from_pretrained(FOLDER / f"IBKD (ours)-{seed}")
            settings = self.shared | {"max_steps": self.options.second_steps, "seed": seed}
            trainer = SECOND[name].train(start, self.tokenizer, self.pairs, **settings)
        else:
            dataset = Dataset.from_dict({"text": self.texts})
            settings = self.shared | {"max_steps": self.options.steps, "seed": seed}
            trainer = (FIRST | VARIANTS)[name].train(
                untrained_student(), self.tokenizer, dataset, {"teacher": self.teacher()}, **settings
            )
        trainer.save_model(str(FOLDER / f"{name}-{seed}"))
        return trainer.backbone.eval(), trainer.projection


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="training steps of stage 1")
    parser.add_argument("--second-steps", type=int, default=60, help="training steps of stage 2")
    parser.add_argument("--batch-size", type=int, default=128, help="texts or pairs per batch")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds to train with")
    parser.add_argument(
        "--runs",
        nargs="+",
        default=[*FIRST, *SECOND],
        choices=[*FIRST, *SECOND, *VARIANTS],
        help="runs to train",
    )
    parser.add_argument("--development", action="store_true", help="score development sets and write nothing")
    parser.add_argument("--table", action="store_true", help="print the table of the results file")
    parser.add_argument("--prefixes", action="store_true", help="score prefixes of the students of seed 0")
    parser.add_argument("--figures", action="store_true", help="draw the figures of the students of seed 0")
    options = parser.parse_args(arguments)
    file = RESULTS / "ibkd.json"
    if options.table or options.figures:
        found = json.loads(file.read_text(encoding="utf-8"))
        if options.figures:
            draw(found, data_folder(), AutoTokenizer.from_pretrained(default_base()))
        print_rows(found)
        return

    study = Study(options)
    if options.prefixes:
        print_prefixes(study.data, study.tokenizer)
        return
    tasks = development_tasks() if options.development else find_tasks([*STS_TESTS, *RETRIEVAL_TESTS, "stsb-geometry"])
    about = {
        "command": "python -m benchmarks.reproduction.ibkd",
        "settings": {name: getattr(options, name) for name in ("steps", "second_steps", "batch_size")}
        | {"texts": len(study.texts)},
        "metric": "Spearman correlation, nDCG@10, Recall@100, mean squared distance of pairs, log mean kernel",
    }
    results: dict[str, Any] = {"scores": {}} if options.development else add_results(RESULTS / "ibkd.json", {}, about)
    starts = {"teacher": lambda: AutoModel.from_pretrained(default_base()), "untrained": untrained_student}
    for name, start in starts.items():
        if name not in results["scores"] and not options.development:
            scores = measure(start(), study.tokenizer, study.data, tasks)
            results = add_results(file, {name: {"0": scores}}, about)
    for seed, name in itertools.product(options.seeds, options.runs):
        begun = time.perf_counter()
        model, projection = study.train(name, seed)
        seconds = time.perf_counter() - begun
        scores = measure(model, study.tokenizer, study.data, tasks, projection)
        line = " ".join(f"{measure} {next(iter(values.values())):.4f}" for measure, values in scores.items())
        print(f"seed {seed} {name} ({seconds:.0f} s): {line}", flush=True)
        if not options.development:
            results = add_results(file, {name: {str(seed): scores}}, about)
    if not options.development:
        print_rows(results)


if __name__ == "__main__":
    run_command(main)
