"""Score every granularity of a grid on many tasks, with each text encoded once."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..encode.codes import FLOAT, code_of
from ..encode.coding import code_vectors
from ..encode.embeddings import GridEmbeddings
from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity
from ..encode.states import shared_layers, truncate, unwrap_encoder
from ..modeling.files_elastic import source_of
from ..utils.hashing import key_of
from .evaluators import Evaluator, Geometry, Retrieval, Scores, Vectors
from .readers import load_task
from .results import GridResults, Score
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
    found: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class TaskEmbeddings:
    """Embeddings of the texts of one task at every granularity, in memory, or memory-mapped in a folder. Equal texts
    are encoded once. A ValueError says that an embedding is not finite; it names the granularities."""

    def __init__(
        self, encoder: GridEncoder, evaluator: Evaluator, description: str | None = None, folder: Path | None = None
    ) -> None:
        encoder.require_cosine()
        self.grid, self.quantizer, self.evaluator = encoder.grid, encoder.quantizer, evaluator
        self._rows: dict[str, list[int] | None] = {}
        self._embeddings: dict[str, GridEmbeddings] = {}
        for role in dict.fromkeys(map(evaluator.role, evaluator.texts)):
            position: dict[str, int] = {}
            rows = {
                name: [position.setdefault(text, len(position)) for text in texts]
                for name, texts in evaluator.texts.items()
                if evaluator.role(name) == role
            }
            embeddings = encoder.encode(
                list(position),
                role=evaluator.read_as(role, encoder),
                description=description,
                folder=folder / role if folder else None,
            ).require_finite()
            for name, its in rows.items():  # None: all rows in order, which needs no copy
                self._rows[name] = None if its == list(range(len(position))) else its
                self._embeddings[name] = embeddings

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Name of each list of texts -> its embeddings at the widest granularity of a layer."""
        return {name: self.of(name, layer) for name in self._rows}

    def of(self, name: str, layer: int) -> torch.Tensor:
        """Embeddings of one list of texts at the widest granularity of a layer, `(texts, dim)`."""
        return truncate(self._encoded(name, layer), self.grid.dims_of(layer)[-1])

    def in_code(self, granularity: Granularity, *, float_queries: bool = False) -> dict[str, torch.Tensor]:
        """Name of each list of texts -> its embeddings in a precision, by [`code_vectors`]."""
        encoded = {name: self._encoded(name, granularity.layer) for name in self._rows}
        return code_vectors(encoded, self.evaluator.stored, granularity, self.quantizer, float_queries=float_queries)

    def rescorers(self, granularity: Granularity) -> dict[str, Callable[[], Vectors]]:
        """Vectors that can rescore a shortlist of a precision: [`RESCORERS`] that differ from the search in it."""
        code = code_of(granularity.code)
        found: dict[str, Callable[[], Vectors]] = {}
        if code.learned or code.name == "binary":
            found["codes"] = partial(self.in_code, granularity, float_queries=True)
        for name in ("int8", FLOAT):
            if code.bits < min(16, code_of(name).bits):
                found[name] = partial(self.in_code, replace(granularity, code=name))
        return found

    def float_dims(self, layer: int) -> list[int]:
        """Dims of a layer that are scored in float32."""
        return [member.dim for member in self.grid if (member.layer, member.code) == (layer, FLOAT)]

    def scores(self) -> dict[Granularity, Scores]:
        """Granularity -> metric -> value."""
        found: dict[Granularity, Scores] = {}
        for layer in self.grid.layers:
            if dims := self.float_dims(layer):
                scores = self.evaluator.score_layer(self.layer(layer), dims)
                found |= {Granularity(layer, dim): its for dim, its in scores.items()}
        for g in (member for member in self.grid if member.code != FLOAT):
            coded = self.in_code(g)
            width = next(iter(coded.values())).shape[1]  # some codes have another number of dims
            found[g] = self.evaluator.score_layer(coded, [width])[width]
        return {g: found[g] for g in self.grid}

    def _encoded(self, name: str, layer: int) -> torch.Tensor:
        return self._embeddings[name].widest(layer, self._rows[name])


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
        `dict[Granularity, dict[str, float]]`: granularity -> metric -> value.

    Raises:
        ValueError: if an embedding is not finite. The message names the granularities.
    """
    return TaskEmbeddings(encoder, evaluator, description).scores()


def score_vectors(
    evaluator: Evaluator, embeddings: Mapping[str, GridEmbeddings], document_layer: int | None = None
) -> dict[Granularity, Scores]:
    """
    Score one task with embeddings that you have, in float32.

    Args:
        evaluator ([`Evaluator`]): Evaluator of the task.
        embeddings (`dict[str, GridEmbeddings]`): Name of each list of texts of the evaluator -> its embeddings.
        document_layer (`int`, *optional*): Layer that documents are read at, for search with asymmetric encoders.
            Default: that of the granularity.

    Returns:
        `dict[Granularity, dict[str, float]]`: granularity -> metric -> value.
    """
    grid, scores = next(iter(embeddings.values())).grid, dict[Granularity, Scores]()
    for layer in grid.layers:
        dims = grid.dims_of(layer)
        layers = {"query": layer, "document": layer if document_layer is None else document_layer}
        vectors = {
            name: its.at(Granularity(layers[evaluator.role(name)], dims[-1])) for name, its in embeddings.items()
        }
        scores |= {Granularity(layer, dim): found for dim, found in evaluator.score_layer(vectors, dims).items()}
    return scores


def evaluate_grid(
    encoder: GridEncoder,
    tasks: Iterable[Task],
    data: Path | None = None,
    *,
    mteb_tasks: Iterable[AbsTask] = (),
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
        tasks (`Iterable[Task]`): Tasks, for example from [`find_tasks`].
        data (`Path`, *optional*): Folder of local data sets. Data that is not there is read from the Hub.
        mteb_tasks (`Iterable[AbsTask]`, *optional*): Tasks of MTEB, for example from `mteb.get_tasks`, which MTEB
            scores by its own protocol. Their task types are `mteb_retrieval`, `mteb_classification`, ...; only their
            main metric is kept. Needs the extra `mteb`.
        folder (`Path`, *optional*): Folder for memory-mapped embeddings, for collections larger than memory and for
            runs that can be resumed. `None` keeps the embeddings of one task at a time in memory.
        two_stages (`bool`, *optional*, defaults to `True`): Whether to also measure two-stage searches, and searches
            in a precision whose shortlist is rescored.
        asymmetric (`bool`, *optional*): Whether to also measure searches with asymmetric encoders, with queries and
            documents at different layers. Default: between the layers that share a space, see [`shared_layers`].
            `True` is between all layers, `False` is not at all.
        hybrid (`bool`, *optional*, defaults to `False`): Whether to also measure BM25, alone and beside queries at the
            same layers as with asymmetric encoders, and documents at the last of them.
        seed (`int`, *optional*, defaults to 0): Seed to record in the results. The evaluation itself is deterministic.
        verbose (`bool`, *optional*, defaults to `False`): Whether to show progress.
        unfinished (`Path`, *optional*): File that gets the results after each task. Tasks that it already has are
            skipped, so an interrupted run resumes. If the data of a task has changed, all tasks run again.

    Returns:
        [`GridResults`]

    Raises:
        ValueError: if a task has no data, two tasks have one name, an embedding is not finite, a metric is undefined,
            or `unfinished` has results of another encoder, grid or arguments. The message names the task, or
            what differs.
    """
    by_name, by_mteb = {}, {task.metadata.name: task for task in mteb_tasks}
    for task in tasks:
        if task.name in by_name or task.name in by_mteb:
            raise ValueError(f"Two tasks are called {task.name!r}: rename one, so that the results tell them apart.")
        by_name[task.name] = task
    evaluators = {name: load_task(task, data) for name, task in by_name.items()}  # missing data fails at once
    for mteb_task in by_mteb.values():
        mteb_task.load_data()
    results = _without_scores(encoder, by_name.values(), by_mteb, seed)
    results.settings["searches"] = {"two_stages": two_stages, "asymmetric": asymmetric, "hybrid": hybrid}
    digests = results.settings["data"] = {name: its.fingerprint() for name, its in evaluators.items()}
    digests |= {name: key_of(its) for name, its in results.settings.get("mteb", {}).items()}
    if unfinished is not None and unfinished.exists():
        results = _resumed(results, GridResults.load(unfinished), unfinished)
    layers = encoder.grid.layers if asymmetric is not False else []
    if asymmetric is None:
        shared = shared_layers(unwrap_encoder(encoder.model).config)
        layers = [layer for layer in layers if layer in shared]
    for name in (name for name in (*by_name, *by_mteb) if name not in results.seconds):
        start = time.perf_counter()
        try:
            if name in by_mteb:
                from .mteb_models import score_mteb

                place = folder / "mteb" / name if folder else None
                encoding = score_mteb(encoder, by_mteb[name], results, place, verbose)
            else:
                evaluator, place = evaluators.pop(name), folder / name if folder else None
                embeddings = TaskEmbeddings(encoder, evaluator, name if verbose else None, place)
                encoding = time.perf_counter() - start
                _score_task(by_name[name], evaluator, embeddings, results)
                if isinstance(evaluator, Retrieval):
                    _measure_searches(name, evaluator, embeddings, results, two_stages, layers, hybrid)
        except ValueError as error:
            raise ValueError(f"Task {name!r}: {error}") from error
        scoring = time.perf_counter() - start - encoding
        results.seconds[name] = {"encode": round(encoding, 2), "score": round(scoring, 2)}
        if verbose:
            print(f"{name}: encoded in {encoding:.1f} s, scored in {scoring:.1f} s", flush=True)
        if unfinished is not None:
            results.save(unfinished)
    return results


