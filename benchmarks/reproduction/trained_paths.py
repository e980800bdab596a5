"""
Trained paths: native students of few layers that start from a path and are distilled for at most 20 minutes.

    python -m benchmarks.reproduction.trained_paths minilm                     # all-MiniLM-L6-v2 (extra `quickstart`)
    python -m benchmarks.reproduction.trained_paths e5 --model FOLDER          # multilingual-e5-small, trimmed
    python -m benchmarks.reproduction.trained_paths minilm --development       # learning rates, on msmarco-mini
    python -m benchmarks.reproduction.report                                   # write the table

The student is the native export of a path that benchmarks.reproduction.paths fits, a model of the same class with
fewer layers; its teacher is the whole encoder. It is trained as with the recipe `path_distillation`, on those of the
texts that are short, one of ten longer ones, and spans of 3 to 16 words in place of queries. Short texts have the
encoder's prompt of queries, longer ones that of documents.

Queries are embedded by the student, loaded by sentence-transformers without remote code, and documents by the whole
encoder: nDCG@10, 128 tokens per text. Interrupted, call again to continue.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModel, AutoTokenizer

from benchmarks.reproduction.embedding import FOLDER, MAX_LENGTH, documents_of, embed
from benchmarks.reproduction.fit_texts import SHORT, mostly_short, short_queries, sources
from benchmarks.reproduction.paths import exported, fitted, listed
from benchmarks.reproduction.study import (
    Run,
    add_run,
    encoder_parser,
    finished,
    main_score,
    source_of,
    tests_there,
)
from m3bert.commands.command import run_command
from m3bert.commands.recipes import read_recipes
from m3bert.commands.sources import data_folder
from m3bert.data.teacher import Teacher
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Granularity


DEPTHS = {"minilm": [2, 3], "e5": [4, 6]}  # a third and a half of the layers
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
        },
        "metric": "nDCG@10 and seconds; run -> seed -> test -> granularity",
    }


def train(name: str, source: str, start: Path, folder: Path, data: Path, changes: dict[str, Any]) -> float:
    """Distil a student into a folder: the seconds that it took, since the last checkpoint if it was interrupted."""
    if (folder / "seconds.json").is_file():
        return json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    prompts = EmbeddingSettings.read(source).prompts
    query, document = (prompts.get(role) or "" for role in ("query", "document"))
    every = sources(data)
    texts = mostly_short(text for rows in [*every.values(), short_queries(every, data)] for text in rows)
    rows = [(query if len(text) <= SHORT else document) + text for text in texts]
    seconds = time.perf_counter()
    teacher = Teacher(source, max_length=MAX_LENGTH).embed(rows, FOLDER / "teachers", description="Teacher")
    print(f"{name}: teacher's embeddings in {time.perf_counter() - seconds:.0f} s", flush=True)
    model, tokenizer = AutoModel.from_pretrained(start, **NO_DROPOUT), AutoTokenizer.from_pretrained(start)
    settings = RECIPE | {"text_columns": ["text"], "logging_strategy": "no"} | changes
    seconds = time.perf_counter()
    checkpoints = folder.with_name(f"{folder.name}-checkpoints")
    trainer = Run("exit-distillation", settings).train(
        model, tokenizer, Dataset.from_dict({"text": rows}), {"teacher": teacher}, checkpoints, seed=0
    )
    seconds = time.perf_counter() - seconds
    trainer.save_model(str(folder))
    (folder / "seconds.json").write_text(json.dumps(round(seconds)), encoding="utf-8")
    return round(seconds)


def score(name: str, source: str, run: str, folder: Path, data: Path, development: bool, seconds: float = 0) -> None:
    """Score the queries of a folder, unless the results have them."""
    file = f"trained_paths{'_development' * development}"
    if f"{name} {run}" in finished(file):
        return
    size = Granularity(AutoModel.from_pretrained(folder).config.num_hidden_layers, 384)
    scores = {"seconds": seconds} if seconds else {}
    tests = tests_there(TESTED[:1] if development else TESTED, data)
    documents = documents_of(name, Path(source), tests)
    for test, evaluator in tests.items():
        queries = embed(folder, "queries", evaluator.texts["queries"])
        scores[test] = main_score(evaluator, {"queries": queries, "documents": documents[test]})
    add_run(file, f"{name} {run}", scores, size, about(development))


def main(arguments: list[str]) -> None:
    parser = encoder_parser(__doc__, DEPTHS)
    parser.add_argument("--development", action="store_true", help="compare learning rates for the first student")
    options = parser.parse_args(arguments)
    name, source, data = options.encoder, source_of(options), data_folder()
    shared = name, source
    score(*shared, "full", Path(source), data, options.development)
    checkpoint = Checkpoint(fitted(name, source, data))
    for depth in DEPTHS[name][:1] if options.development else DEPTHS[name]:
        run, start = listed(checkpoint.depths.layers_of(depth)), exported(checkpoint, depth, f"trained-{name}")
        score(*shared, run, start, data, options.development)
        changes: dict[str, dict[str, Any]] = {", trained": {"max_steps": STEPS[name]}}
        if options.development:
            steps = {"max_steps": DEVELOPMENT_STEPS}
            changes = {f", trained, {rate:g}": {**steps, "learning_rate": rate} for rate in RATES}
        for label, settings in changes.items():
            folder = start.with_name(f"{start.name}{label.replace(', ', '-')}")
            seconds = train(*shared, start, folder, data, settings)
            score(*shared, f"{run}{label}", folder, data, options.development, seconds)


if __name__ == "__main__":
    run_command(main)
