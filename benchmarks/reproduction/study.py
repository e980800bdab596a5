"""What the studies share: training a run, a results file that several processes can add to, and words of tables."""

from __future__ import annotations

import fcntl
import json
import platform
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset

from benchmarks._measure import commit
from m3bert.commands.command import argument_parser
from m3bert.commands.recipes import merged
from m3bert.commands.sources import default_base
from m3bert.commands.train import method_of
from m3bert.evaluation import Task, find_task
from m3bert.evaluation.evaluators import Evaluator, Vectors
from m3bert.evaluation.readers import load_task
from m3bert.trainers import Granularity
from m3bert.trainers.core.checkpoints import complete_checkpoints


RESULTS = Path(__file__).with_name("results")
Scores = dict[Granularity, float]
Rows = TypeVar("Rows", bound=Sized)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Run:
    """
    One way to train.

    Args:
        name (`str`): Name of the method, as `m3bert train` calls it.
        settings (`dict`, *optional*): Where the run differs from the configuration's defaults.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[Any, Any]:
        """The configuration and the trainer."""
        return method_of(self.name)

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
        config_class, trainer_class = self.classes
        with tempfile.TemporaryDirectory() as temporary:
            output = str(folder or temporary)
            args = config_class(output_dir=output, **merged({**quiet, **shared}, self.settings))
            trainer = trainer_class(model, args, tokenizer, dataset, **(objects or {}))
            trainer.train(resume_from_checkpoint=next(reversed(complete_checkpoints(output)), None))
        return trainer


def development_tasks(names: Iterable[str]) -> list[Task]:
    """Tasks by name; `NAME-dev` is the development set of the task NAME."""
    tasks = []
    for name in names:
        task = find_task(name.removesuffix("-dev"))
        if name.endswith("-dev"):
            task = replace(task, name=name, folder=task.folder or task.name, splits=("dev",), hub=None)
        tasks.append(task)
    return tasks


def is_there(data: Path, name: str) -> bool:
    """Whether a file is in the folder of all data sets; a line says so if not."""
    if (data / name).exists():
        return True
    print(f"The study runs without {name}, which is not in {data}")
    return False


def needed(there: Rows, what: str, data: Path) -> Rows:
    """What a study cannot run without. ValueError if it is empty."""
    if not len(there):
        raise ValueError(f"There are no {what} in {data}: set M3BERT_DATA, and run python -m benchmarks.data.")
    return there


def tests_there(names: Iterable[str], data: Path) -> dict[str, Evaluator]:
    """Name -> evaluator of each of these tasks, or development sets, whose data is there or on the Hub; a line names
    each of the others. ValueError if all are missing."""
    evaluators = {}
    for task in development_tasks(names):
        try:
            evaluators[task.name] = load_task(task, data)
        except ValueError as error:
            print(f"The study runs without {task.name}: {str(error).splitlines()[0]}")
    return needed(evaluators, "tests of this study", data)


def documents_there(name: str, data: Path) -> list[str]:
    """The documents of a collection; none if it is not there."""
    return [*tests_there([name], data)[name].texts["documents"]] if is_there(data, name) else []


def held_out_sentences(rows: Iterable[dict[str, Any]]) -> set[str]:
    """The sentences that training texts must not equal, ignoring case and surrounding spaces."""
    return {row[side].strip().lower() for row in rows for side in ("sentence1", "sentence2", "text") if side in row}


def finished(name: str, about: Mapping[str, Any] | None = None) -> set[str]:
    """The runs that have scores in a results file; with `about`, in a file of this study only."""
    file = RESULTS / f"{name}.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"scores": {}}
    return {*content["scores"]} if all(content.get(key) == value for key, value in (about or {}).items()) else set()


def add_results(name: str, scores: dict[str, dict[str, dict[str, Scores]]], about: dict[str, Any]) -> None:
    """
    Add scores to a results file. Earlier scores of the same study are kept; those of another study (other settings,
    machine or versions) are dropped. Only one process writes at a time.

    Args:
        name (`str`): Name of the file, which is created if it does not exist.
        scores (`dict`): Run -> seed -> test set -> granularity -> score.
        about (`dict`): What identifies the study: the command, the settings, and what the scores are.
    """
    about = {
        **json.loads(json.dumps(about)),
        "machine": f"{platform.machine()}, no accelerator",
        "versions": {package: version(package) for package in ("torch", "transformers", "datasets")},
    }
    plain: dict[str, Any] = {
        run: {
            seed: {test: {str(g): round(value, 5) for g, value in table.items()} for test, table in tests.items()}
            for seed, tests in seeds.items()
        }
        for run, seeds in scores.items()
    }
    file = RESULTS / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    with file.open("a+", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        earlier = json.loads(stream.read() or "{}")
        if all(earlier.get(key) == value for key, value in about.items()):
            for run, seeds in earlier["scores"].items():
                plain[run] = seeds | plain.get(run, {})
        elif earlier:
            others = [key for key, value in about.items() if earlier.get(key) != value]
            print(f"{file} had scores with other {', '.join(others)}: they are dropped (git has them if committed).")
        content = {**about, "date": date.today().isoformat(), "commit": commit(), "scores": plain}
        stream.seek(0)
        stream.truncate()
        stream.write(json.dumps(content, indent=1) + "\n")


def add_run(name: str, run: str, scores: Mapping[str, float], size: Granularity, about: dict[str, Any]) -> None:
    """Add the scores of a run at one size, by test, to a results file, and print them in percent."""
    add_results(name, {run: {"0": {test: {size: score} for test, score in scores.items()}}}, about)
    print(run, {test: round(100 * score, 1) for test, score in scores.items()}, flush=True)


def main_score(evaluator: Evaluator, vectors: Vectors) -> float:
    """The main metric of embeddings, of 1."""
    return evaluator.score(vectors)[evaluator.main_metric]


def computed_once(file: Path, compute: Callable[[], Value]) -> Value:
    """What a function returns, which is kept in a file."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(compute(), file)
    return torch.load(file)


def encoder_parser(description: str | None, encoders: Iterable[str]) -> ArgumentParser:
    """A parser with the options that [`source_of`] reads."""
    parser = argument_parser(description)
    parser.add_argument("encoder", choices=[*encoders], help="the encoder")
    parser.add_argument("--model", help="its folder; minilm has a package")
    return parser


def source_of(options: Namespace) -> str:
    """The folder of the encoder that was asked for."""
    if options.model is None and options.encoder != "minilm":
        raise ValueError(f"{options.encoder} needs --model, the folder of the encoder.")
    return options.model or default_base()


def seeds_of(seeds: Sequence[Any]) -> str:
    """The seeds of a table in words."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
