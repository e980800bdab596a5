"""Score every granularity of a grid on many tasks, with each text encoded once."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..encode.embeddings import GridEmbeddings
from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity
from ..encode.precisions import precision_of
from ..encode.states import unwrap_encoder
from ..modeling.files_elastic import source_of
from ..utils.hashing import key_of
from .evaluators import Evaluator, Geometry, Scores
from .readers import load_task
from .results import GridResults, Score
from .searches import measure_searches
from .task_embeddings import TaskEmbeddings
from .tasks import Task


logger = logging.getLogger(__name__)


if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

# Distributions that scores may depend on. faiss has several; those with "gpu" search on GPUs.
PACKAGES = (
    "torch", "transformers", "datasets", "scikit-learn", "scipy", "faiss-cpu", "faiss-gpu", "faiss-gpu-cu12", "numpy",
    "mteb",
)  # fmt: skip


def run_facts() -> dict[str, Any]:
    """Date, machine and versions of packages, for a results file."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs"
    return {"date": date.today().isoformat(), "machine": machine, "versions": installed_versions()}


def installed_versions() -> dict[str, str]:
    """Versions of the installed packages that scores may depend on."""
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def score_grid(
    encoder: GridEncoder, evaluator: Evaluator, description: str | None = None
) -> dict[Granularity, Scores]:
    """
    Score one task at every granularity, also in other precisions, with each text encoded once.

    Args:
        encoder ([`GridEncoder`]): Encoder and grid.
        evaluator ([`Evaluator`]): Evaluator of the task.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.

    Returns:
        `dict[Granularity, dict[str, float]]`: granularity -> metric -> value. Raises as [`TaskEmbeddings`].
    """
    return TaskEmbeddings(encoder, evaluator, description).scores()


def score_vectors(
    evaluator: Evaluator, embeddings: Mapping[str, GridEmbeddings], document_layer: int | None = None
) -> dict[Granularity, Scores]:
    """
    Score one task with embeddings that you have, in float32: granularity -> metric -> value.

    Args:
        evaluator ([`Evaluator`]): Evaluator of the task.
        embeddings (`dict[str, GridEmbeddings]`): Name of each list of texts of the evaluator -> its embeddings.
        document_layer (`int`, *optional*): Layer of the documents, for asymmetric encoders. Default: as queries.
    """
    grid, scores = next(iter(embeddings.values())).grid, dict[Granularity, Scores]()
    for layer in grid.layers:
        dims = grid.dims_of(layer)
        layers = {"query": layer, "document": layer if document_layer is None else document_layer}
        vectors = {
            name: part.at(Granularity(layers[evaluator.role(name)], dims[-1])) for name, part in embeddings.items()
        }
        scores |= {Granularity(layer, dim): part for dim, part in evaluator.score_layer(vectors, dims).items()}
    return scores


def evaluate_grid(
    encoder: GridEncoder,
    tasks: Iterable[Task | AbsTask],
    data: Path | None = None,
    *,
    folder: Path | None = None,
    two_stages: bool = True,
    asymmetric: bool | None = None,
    hybrid: bool = False,
    seed: int = 0,
    verbose: bool = False,
    unfinished: Path | None = None,
) -> GridResults:
    """
    Score every granularity on every task, also in other precisions, with the texts of each task encoded once.

    Args:
        encoder ([`GridEncoder`]): Encoder and grid.
        tasks (`Iterable[Task | AbsTask]`): Tasks, for example from [`find_tasks`]; with the extra `mteb` also from
            `mteb.get_tasks`, which MTEB scores by its protocol. Their task types are `mteb_retrieval`,
            `mteb_classification`, ..., and only their main metric is scored.
        data (`Path`, *optional*): Folder of local data sets. Data that is not there is read from the Hub.
        folder (`Path`, *optional*): Folder for memory-mapped embeddings, for collections larger than memory and for
            runs that can be resumed. `None` keeps the embeddings of one task at a time in memory.
        two_stages (`bool`, *optional*, defaults to `True`): Whether to also measure two-stage searches, and searches
            in a precision whose shortlist is rescored.
        asymmetric (`bool`, *optional*): Whether to also measure searches with queries and documents at different
            layers: `True` between all layers, `False` not at all. Default: between the [`shared_layers`].
        hybrid (`bool`, *optional*, defaults to `False`): Whether to also measure BM25, alone and beside queries at the
            same layers as with asymmetric encoders, and documents at the last of them.
        seed (`int`, *optional*, defaults to 0): Seed to record in the results. The evaluation is deterministic.
        verbose (`bool`, *optional*, defaults to `False`): Whether to show progress.
        unfinished (`Path`, *optional*): File that gets the results after each task. Tasks that it already has are
            skipped, so an interrupted run resumes. If the data of a task has changed, all tasks run again.

    Raises:
        ValueError: if a task has no data, two tasks have one name, an embedding is not finite, a metric is undefined,
            or `unfinished` has results of another encoder, grid or arguments. The message names the task, or
            what differs.
    """
    by_name = _by_name(tasks)
    evaluators = {name: load_task(task, data) for name, task in by_name.items() if isinstance(task, Task)}
    results = _without_scores(encoder, by_name, evaluators, seed)
    results.settings["searches"] = {"two_stages": two_stages, "asymmetric": asymmetric, "hybrid": hybrid}
    if unfinished is not None and unfinished.exists():
        results = _resumed(results, GridResults.load(unfinished), unfinished)
    for name, task in by_name.items():
        if name in results.seconds:
            continue
        try:
            _score(task, evaluators, encoder, folder, results, verbose)
        except ValueError as error:
            raise ValueError(f"Task {name!r}: {error}") from error
        if unfinished is not None:
            results.save(unfinished)
    return results


