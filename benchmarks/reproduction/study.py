"""What the studies share: training a run, and a results file that several processes may add to."""

from __future__ import annotations

import fcntl
import json
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn

from trainers import Granularity, Grid, NestedModel, Objective


Scores = dict[Granularity, float]


@dataclass(frozen=True)
class Run:
    """
    One way to train.

    Args:
        config_class (`type`): Configuration of the trainer.
        trainer_class (`type`): The trainer.
        settings (`dict`, *optional*): What differs from the configuration's defaults.
    """

    config_class: type
    trainer_class: type
    settings: dict[str, Any] = field(default_factory=dict)

    def train(
        self, model: Any, tokenizer: Any, dataset: Dataset, objects: Mapping[str, Any] | None = None, **shared: Any
    ) -> Any:
        """Train `model` in place, with settings that all runs of a study share, and objects that the trainer takes
        (such as a teacher); returns the trainer."""
        quiet = {"logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True, "report_to": "none"}
        with tempfile.TemporaryDirectory() as folder:
            args = self.config_class(output_dir=folder, **{**quiet, **shared, **self.settings})
            trainer = self.trainer_class(model, args, tokenizer, dataset, **(objects or {}))
            trainer.train()
        return trainer


def held_out_sentences(rows: Iterable[dict[str, Any]]) -> set[str]:
    """Sentences that no training text may be equal to, up to case and outer spaces."""
    return {row[side].strip().lower() for row in rows for side in ("sentence1", "sentence2", "text") if side in row}


def add_results(file: Path, scores: dict[str, dict[str, dict[str, Scores]]], about: dict[str, Any]) -> dict[str, Any]:
    """
    Add run -> seed -> test set -> granularity -> score to a file. What the file has of the same study stays, and of
    another (other settings, machine or versions) does not; one process writes at a time.

    Args:
        file (`Path`): JSON file; made where there is none.
        scores (`dict`): What was measured.
        about (`dict`): What was done: the command, settings, and what the scores are.

    Returns:
        `dict`: what the file holds now.
    """
    about = {
        **about,
        "machine": f"{platform.machine()}, no accelerator",
        "versions": {name: version(name) for name in ("torch", "transformers", "datasets")},
    }
    plain: dict[str, Any] = {
        name: {
            seed: {test: {str(g): round(value, 5) for g, value in table.items()} for test, table in tests.items()}
            for seed, tests in seeds.items()
        }
        for name, seeds in scores.items()
    }
    file.parent.mkdir(exist_ok=True)
    with file.open("a+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        earlier = json.loads(stream.read() or "{}")
        if all(earlier.get(key) == value for key, value in about.items()):
            for name, seeds in earlier["scores"].items():
                plain[name] = seeds | plain.get(name, {})
        results = {**about, "date": date.today().isoformat(), "scores": plain}
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps(results, indent=1) + "\n")
    return results


def print_gradients(model: Any, objectives: Mapping[str, Objective], batches: Sequence[Mapping[str, Any]]) -> None:
    """What objectives ask of a model before training: the value of each, the norm of its gradient in the model's
    weights as a multiple of the first one's, and the cosine of the two gradients; means over batches."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in objectives}
    weights = list(model.parameters())
    for number, batch in enumerate(batches):
        reference: torch.Tensor | None = None
        for name, objective in objectives.items():
            torch.manual_seed(number)  # the same dropout for every term
            loss = NestedModel(model, objective).train()(**batch)["loss"]
            parts = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            gradient = torch.cat([part.flatten() for part in parts])
            reference = gradient if reference is None else reference
            cosine = nn.functional.cosine_similarity(gradient, reference, dim=0)
            found[name].append((loss.item(), (gradient.norm() / reference.norm()).item(), cosine.item()))
    first = next(iter(objectives))
    print(f"| term | value | gradient / that of {first} | cosine with it |\n| --- | --: | --: | --: |")
    for name, rows in found.items():
        value, ratio, cosine = (statistics.mean(column) for column in zip(*rows, strict=True))
        print(f"| {name} | {value:.3g} | {ratio:.3g} | {cosine:.2f} |")


def print_table(
    results: dict[str, Any],
    names: Sequence[str],
    tests: Sequence[str],
    grid: Grid,
    *,
    percent: bool = True,
    best: Callable[[list[float]], float] = max,
) -> None:
    """Mean over some test sets, and over seeds, of each run, a row a granularity, in percent or as it is; the best is
    bold."""
    print(f"\n{', '.join(tests)}:\n")
    names = [name for name in names if name in results["scores"]]
    print("| granularity | " + " | ".join(names) + " |")
    print("| --- |" + " --: |" * len(names))
    for g in grid:
        values = [
            statistics.mean(
                statistics.mean(seed[test][str(g)] for test in tests) for seed in results["scores"][name].values()
            )
            for name in names
        ]
        texts = [f"{100 * value:.1f}" if percent else f"{value:.3f}" for value in values]
        bold = values.index(best(values))
        cells = [f"**{text}**" if index == bold else text for index, text in enumerate(texts)]
        print(f"| {g} | " + " | ".join(cells) + " |")
