"""Score every granularity of a grid on many tasks, with each text encoded once."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..core.codes import FLOAT, code_of
from ..core.extras import require_extra
from ..core.granularity import Granularity
from ..core.states import shared_layers, truncate, unwrap_encoder
from .coding import code_vectors
from .embeddings import GridEmbeddings
from .encoding import GridEncoder
from .evaluators import Evaluator, Scores, Vectors
from .readers import load_task
from .results import AsymmetricSearch, GridResults, HybridSearch, RescoredSearch, Score, TwoStageSearch
from .tasks import Task


if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

# Distributions that scores may depend on. faiss has several; those with "gpu" search on GPUs.
PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "scikit-learn",
    "scipy",
    "faiss-cpu",
    "faiss-gpu",
    "faiss-gpu-cu12",
    "numpy",
    "mteb",
)


def run_facts() -> dict[str, Any]:
    """What a results file says of the run that wrote it: date, machine and versions of packages."""
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
    """
    Embeddings of the texts of one task at every granularity. Equal texts are encoded once.

    Args:
        encoder ([`GridEncoder`]): Encoder and grid.
        evaluator ([`Evaluator`]): Evaluator with the texts.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.
        folder (`Path`, *optional*): Folder for memory-mapped embeddings; `None` keeps them in memory.

    Raises:
        ValueError: if an embedding is not finite. The message names the granularities.
    """

    def __init__(
        self,
        encoder: GridEncoder,
        evaluator: Evaluator,
        description: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self.grid, self.quantizer, self.evaluator = encoder.grid, encoder.quantizer, evaluator
        self._rows: dict[str, list[int] | None] = {}
        self._role = {name: evaluator.role(name) for name in evaluator.texts}
        self._embeddings: dict[str, GridEmbeddings] = {}
        for role in dict.fromkeys(self._role.values()):
            position: dict[str, int] = {}
            for name in (name for name, its in self._role.items() if its == role):
                self._rows[name] = [position.setdefault(text, len(position)) for text in evaluator.texts[name]]
            for name, rows in self._rows.items():  # None: all rows in order, which needs no copy
                if self._role[name] == role and rows == list(range(len(position))):
                    self._rows[name] = None
            self._embeddings[role] = encoder.encode(
                list(position), role=role, description=description, folder=folder / role if folder else None
            ).require_finite()

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
        """What can rescore a shortlist of a precision: [`RESCORERS`] that differ from the search in the precision."""
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

    def _encoded(self, name: str, layer: int) -> torch.Tensor:
        return self._embeddings[self._role[name]].widest(layer, self._rows[name])


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
    embeddings = TaskEmbeddings(encoder, evaluator, description)
    floats = {
        Granularity(layer, dim): scores
        for layer in encoder.grid.layers
        for dim, scores in _float_scores(evaluator, embeddings, layer).items()
    }
    return {g: floats[g] if g in floats else _scores(evaluator, embeddings.in_code(g)) for g in encoder.grid}


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

    Raises:
        ValueError: if documents have no embeddings at the layer.
    """
    grid, scores = next(iter(embeddings.values())).grid, dict[Granularity, Scores]()
    for layer in grid.layers:
        dims = grid.dims_of(layer)
        at = {
            name: layer if document_layer is None or evaluator.role(name) == "query" else document_layer
            for name in embeddings
        }
        vectors = {name: its.at(Granularity(at[name], dims[-1])) for name, its in embeddings.items()}
        scores |= {Granularity(layer, dim): found for dim, found in evaluator.score_layer(vectors, dims).items()}
    return scores


def tfidf_scores(evaluator: Evaluator) -> Scores:
    """
    Score a retrieval task with TF-IDF vectors of the words of its documents, a baseline without any training.

    Args:
        evaluator ([`Retrieval`]): Evaluator of the task.

    Returns:
        `dict[str, float]`: metric -> value.

    Raises:
        ValueError: if scikit-learn is not installed.
    """
    library = require_extra("sklearn.feature_extraction.text", "evaluation", "TF-IDF")
    vectorizer = library.TfidfVectorizer(sublinear_tf=True).fit(evaluator.texts["documents"])
    vectors = {name: vectorizer.transform(texts).toarray() for name, texts in evaluator.texts.items()}
    return evaluator.score({name: torch.from_numpy(its) for name, its in vectors.items()})