def _by_name(tasks: Iterable[Task | AbsTask]) -> dict[str, Task | AbsTask]:
    """Tasks by their names. ValueError if two have one name. Those of MTEB load their data."""
    by_name: dict[str, Task | AbsTask] = {}
    for task in tasks:
        name = task.name if isinstance(task, Task) else task.metadata.name
        if name in by_name:
            raise ValueError(f"Two tasks are called {name!r}: rename one, so that the results tell them apart.")
        by_name[name] = task
        if not isinstance(task, Task):
            task.load_data()
    return by_name


def _without_scores(
    encoder: GridEncoder, tasks: Mapping[str, Task | AbsTask], evaluators: Mapping[str, Evaluator], seed: int
) -> GridResults:
    """Results that name the encoder, its settings and the data."""
    model, identity = unwrap_encoder(encoder.model), encoder.identity()
    weights = identity.pop("weights")
    own_data = {
        name: task.hub.path if task.hub else task.folder
        for name, task in tasks.items()
        if isinstance(task, Task) and task.read is not None
    }
    mteb = {
        name: {"type": facts.type, "dataset": facts.dataset["path"], "revision": facts.dataset["revision"]}
        for name, task in tasks.items()
        if not isinstance(task, Task)
        for facts in [task.metadata]
    }
    data = {name: evaluator.fingerprint() for name, evaluator in evaluators.items()}
    settings = {
        **identity,
        "batch_size": encoder.batch_size,
        "dtype": encoder.compute_type,
        "attn_implementation": model.config._attn_implementation,
        "device": str(model.device),
        **({"own_data": own_data} if own_data else {}),
        **({"mteb": mteb} if mteb else {}),
        "data": data | {name: key_of(facts) for name, facts in mteb.items()},
    }
    if encoder.quantizer and any(precision_of(code).learned for code in encoder.grid.codes):
        settings["quantizer"] = encoder.quantizer.fingerprint
    return GridResults(
        model=model.config.name_or_path,
        revision=source_of(model).revision,
        grid=str(encoder.grid),
        seed=seed,
        weights=weights,
        **run_facts(),
        settings=settings,
    )


def _resumed(results: GridResults, earlier: GridResults, file: Path) -> GridResults:
    """The results of an interrupted run, to go on with; the new ones if the data of one of its tasks has changed."""
    parts = {name: (getattr(results, name), getattr(earlier, name)) for name in ("weights", "grid")}
    others = ("own_data", "mteb", "data", "device", "attn_implementation")
    settings = {name: value for name, value in results.settings.items() if name not in others}
    parts |= {name: (value, earlier.settings.get(name)) for name, value in settings.items()}
    if differing := [name for name, (value, before) in parts.items() if value != before]:
        raise ValueError(f"{file} has results of another run: {', '.join(differing)} differ. Remove it.")
    data, before = results.settings["data"], earlier.settings["data"]
    if changed := [name for name in earlier.seconds if name in data and data[name] != before.get(name)]:
        logger.warning(f"The data of {', '.join(changed)} has changed since {file} was written: all tasks run again.")
        return results
    return replace(earlier, date=results.date, settings={**results.settings, "data": before | data}, seed=results.seed)


def _score(
    task: Task | AbsTask,
    evaluators: dict[str, Evaluator],
    encoder: GridEncoder,
    folder: Path | None,
    results: GridResults,
    verbose: bool,
) -> None:
    """Add the scores, searches and seconds of a task to the results."""
    start = time.perf_counter()
    if isinstance(task, Task):
        name, evaluator = task.name, evaluators.pop(task.name)  # its texts take memory
        embeddings = TaskEmbeddings(encoder, evaluator, name if verbose else None, folder / name if folder else None)
        encoding = time.perf_counter() - start
        _add_scores(task, embeddings, results)
        measure_searches(name, embeddings, encoder, results, **results.settings["searches"])
    else:
        from .mteb_models import score_mteb

        name = task.metadata.name
        encoding = score_mteb(encoder, task, results, folder / "mteb" / name if folder else None, verbose)
    scoring = time.perf_counter() - start - encoding
    results.seconds[name] = {"encode": round(encoding, 2), "score": round(scoring, 2)}
    if verbose:
        print(f"{name}: encoded in {encoding:.1f} s, scored in {scoring:.1f} s", flush=True)


def _add_scores(task: Task, embeddings: TaskEmbeddings, results: GridResults) -> None:
    """Add the scores of a task to the results."""
    evaluator, split = embeddings.evaluator, "+".join(task.splits)
    for g, scores in embeddings.scores().items():
        for metric, value in scores.items():
            main = metric == evaluator.main_metric
            results.add(Score(task.name, evaluator.task_type, split, metric, main, str(g), value))
    results.texts[task.name] = {name: len(texts) for name, texts in evaluator.texts.items()}
    if isinstance(evaluator, Geometry):
        variances = {
            layer: evaluator.both(embeddings.layer(layer)).double().var(dim=0) for layer in embeddings.grid.layers
        }
        results.variances[task.name] = {
            str(layer): [float(f"{value:.6g}") for value in values.tolist()] for layer, values in variances.items()
        }
