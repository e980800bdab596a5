"""
Trained paths: native students of few layers that start from a path and are distilled for at most 20 minutes.

    python -m benchmarks.reproduction.trained_paths minilm                     # all-MiniLM-L6-v2 (extra `quickstart`)
    python -m benchmarks.reproduction.trained_paths e5 --model FOLDER          # multilingual-e5-small, trimmed
    python -m benchmarks.reproduction.trained_paths minilm --development       # learning rates, on msmarco-mini
    python -m benchmarks.reproduction.report                                   # write the table

`m3bert fit` fits the paths to every fourth of the texts of benchmarks.reproduction.exits, without a table. The native
export of a path is the student, a model of the same class with fewer layers and a Dense module; its teacher is the
whole encoder. It is trained as with the recipe `path_distillation`, on those of the texts that are short, one of ten
longer ones, and spans of 3 to 16 words in place of queries. Short texts have the encoder's prompt of queries, longer
ones that of documents. For comparison, two layers of MiniLM also start as plain layers 1 and 6, without refit or exit,
and as the prefix with its exit.

Queries are embedded by the student, loaded by sentence-transformers without remote code, and documents by the whole
encoder: nDCG@10, 128 tokens per text. Interrupted, call again to continue.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

from benchmarks.reproduction.exits import FOLDER, LONGER_SHARE, MAX_LENGTH, RESULTS, SHORT, short_queries, sources
from benchmarks.reproduction.paths import embed
from benchmarks.reproduction.study import Run, add_results, tests_there
from m3bert.commands import fit
from m3bert.commands.command import run_command
from m3bert.commands.recipes import read_recipes
from m3bert.commands.sources import data_folder, default_base
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.modeling import EmbeddingSettings
from m3bert.modeling.modeling_elastic import layer_list
from m3bert.trainers import ExitDistillationConfig, ExitDistillationTrainer, Granularity
from m3bert.trainers.data.teacher import Teacher


STARTS = {
    "minilm": [("1,6", "path"), ("1,5,6", "path"), ("1,6", "plain"), ("1,2", "prefix")],
    "e5": [("1,2,11,12", "path"), ("1-4,11,12", "path")],
}
FIT_SHARE = 4  # one text of so many
STEPS = {"minilm": 800, "e5": 500}
DEVELOPMENT_STEPS, RATES = 300, (5e-4, 1e-3)
RECIPE = read_recipes(["path_distillation"])
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TESTED = ["msmarco-mini", "cranfield", "cisi", "npl"]


def about(development: bool) -> dict[str, Any]:
    """What identifies the study."""
    return {
        "command": "python -m benchmarks.reproduction.trained_paths",
        "settings": {
            "training": RECIPE | {"max_steps": DEVELOPMENT_STEPS if development else STEPS} | NO_DROPOUT,
            "texts of the fit": f"1/{FIT_SHARE}",
        },
        "metric": "nDCG@10 and seconds; run -> seed -> test -> granularity",
    }


def texts_of(data: Path) -> tuple[dict[str, list[str]], list[str]]:
    """The texts of the fit, source -> texts, and those of the training."""
    every = sources(data)
    spans = short_queries(every)
    rows = dict.fromkeys(text for texts in [*every.values(), spans] for text in texts)
    longer = [text for text in rows if len(text) > SHORT]
    left_out = {*longer} - {*longer[::LONGER_SHARE]}
    fitted = {name: texts[::FIT_SHARE] for name, texts in every.items()}
    return fitted, [text for text in rows if text not in left_out]


def student(name: str, source: str, layers: str, kind: str, data: Path) -> Path:
    """The native student of some layers before it is trained, with the source's prompts and pooling."""
    folder = FOLDER / f"trained-{name}-{layers}-{kind}"
    if folder.is_dir():
        return folder
    elastic = FOLDER / f"trained-{name}-elastic{'-prefix' * (kind == 'prefix')}"
    if not elastic.is_dir():
        files = []
        for its, texts in texts_of(data)[0].items():
            files.append(FOLDER / "trained-texts" / f"{its.replace(' ', '_')}.jsonl")
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            files[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        same = [its for its, each in STARTS[name] if each == ("prefix" if kind == "prefix" else "path")]
        options = ["--depths", *same, "--max_length", str(MAX_LENGTH), "--no_static"]
        fit.main([source, str(elastic), "--files", *map(str, files), *options])
    checkpoint = Checkpoint(elastic)
    depth = len(fit.layers_of_depth(layers, checkpoint.config.num_hidden_layers))
    draft = folder.with_name(f"{folder.name}-draft")
    export_native(checkpoint, draft, Granularity(depth, checkpoint.config.hidden_size))
    if kind == "plain":
        unfitted(draft, source, fit.layers_of_depth(layers, checkpoint.config.num_hidden_layers))
    return draft.rename(folder)


def unfitted(folder: Path, source: str, layers: list[int]) -> None:
    """Give the layers of a native export the source's own weights, and take its exit away."""
    model, whole = AutoModel.from_pretrained(folder), AutoModel.from_pretrained(source)
    of_source = layer_list(whole, whole.config.num_hidden_layers)[1]
    for own, layer in zip(layer_list(model, len(layers))[1], layers, strict=True):
        own.load_state_dict(of_source[layer - 1].state_dict())
    model.save_pretrained(folder)
    dense = folder / "2_Dense" / "model.safetensors"
    shapes = {name: its.shape for name, its in load_file(dense).items()}
    save_file({name: torch.eye(*its) if len(its) == 2 else torch.zeros(its) for name, its in shapes.items()}, dense)


def train(name: str, source: str, start: Path, folder: Path, data: Path, changes: dict[str, Any]) -> float:
    """Distil a student into a folder: the seconds that it took, since the last checkpoint if it was interrupted."""
    if (folder / "seconds.json").is_file():
        return json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    prompts = EmbeddingSettings.read(source).prompts
    query, document = (prompts.get(role) or "" for role in ("query", "document"))
    rows = [(query if len(text) <= SHORT else document) + text for text in texts_of(data)[1]]
    seconds = time.perf_counter()
    teacher = Teacher(source, max_length=MAX_LENGTH).embed(rows, FOLDER / "teachers", description="Teacher")
    print(f"{name}: teacher's embeddings in {time.perf_counter() - seconds:.0f} s", flush=True)
    model, tokenizer = AutoModel.from_pretrained(start, **NO_DROPOUT), AutoTokenizer.from_pretrained(start)
    settings = RECIPE | {"text_columns": ["text"], "logging_strategy": "no"} | changes
    seconds = time.perf_counter()
    checkpoints = folder.with_name(f"{folder.name}-checkpoints")
    trainer = Run(ExitDistillationConfig, ExitDistillationTrainer, settings).train(
        model, tokenizer, Dataset.from_dict({"text": rows}), {"teacher": teacher}, checkpoints, seed=0
    )
    seconds = time.perf_counter() - seconds
    trainer.save_model(str(folder))
    (folder / "seconds.json").write_text(json.dumps(round(seconds)), encoding="utf-8")
    return round(seconds)


def documents_of(name: str, source: str, test: str, texts: list[str]) -> torch.Tensor:
    """The embeddings of a test's documents by the whole encoder, which benchmarks.reproduction.paths shares."""
    file = FOLDER / f"paths-{name}-{test}.pt"
    if not file.is_file():
        torch.save(embed(Path(source), "documents", texts), file.with_suffix(".part"))
        os.replace(file.with_suffix(".part"), file)
    return torch.load(file)


def score(name: str, source: str, run: str, folder: Path, data: Path, development: bool, seconds: float = 0) -> None:
    """Score the queries of a folder, unless the results have them."""
    file = RESULTS / f"trained_paths{'_development' * development}.json"
    if file.is_file() and f"{name} {run}" in json.loads(file.read_text(encoding="utf-8"))["scores"]:
        return
    size = Granularity(AutoModel.from_pretrained(folder).config.num_hidden_layers, 384)
    scores = {"seconds": {size: seconds}} if seconds else {}
    for test, evaluator in tests_there(TESTED[:1] if development else TESTED, data).items():
        sides = {"queries": embed(folder, "queries", list(evaluator.texts["queries"]))}
        sides["documents"] = documents_of(name, source, test, list(evaluator.texts["documents"]))
        scores[test] = {size: evaluator.score(sides)[evaluator.main_metric]}
    add_results(file, {f"{name} {run}": {"0": scores}}, about(development))
    print(name, run, {test: round(next(iter(its.values())), 4) for test, its in scores.items()}, flush=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", choices=[*STARTS], help="the encoder")
    parser.add_argument("--model", help="its folder; minilm has a package")
    parser.add_argument("--development", action="store_true", help="compare learning rates for the first student")
    options = parser.parse_args(arguments)
    if options.model is None and options.encoder != "minilm":
        raise ValueError(f"{options.encoder} needs --model, the folder of the encoder.")
    name, source, data = options.encoder, options.model or default_base(), data_folder()
    shared = name, source
    score(*shared, "full", Path(source), data, options.development)
    for layers, kind in STARTS[name][:1] if options.development else STARTS[name]:
        run, start = f"{layers}, {kind}", student(*shared, layers, kind, data)
        score(*shared, run, start, data, options.development)
        changes: dict[str, dict[str, Any]] = {", trained": {"max_steps": STEPS[name]}}
        if options.development:
            steps = {"max_steps": DEVELOPMENT_STEPS}
            changes = {f", trained, {rate:g}": {**steps, "learning_rate": rate} for rate in RATES}
        for label, its in changes.items():
            folder = start.with_name(f"{start.name}{label.replace(', ', '-')}")
            seconds = train(*shared, start, folder, data, its)
            score(*shared, f"{run}{label}", folder, data, options.development, seconds)


if __name__ == "__main__":
    run_command(main)