def _without_scores(
    encoder: GridEncoder, tasks: Iterable[Task], by_mteb: Mapping[str, AbsTask], seed: int
) -> GridResults:
    """Results that name the encoder, its settings and the data."""
    model = unwrap_encoder(encoder.model)
    identity = encoder.identity()
    weights = identity.pop("weights")
    settings = {
        **identity,
        "batch_size": encoder.batch_size,
        "dtype": encoder.compute_type,
        "attn_implementation": model.config._attn_implementation,
        "device": str(model.device),
    }
    if own := {task.name: task.hub.path if task.hub else task.folder for task in tasks if task.read is not None}:
        settings["own_data"] = own
    if by_mteb:
        settings["mteb"] = {
            name: {
                "type": task.metadata.type,
                "dataset": task.metadata.dataset["path"],
                "revision": task.metadata.dataset["revision"],
            }
            for name, task in by_mteb.items()
        }
    if encoder.quantizer and any(code_of(code).learned for code in encoder.grid.codes):
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
    own = {name: its for name, its in results.settings.items() if name not in others}
    parts |= {name: (its, earlier.settings.get(name)) for name, its in own.items()}
    if differing := [name for name, (its, before) in parts.items() if its != before]:
        raise ValueError(f"{file} has results of another run: {', '.join(differing)} differ. Remove it.")
    data, before = results.settings["data"], earlier.settings["data"]
    if changed := [name for name in earlier.seconds if name in data and data[name] != before.get(name)]:
        logger.warning(f"The data of {', '.join(changed)} has changed since {file} was written: all tasks run again.")
        return results
    return replace(earlier, date=results.date, settings={**results.settings, "data": before | data}, seed=results.seed)