def _float_scores(evaluator: Evaluator, embeddings: TaskEmbeddings, layer: int) -> dict[int, Scores]:
    """Dim -> metrics in float32."""
    dims = embeddings.float_dims(layer)
    return evaluator.score_layer(embeddings.layer(layer), dims) if dims else {}


def _scores(evaluator: Evaluator, vectors: Vectors) -> Scores:
    """Metrics of vectors in a precision. Some have another number of dims than the embeddings."""
    width = next(iter(vectors.values())).shape[1]
    return evaluator.score_layer(vectors, [width])[width]


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
            skipped, so an interrupted run resumes. The file must be from the same weights, data and arguments;
            of these, weights and grid are checked.

    Returns:
        [`GridResults`]

    Raises:
        ValueError: if a task has no data, two tasks have one name, an embedding is not finite, all labels are equal,
            a metric is undefined, or `unfinished` has results of other weights or another grid. The message names the
            task.
    """
    tasks, by_mteb = list(tasks), {task.metadata.name: task for task in mteb_tasks}
    names = [*(task.name for task in tasks), *by_mteb]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"Two tasks are called {twice[0]!r}: rename one, so that the results can tell them apart.")
    evaluators = {task.name: load_task(task, data) for task in tasks}  # missing data fails before any encoding
    if by_mteb:
        from .mteb_models import load_mteb_data

        for mteb_task in by_mteb.values():
            load_mteb_data(mteb_task)
    grid, config = encoder.grid, unwrap_encoder(encoder.model).config
    grid_is_learned = any(code_of(code).learned for code in grid.codes)
    own = {task.name: task.hub.path if task.hub else task.folder for task in tasks if task.read is not None}
    results = GridResults(
        model=config.name_or_path,
        revision=getattr(config, "_commit_hash", None),
        grid=str(grid),
        seed=seed,
        weights=encoder.weights_fingerprint(),
        **run_facts(),
        settings={
            "pooling": encoder.pooling,
            "max_length": encoder.max_length,
            "max_lengths": dict(encoder.max_lengths),
            "batch_size": encoder.batch_size,
            "prompts": dict(encoder.prompts),
            "dtype": encoder.compute_type,
            "attn_implementation": config._attn_implementation,
            "device": str(unwrap_encoder(encoder.model).device),
            # Hub id, or name of the file or folder, of the data of tasks that are not registered.
            **({"own_data": own} if own else {}),
            **({"mteb": {name: _data_of(task) for name, task in by_mteb.items()}} if by_mteb else {}),
            **({"quantizer": encoder.quantizer.fingerprint} if encoder.quantizer and grid_is_learned else {}),
        },
    )
    if unfinished is not None and unfinished.exists():
        results = _resumed(results, GridResults.load(unfinished), unfinished)
    layers = _asymmetric_layers(encoder, asymmetric)
    for task in tasks:
        if task.name in results.seconds:
            continue
        try:
            start = time.perf_counter()
            evaluator = evaluators.pop(task.name)
            results.texts[task.name] = {name: len(texts) for name, texts in evaluator.texts.items()}
            embeddings = TaskEmbeddings(
                encoder, evaluator, task.name if verbose else None, folder / task.name if folder else None
            )
            encoded = time.perf_counter()
            _score_task(task, evaluator, embeddings, results, two_stages, layers)
            if hybrid:
                dims = _dims_of(embeddings, layers) or {grid.layers[-1]: embeddings.float_dims(grid.layers[-1])}
                searches = evaluator.score_hybrid(embeddings.of, dims)
                results.hybrid_searches += [HybridSearch(task=task.name, **search) for search in searches]
            done = time.perf_counter()
        except ValueError as error:
            raise ValueError(f"Task {task.name!r}: {error}") from error
        results.seconds[task.name] = {"encode": round(encoded - start, 2), "score": round(done - encoded, 2)}
        _report(task.name, results, verbose, unfinished)
    for name, mteb_task in by_mteb.items():
        if name not in results.seconds:
            _score_mteb(mteb_task, encoder, results, folder / "mteb" / name if folder else None, verbose)
            _report(name, results, verbose, unfinished)
    return results


def _report(task: str, results: GridResults, verbose: bool, unfinished: Path | None) -> None:
    """Show that a task is scored, and save the results so far."""
    if verbose:
        seconds = results.seconds[task]
        print(f"{task}: encoded in {seconds['encode']:.1f} s, scored in {seconds['score']:.1f} s", flush=True)
    if unfinished is not None:
        results.save(unfinished)


def _data_of(task: AbsTask) -> dict[str, str]:
    """What results say of a task of MTEB: its type, and data set and revision on the Hub."""
    return {
        "type": task.metadata.type,
        "dataset": task.metadata.dataset["path"],
        "revision": task.metadata.dataset["revision"],
    }


def _score_mteb(task: AbsTask, encoder: GridEncoder, results: GridResults, folder: Path | None, verbose: bool) -> None:
    """Add the scores of a task of MTEB to the results."""
    from .mteb_models import EncodeOnce, score_mteb, task_type_of

    name, encode_once, start = task.metadata.name, EncodeOnce(encoder, folder), time.perf_counter()
    try:
        for g, result in score_mteb(encode_once, task, verbose).items():
            value, metric = float(result.get_score()), task.metadata.main_score
            if not math.isfinite(value):
                raise ValueError(f"{metric} is not defined at {g}: its embeddings may all be equal.")
            split = "+".join(result.scores)
            results.scores.append(Score(name, task_type_of(task), split, metric, True, str(g), value))
    except ValueError as error:
        raise ValueError(f"Task {name!r}: {error}") from error
    seconds, encoded = time.perf_counter() - start, encode_once.seconds
    results.texts[name] = {"texts": encode_once.count}
    results.seconds[name] = {"encode": round(encoded, 2), "score": round(seconds - encoded, 2)}


def _resumed(results: GridResults, earlier: GridResults, file: Path) -> GridResults:
    """New results with those of the tasks that an interrupted run has scored."""
    for name in ("weights", "grid"):
        if getattr(results, name) != getattr(earlier, name):
            raise ValueError(f"{file} has results of another {name.rstrip('s')}: remove it.")
    kept = ("scores", "seconds", "two_stage_searches", "rescored_searches", "asymmetric_searches", "hybrid_searches")
    return replace(results, **{name: getattr(earlier, name) for name in (*kept, "variances", "texts")})


def _asymmetric_layers(encoder: GridEncoder, asymmetric: bool | None) -> list[int]:
    """Layers of the grid between which searches with asymmetric encoders are measured; see [`evaluate_grid`]."""
    if asymmetric is not None:
        return encoder.grid.layers if asymmetric else []
    shared = shared_layers(unwrap_encoder(encoder.model).config)
    return [layer for layer in encoder.grid.layers if layer in shared]


def _dims_of(embeddings: TaskEmbeddings, layers: Sequence[int]) -> dict[int, list[int]]:
    """Layer -> its dims that are scored in float32, for those of the layers that have some."""
    return {layer: dims for layer in layers if (dims := embeddings.float_dims(layer))}


def _score_task(
    task: Task,
    evaluator: Evaluator,
    embeddings: TaskEmbeddings,
    results: GridResults,
    two_stages: bool,
    asymmetric_layers: Sequence[int],
) -> None:
    """Add the scores of a task to the results."""
    split = "+".join(task.splits)

    def add(g: Granularity, scores: Scores) -> None:
        for metric, value in scores.items():
            if not math.isfinite(value):
                raise ValueError(f"{metric} is not defined at {g}: its embeddings may all be equal.")
            main = metric == evaluator.main_metric
            results.scores.append(Score(task.name, evaluator.task_type, split, metric, main, str(g), value))

    for layer in embeddings.grid.layers:
        vectors, dims = embeddings.layer(layer), embeddings.float_dims(layer)
        for dim, scores in _float_scores(evaluator, embeddings, layer).items():
            add(Granularity(layer, dim), scores)
        for g in (member for member in embeddings.grid if member.layer == layer and member.code != FLOAT):
            coded = embeddings.in_code(g)
            add(g, _scores(evaluator, coded))
            if two_stages:
                results.rescored_searches += [
                    RescoredSearch(task=task.name, layer=layer, dim=g.dim, code=g.code, **search)
                    for search in evaluator.score_rescored(coded, embeddings.rescorers(g))
                ]
        if two_stages:
            plans = evaluator.score_two_stages(vectors, dims)
            results.two_stage_searches += [TwoStageSearch(task=task.name, layer=layer, **plan) for plan in plans]
        if variances := evaluator.variances(vectors):
            rounded = [float(f"{variance:.6g}") for variance in variances]
            results.variances.setdefault(task.name, {})[str(layer)] = rounded
    searches = evaluator.score_asymmetric(embeddings.of, _dims_of(embeddings, asymmetric_layers))
    results.asymmetric_searches += [AsymmetricSearch(task=task.name, **search) for search in searches]
