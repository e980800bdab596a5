"""A tiny encoder that was really trained and really evaluated, as its owner has it on disk before publishing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from hub_cards.checkpoint import Checkpoint
from modeling_m3bert import M3BertModel
from tests.conftest import quiet, tiny_config, write_modules
from tests.evaluation_data import write_data
from trainers import ContrastiveConfig, ContrastiveTrainer, Grid
from trainers.evaluation import GridResults, evaluate_grid, find_tasks, measure_latency
from trainers.exits.fit import fit_exits


GRID = "2,4,6x8,16,32"
TASKS = ("stsb", "cranfield", "banking77")


def contrastive_trainer(
    folder: Path, tokenizer: Any, sentences: Sequence[str], model: Any = None, **changes: Any
) -> ContrastiveTrainer:
    """A trainer for two steps that leaves a checkpoint, with the state of the optimizer, in its folder."""
    pairs = Dataset.from_dict({"anchor": list(sentences[:24]), "positive": list(sentences[24:48])})
    values = {
        "grid": GRID,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "max_length": 40,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    config = ContrastiveConfig(**quiet(folder, **{**values, **changes}))
    return ContrastiveTrainer(model or M3BertModel(tiny_config()), config, tokenizer, pairs)


def evaluated(folder: Path, data: Path, sentences: Sequence[str], latency: bool = True) -> GridResults:
    """Scores of a checkpoint over its grid, on made-up data that is written to `data` if it is not there."""
    if not data.exists():
        write_data(data, sentences)
    encoder = Checkpoint(folder).encoder(Grid.parse(GRID))
    results = evaluate_grid(encoder, find_tasks(TASKS), data)
    if latency:
        results.latency = measure_latency(encoder, sentences[:2], documents=300, rounds=2)
    return results


def save_with_exits(
    folder: Path,
    tokenizer: Any,
    sentences: Sequence[str],
    static: bool = True,
    paths: Mapping[int, Sequence[int]] | None = None,
    **changes: Any,
) -> M3BertModel:
    """A tiny model with fitted exits at depths 1, 2 and 4 of 6, a table and a rotated last layer, saved with its
    tokenizer and modules; `changes` are arguments of its config."""
    model = M3BertModel(tiny_config(**changes)).eval()
    sources = {"words.txt": sentences[:24], "names.txt": sentences[24:]}
    prefixes = [depth for depth in (1, 2, 4) if depth not in (paths or {})]
    fit_exits(model, tokenizer, sources, layers=prefixes, paths=paths, basis="principal", static=static)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_modules(folder, width=model.config.hidden_size, max_length=model.config.max_position_embeddings)
    return model