def _score_task(task: Task, evaluator: Evaluator, embeddings: TaskEmbeddings, results: GridResults) -> None:
    """Add the scores of a task to the results."""
    split = "+".join(task.splits)
    for g, metric, value in ((g, *each) for g, scores in embeddings.scores().items() for each in scores.items()):
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


def _measure_searches(
    task: str,
    evaluator: Retrieval,
    embeddings: TaskEmbeddings,
    results: GridResults,
    two_stages: bool,
    layers: Iterable[int],
    hybrid: bool,
) -> None:
    """Add the searches of a retrieval task to the results; those with asymmetric encoders are between `layers`."""
    grid = embeddings.grid
    if two_stages:
        for layer in grid.layers:
            dims = embeddings.float_dims(layer)
            results.two_stage_searches += evaluator.two_stage_searches(task, layer, embeddings.layer(layer), dims)
        for g in (member for member in grid if member.code != FLOAT):
            coded, rescorers = embeddings.in_code(g), embeddings.rescorers(g)
            results.rescored_searches += evaluator.rescored_searches(task, g, coded, rescorers)
    between = {layer: dims for layer in layers if (dims := embeddings.float_dims(layer))}
    results.asymmetric_searches += evaluator.asymmetric_searches(task, embeddings.of, between)
    if hybrid:
        between = between or {grid.layers[-1]: embeddings.float_dims(grid.layers[-1])}
        results.hybrid_searches += evaluator.hybrid_searches(task, embeddings.of, between)
