"""A tiny encoder that was really trained and really evaluated, as its owner has it on disk before publishing it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from modeling_m3bert import M3BertModel
from tests.conftest import tiny_config
from tests.evaluation_data import write_data
from trainers import ContrastiveConfig, ContrastiveTrainer, Grid
from trainers.evaluation import GridEncoder, GridResults, evaluate_grid, find_tasks, measure_latency


GRID = "2,4,6x8,16,32"
TASKS = ("stsb", "cranfield", "banking77")


def contrastive_trainer(
    folder: Path, tokenizer: Any, sentences: Sequence[str], model: Any = None, **changes: Any
) -> ContrastiveTrainer:
    """A trainer of two steps, with a checkpoint and the optimizer's state in its folder."""
    pairs = Dataset.from_dict({"text": list(sentences[:24]), "other": list(sentences[24:48])})
    values = {
        "output_dir": str(folder),
        "grid": GRID,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "max_length": 40,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return ContrastiveTrainer(
        model or M3BertModel(tiny_config()), ContrastiveConfig(**{**values, **changes}), tokenizer, pairs
    )


def evaluated(folder: Path, data: Path, sentences: Sequence[str], latency: bool = True) -> GridResults:
    """Scores of a checkpoint over its grid, of made-up data that is written to `data`."""
    from hub_cards.checkpoint import Checkpoint

    if not data.exists():
        write_data(data, sentences)
    encoder: GridEncoder = Checkpoint(folder).encoder(Grid.parse(GRID))
    results = evaluate_grid(encoder, find_tasks(TASKS), data)
    if latency:
        results.latency = measure_latency(encoder, sentences[:2], documents=300, rounds=2)
    return results
