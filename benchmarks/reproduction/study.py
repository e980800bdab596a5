"""What the studies share: training a run, a results file that several processes can add to, and words of tables."""

from __future__ import annotations

import fcntl
import json
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from benchmarks._measure import commit
from m3bert.commands.recipes import merged
from m3bert.evaluation import Task, find_task
from m3bert.evaluation.evaluators import Evaluator
from m3bert.evaluation.readers import load_task
from m3bert.trainers import Granularity
from m3bert.trainers.core.checkpoints import complete_checkpoints


Scores = dict[Granularity, float]


@dataclass(frozen=True)
class Run:
    """
    One way to train.

    Args:
        config_class (`type`): Configuration of the trainer.
        trainer_class (`type`): The trainer.
        settings (`dict`, *optional*): Where the run differs from the configuration's defaults.
    """

    config_class: type
    trainer_class: type
    settings: dict[str, Any] = field(default_factory=dict)

    def train(
        self,
        model: Any,
        tokenizer: Any,
        dataset: Dataset,
        objects: Mapping[str, Any] | None = None,
        folder: Path | None = None,
        **shared: Any,
    ) -> Any:
        """
        Train `model` in place.

        Args:
            model (`Any`): The model.
            tokenizer (`Any`): Its tokenizer.
            dataset ([`~datasets.Dataset`]): The training data.
            objects (`dict`, *optional*): Further arguments of the trainer, such as a teacher.
            folder (`Path`, *optional*): Folder of checkpoints, one per 25 steps. A run that was interrupted continues
                with its last one. Default: no checkpoints.
            shared (`Any`): Settings that all runs of a study share; those of the run override them.

        Returns:
            The trainer.
        """
        quiet: dict[str, Any] = {
            "logging_strategy": "no",
            "save_strategy": "no",
            "disable_tqdm": True,
            "report_to": "none",
            "use_cpu": not torch.accelerator.is_available(),
        }
        if folder is not None:
            quiet |= {"save_strategy": "steps", "save_steps": 25, "save_total_limit": 1}
        with tempfile.TemporaryDirectory() as temporary:
            output = str(folder or temporary)
            args = self.config_class(output_dir=output, **merged({**quiet, **shared}, self.settings))
            trainer = self.trainer_class(model, args, tokenizer, dataset, **(objects or {}))
            trainer.train(resume_from_checkpoint=next(reversed(complete_checkpoints(output)), None))
        return trainer


def development_tasks(names: Iterable[str]) -> list[Task]:
    """Tasks by name; `NAME-dev` is the development set of the task NAME."""
    found = []
    for name in names:
        task = find_task(name.removesuffix("-dev"))
        if name.endswith("-dev"):
            task = replace(task, name=name, folder=task.folder or task.name, splits=("dev",), hub=None)
        found.append(task)
    return found


def is_there(data: Path, name: str) -> bool:
    """Whether a data set, or a file of it, is in the folder of all; a line says so if not. ValueError if there is no
    such folder."""
    if not data.is_dir():
        raise ValueError(f"There is no folder {data}: set M3BERT_DATA, and run python -m benchmarks.data.")
    if (data / name).exists():
        return True
    print(f"{name} is not in {data}: the study runs without it")
    return False


def tasks_there(tasks: Iterable[Task], data: Path) -> list[Task]:
    """The tasks whose data is there, or on the Hub."""
    return [task for task in tasks if task.hub is not None or task.builtin or is_there(data, task.folder or task.name)]


def tests_there(names: Iterable[str], data: Path) -> dict[str, Evaluator]:
    """Name -> evaluator of each of these tasks, or development sets, whose data is there."""
    return {task.name: load_task(task, data) for task in tasks_there(development_tasks(names), data)}


def held_out_sentences(rows: Iterable[dict[str, Any]]) -> set[str]:
    """The sentences that training texts must not equal, ignoring case and surrounding spaces."""
    return {row[side].strip().lower() for row in rows for side in ("sentence1", "sentence2", "text") if side in row}


def add_results(file: Path, scores: dict[str, dict[str, dict[str, Scores]]], about: dict[str, Any]) -> dict[str, Any]:
    """
    Add scores to a file. Earlier scores of the same study are kept; those of another study (other settings, machine
    or versions) are dropped. Only one process writes at a time.

    Args:
        file (`Path`): JSON file, which is created if it does not exist.
        scores (`dict`): Run -> seed -> test set -> granularity -> score.
        about (`dict`): What identifies the study: the command, the settings, and what the scores are.

    Returns:
        `dict`: The new content of the file.
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
        results = {**about, "date": date.today().isoformat(), "commit": commit(), "scores": plain}
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps(results, indent=1) + "\n")
    return results


def seeds_of(seeds: Sequence[Any]) -> str:
    """The seeds of a table in words."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
