"""
Run a study, in pieces:

    python -m benchmarks.reproduction.run --study nested --development            # the search of learning rates
    python -m benchmarks.reproduction.run --study nested --minutes 20             # as many test runs as fit
    python -m benchmarks.reproduction.run --study nested --methods MRL ours --backbones mlm --seeds 0

Every run has a JSON file in benchmarks/reproduction/results/STUDY (development runs: STUDY/development), which is
written when the run is complete. Finished runs are skipped, and an interrupted run continues with its last checkpoint
or task: call the same command again. With --minutes, no run starts that would not fit by the mean of finished ones.
Studies called NAME-paper-steps train for as many steps as the papers, for a GPU: `timeout 540 python -m ...` ends
after nine minutes, and the next call continues with the last checkpoint. The data
is that of `python -m benchmarks.data`; a study runs without the sets that are not there, and says so.
`python -m benchmarks.reproduction.report` then writes the tables.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer, TrainingArguments, set_seed

from benchmarks._measure import about
from benchmarks.reproduction.backbones import CACHE, MADE, backbone
from benchmarks.reproduction.design import Study
from benchmarks.reproduction.studies import STUDIES
from benchmarks.reproduction.study import RESULTS, development_tasks, needed, tests_there
from benchmarks.reproduction.training_data import TRAINING_DATA, held_out_text
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder, default_base
from m3bert.encode.device import ComputeArguments
from m3bert.evaluation import GridEncoder, GridResults, evaluate_grid
from m3bert.evaluation.evaluators import Evaluator
from m3bert.modeling import M3BertModel
from m3bert.trainers import MultigranularMLMConfig, MultigranularMLMTrainer, Teacher, fit_exits
from m3bert.trainers.distillation.trainer import DistillationConfig
from m3bert.utils.durable import replacing


FIT_TEXTS = 10_000  # that exits are fitted to


@dataclass(frozen=True)
class Planned:
    """
    A run of a study.

    Args:
        study ([`Study`]): The study.
        method (`str`): Name of the method.
        backbone (`str`): Name of the backbone.
        seed (`int`): Seed.
        learning_rate (`float`, *optional*): The learning rate of a development run. Test runs take the best one.
    """

    study: Study
    method: str
    backbone: str
    seed: int
    learning_rate: float | None = None

    @property
    def name(self) -> str:
        """The name of its file."""
        parts = [self.backbone, self.method, *([f"{self.learning_rate:g}"] if self.development else []), self.seed]
        return re.sub(r"[^\w.-]+", "_", "-".join(map(str, parts)))

    @property
    def development(self) -> bool:
        """Whether it scores development tasks."""
        return self.learning_rate is not None

    def file(self, results: Path) -> Path:
        """Its results."""
        folder = results / self.study.name
        return (folder / "development" if self.development else folder) / f"{self.name}.json"

    def finished(self, results: Path) -> bool:
        """Whether it has results. Those of an earlier script, without arguments, stay until a run replaces them."""
        file = self.file(results)
        return file.is_file() and not from_earlier_script(json.loads(file.read_text(encoding="utf-8")))


def from_earlier_script(run: Mapping[str, Any]) -> bool:
    """Whether results are of a script before this one, which kept no arguments, seconds or commit."""
    return "arguments" not in run


def planned(
    study: Study,
    *,
    development: bool,
    methods: Sequence[str] | None = None,
    chosen_backbones: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
) -> Iterator[Planned]:
    """The runs of a study in their order: all of one seed first, so that methods have the same seeds early."""
    for seed in seeds or (study.seeds[:1] if development else study.seeds):
        for name in chosen_backbones or study.backbones:
            for method in methods or study.methods:
                if study.method(method, name).seedless and seed != study.seeds[0]:
                    continue
                for rate in study.rates(method, name) if development else (None,):
                    yield Planned(study, method, name, seed, rate)


def read_runs(study: Study, results: Path = RESULTS, *, development: bool = False) -> list[dict[str, Any]]:
    """The finished runs of a study."""
    folder = results / study.name / "development" if development else results / study.name
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]


def quality(run: Mapping[str, Any]) -> float:
    """The mean over development tasks and granularities, by which settings are chosen."""
    return statistics.mean(value for scores in run["scores"].values() for value in scores.values())


def chosen_rate(study: Study, method: str, name: str, results: Path = RESULTS) -> float | None:
    """
    The learning rate of a method on a backbone that is best on the development tasks; none without training.

    Raises:
        ValueError: if there are several and not all have a development run.
    """
    rates = study.rates(method, name)
    if len(rates) < 2:
        return rates[0] if rates else None
    runs = read_runs(study, results, development=True)
    qualities = {
        run["learning_rate"]: quality(run) for run in runs if (run["method"], run["backbone"]) == (method, name)
    }
    if missing := [f"{rate:g}" for rate in rates if rate not in qualities]:
        raise ValueError(f"{method} on {name} has no development run at {', '.join(missing)}: pass --development.")
    return max(rates, key=qualities.__getitem__)


def check_frozen(study: Study, name: str) -> None:
    """
    Check that the settings of a backbone were frozen before tests are scored.

    Raises:
        ValueError: if the study names no commit, it is not an ancestor of this one, or a development result has
            changed since then.
    """
    if name not in study.frozen:
        raise ValueError(
            f"The settings of {study.name} on {name} are not frozen: choose them with --development, commit, and name "
            "the commit in `frozen` of the study."
        )
    commit, searched = study.frozen[name], f"{RESULTS / study.name / 'development' / name}-*.json"
    for arguments, problem in (
        (["merge-base", "--is-ancestor", commit, "HEAD"], "is not an ancestor of this commit"),
        (["diff", "--quiet", commit, "--", searched], "has other development results"),
    ):
        if subprocess.run(["git", *arguments], cwd=RESULTS, capture_output=True).returncode:
            raise ValueError(f"The commit {commit}, at which {study.name} on {name} was frozen, {problem}.")


def fitted(run: Planned, dataset: Dataset, data: Path, cache: Path) -> tuple[M3BertModel, Any, float]:
    """A backbone with exits, its tokenizer and the seconds of the fit. It is fitted once for all runs."""
    method, length = run.study.method(run.method, run.backbone), run.study.settings["max_length"]
    kinds = {"real": method.taught_by_real, "paths": bool(method.paths)}
    folder = cache / "-".join(["exits", run.backbone, *(kind for kind, used in kinds.items() if used)])
    if not folder.is_dir():
        model, tokenizer = backbone(run.backbone, cache)
        texts = list(dict.fromkeys(text for column in dataset.column_names for text in dataset[column]))[:FIT_TEXTS]
        start = time.perf_counter()
        teacher = Teacher(default_base(), max_length=length).embed(texts, cache) if method.taught_by_real else None
        fit_exits(
            model,
            tokenizer,
            texts,
            layers=[0, 2, 4],
            paths=method.paths,
            teacher=teacher,
            max_length=length,
            cache_dir=cache,
        )
        draft = folder.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        publish(model, tokenizer, draft)
        (draft / "seconds.json").write_text(json.dumps(time.perf_counter() - start), encoding="utf-8")
        draft.rename(folder)
    seconds = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), seconds


def masked_loss(model: Any, tokenizer: Any, data: Path) -> dict[str, float]:
    """Cross-entropy of masked tokens of held-out text at every granularity, with the same masks for all runs."""
    with TemporaryDirectory() as folder:
        args = MultigranularMLMConfig(
            output_dir=folder,
            per_device_eval_batch_size=50,
            bf16=True,
            use_cpu=not torch.accelerator.is_available(),
            report_to="none",
            disable_tqdm=True,
        )
        trainer = MultigranularMLMTrainer(model, args, tokenizer, eval_dataset=held_out_text(data))
        set_seed(0)
        metrics = trainer.evaluate()
    return {
        name.removeprefix("eval_mlm_"): round(value, 5)
        for name, value in metrics.items()
        if name.startswith("eval_mlm_")
    }


def first_rows(dataset: Dataset, seed: int, steps: int, batch_size: int) -> Dataset:
    """The same rows in the same order for all methods, and no more of them, because a teacher embeds all."""
    return dataset.shuffle(seed).select(range(min(len(dataset), steps * batch_size)))


def publish(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model without a trainer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def stage_of(run: Planned, stage: Any, model: Any, tokenizer: Any, data: Path, folder: Path) -> Any:
    """The trainer of a later stage, trained."""
    rows = TRAINING_DATA[stage.training_data](data)
    rows = first_rows(rows, run.seed, stage.settings["max_steps"], stage.settings["per_device_train_batch_size"])
    set_seed(run.seed)
    return stage.train(model, tokenizer, rows, None, folder, seed=run.seed, data_seed=run.seed)


def first_stage(
    run: Planned, rate: float | None, dataset: Dataset, data: Path, cache: Path, work: Path
) -> tuple[Any, Any, Any, dict[str, float]]:
    """The trainer of the first stage, trained (without training, `None`), its model and tokenizer, and seconds."""
    study, method = run.study, run.study.method(run.method, run.backbone)
    seconds: dict[str, float] = {}
    if method.exits:
        model, tokenizer, seconds["fit"] = fitted(run, dataset, data, cache)
    else:
        model, tokenizer = backbone(run.backbone, cache)
    if method.untouched:
        return None, model, tokenizer, seconds
    settings = {**study.settings, "max_steps": study.steps, "learning_rate": rate, "seed": run.seed}
    objects = {}
    rows = first_rows(dataset, run.seed, study.steps, study.settings["per_device_train_batch_size"])
    if issubclass(method.classes[0], DistillationConfig):
        settings["teacher_cache_dir"] = str(work / "teacher")
        if method.taught_by_real:  # the same for all methods
            settings["teacher_cache_dir"] = str(cache / "teachers")
            objects["teacher"] = Teacher(default_base(), max_length=study.settings["max_length"])
    set_seed(run.seed)
    start = time.perf_counter()
    trainer = method.train(model, tokenizer, rows, objects, work / "checkpoints", data_seed=run.seed, **settings)
    seconds["training"] = time.perf_counter() - start
    return trainer, model, tokenizer, seconds


def trained(
    run: Planned, rate: float | None, dataset: Dataset, data: Path, cache: Path, work: Path
) -> tuple[Path, dict[str, Any]]:
    """The folder of the trained model, as its trainer publishes it, and what to record. A model that an earlier call
    has saved is not trained again."""
    folder, study, method = work / "trained", run.study, run.study.method(run.method, run.backbone)
    if not folder.is_dir():
        resumed = (work / "checkpoints").is_dir()
        trainer, model, tokenizer, seconds = first_stage(run, rate, dataset, data, cache, work)
        record: dict[str, Any] = {"resumed": resumed, "seconds": seconds, "arguments": {}}
        if trainer is not None:
            record["arguments"] = arguments_of(trainer.args)
        if study.losses:
            record["losses"] = {"masked tokens": masked_loss(model, tokenizer, data)}
        if method.then is not None:
            start = time.perf_counter()
            trainer = stage_of(run, method.then, model.base_model, tokenizer, data, work / "then")
            seconds["then"] = time.perf_counter() - start
            record["then"] = arguments_of(trainer.args)
        draft = work / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        if trainer is None:
            publish(model, tokenizer, draft)
        else:
            trainer.save_model(str(draft))
        (draft / "record.json").write_text(json.dumps(record), encoding="utf-8")
        draft.rename(folder)
    return folder, json.loads((folder / "record.json").read_text(encoding="utf-8"))


def arguments_of(args: TrainingArguments) -> dict[str, Any]:
    """The method's own arguments, and those of [`~transformers.TrainingArguments`] that differ from their defaults,
    without folders of this machine."""
    inherited = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    return {
        name: value
        for name, value in args.to_dict().items()
        if value is not None
        and not name.endswith(("_dir", "run_name"))
        and not (isinstance(value, str) and Path(value).is_absolute())
        and (name not in inherited or value != inherited[name])
    }


def scores_of(run: Planned, folder: Path, tests: Mapping[str, Evaluator], data: Path, work: Path) -> GridResults:
    """The scores of a trained model at the granularities of its method."""
    study = run.study
    encoder = GridEncoder.from_pretrained(
        folder,
        grid=study.sizes(run.method, run.backbone),
        compute=ComputeArguments(),
        model_kwargs={"dtype": torch.bfloat16},
        batch_size=128,
        max_length=study.test_length or study.settings["max_length"],
        pooling=study.settings.get("pooling", "mean"),
    )
    options: Any = {"two_stages": False, "asymmetric": False, "unfinished": work / "scores.json", "seed": run.seed}
    return evaluate_grid(encoder, development_tasks(tests), data, **options)


def identity_of(run: Planned, rate: float | None, cache: Path) -> dict[str, Any]:
    """What a results file says about its run before training."""
    made = cache / run.backbone / "model.safetensors"
    weights = {"weights": sha256(made.read_bytes()).hexdigest()[:12]} if run.backbone in MADE else {}
    return {
        "study": run.study.name,
        "method": run.method,
        "backbone": run.backbone,
        **weights,
        "seed": run.seed,
        "learning_rate": rate,
        "split": "development" if run.development else "test",
        **({} if run.development else {"frozen": run.study.frozen[run.backbone]}),
    }


def execute(run: Planned, dataset: Dataset, data: Path, cache: Path, results: Path) -> dict[str, Any]:
    """
    Train and score a run, and write its file.

    Raises:
        ValueError: if it would score tests of a study that is not frozen.
    """
    study = run.study
    if not run.development:
        check_frozen(study, run.backbone)
    tests = tests_there(study.development if run.development else study.tests, data)
    rate = run.learning_rate
    if rate is None:
        rate = chosen_rate(study, run.method, run.backbone, results)
    work = cache / "runs" / study.name / run.name
    described = about(run.seed, packages=("datasets", "sentence-transformers"))
    set_seed(run.seed)
    folder, record = trained(run, rate, dataset, data, cache, work)
    evaluated = scores_of(run, folder, tests, data, work)
    seconds = record["seconds"] | {"evaluation": sum(sum(parts.values()) for parts in evaluated.seconds.values())}
    result: dict[str, Any] = {
        **identity_of(run, rate, cache),
        **described,
        "resumed": record["resumed"],
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "arguments": record["arguments"],
        **{name: record[name] for name in ("then", "losses") if name in record},
        "scores": {
            name: {str(g): round(value, 5) for g, value in evaluated.quality([name]).items()} for name in tests
        },
    }
    file = run.file(results)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as draft:
        draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(work)
    return result


def run_all(
    runs: Sequence[Planned], data: Path, cache: Path = CACHE, results: Path = RESULTS, minutes: float | None = None
) -> list[Planned]:
    """Execute the runs that are not finished and fit into `minutes`, and return those that are left."""
    started, dataset = time.perf_counter(), None
    for place, run in enumerate(runs):
        if run.finished(results):
            continue
        took = [
            sum(other["seconds"].values()) - other["seconds"].get("fit", 0)
            for other in read_runs(run.study, results, development=run.development)
            if not from_earlier_script(other) and not other["resumed"]
        ]
        left = float("inf") if minutes is None else 60 * minutes - (time.perf_counter() - started)
        if left < (statistics.mean(took) if took else 0):
            return [left_run for left_run in runs[place:] if not left_run.finished(results)]
        if dataset is None:
            dataset = needed(TRAINING_DATA[run.study.training_data](data), "training data of this study", data)
        result = execute(run, dataset, data, cache, results)
        print(f"{run.name}: {100 * quality(result):.2f} in {result['seconds']}", flush=True)
    return []


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--study", required=True, choices=list(STUDIES), help="the study")
    parser.add_argument("--minutes", type=float, help="start no run that would not fit into this time")
    parser.add_argument("--methods", nargs="+", help="methods to run; default: all")
    parser.add_argument("--backbones", nargs="+", help="backbones to run on; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds; default: those of the study")
    parser.add_argument("--development", action="store_true", help="score development tasks at every learning rate")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of backbones and unfinished runs")
    options = parser.parse_args(arguments)
    study = STUDIES[options.study]
    for given, known in ((options.methods, study.methods), (options.backbones, study.backbones)):
        if unknown := [name for name in given or () if name not in known]:
            raise ValueError(f"{study.name} has no {', '.join(unknown)}; legal values: {', '.join(known)}.")
    if not options.development:
        for name in options.backbones or study.backbones:
            check_frozen(study, name)
    runs = list(
        planned(
            study,
            development=options.development,
            methods=options.methods,
            chosen_backbones=options.backbones,
            seeds=options.seeds,
        )
    )
    left = run_all(runs, data_folder(), options.cache, minutes=options.minutes)
    print(f"{len(left)} of {len(runs)} runs are left{': ' if left else ''}{', '.join(run.name for run in left)}")


if __name__ == "__main__":
    run_command(main)
