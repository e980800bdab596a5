"""Score every granularity of a grid on many tasks, each encoded once."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from ..granularity import Granularity
from ..nested import unwrap_encoder
from .embeddings import GridEmbeddings
from .encoding import GridEncoder
from .protocols import Protocol, Scores
from .results import GridResults, Plan, Score
from .tasks import Task


PACKAGES = ("torch", "transformers", "datasets", "scikit-learn", "scipy", "faiss-cpu", "numpy")


class TaskEmbeddings:
    """
    The texts of one task, each different one encoded once, at every granularity.

    Args:
        encoder ([`GridEncoder`]): Encoder and grid.
        protocol ([`Protocol`]): Names the texts.
        description (`str`, *optional*): Words before the progress bar; `None` shows no bar.
        folder (`Path`, *optional*): Where to keep the embeddings, memory-mapped; `None` keeps them in memory.

    Raises:
        ValueError: if some embeddings are not finite; names the granularities.
    """

    def __init__(
        self,
        encoder: GridEncoder,
        protocol: Protocol,
        description: str | None = None,
        folder: Path | None = None,
    ) -> None:
        self.grid = encoder.grid
        self._rows: dict[str, list[int] | None] = {}
        self._role = {name: protocol.role(name) for name in protocol.texts}
        self._embeddings: dict[str, GridEmbeddings] = {}
        for role in dict.fromkeys(self._role.values()):
            position: dict[str, int] = {}
            for name in (name for name, its in self._role.items() if its == role):
                self._rows[name] = [position.setdefault(text, len(position)) for text in protocol.texts[name]]
            for name, rows in self._rows.items():  # all of them in order need no copy
                if self._role[name] == role and rows == list(range(len(position))):
                    self._rows[name] = None
            self._embeddings[role] = encoder.encode(
                list(position), role=role, description=description, folder=folder / role if folder else None
            ).require_finite()

    def layer(self, layer: int) -> dict[str, torch.Tensor]:
        """Name -> embeddings of its texts at the widest granularity of a layer."""
        widest = Granularity(layer, self.grid.dims_of(layer)[-1])
        return {name: self._embeddings[self._role[name]].at(widest, rows) for name, rows in self._rows.items()}


def score_grid(encoder: GridEncoder, protocol: Protocol, description: str | None = None) -> dict[Granularity, Scores]:
    """
    Score one task at every granularity, with one encode.

    Args:
        encoder ([`GridEncoder`]): Encoder and grid.
        protocol ([`Protocol`]): The task.
        description (`str`, *optional*): Words before the progress bar; `None` shows no bar.

    Returns:
        `dict[Granularity, dict[str, float]]`: granularity -> metric -> value.

    Raises:
        ValueError: if an embedding is not finite (names the granularity), or a protocol refuses its gold.
    """
    embeddings = TaskEmbeddings(encoder, protocol, description)
    return {
        Granularity(layer, dim): scores
        for layer in encoder.grid.layers
        for dim, scores in protocol.score_layer(embeddings.layer(layer), encoder.grid.dims_of(layer)).items()
    }


def evaluate_grid(
    encoder: GridEncoder,
    tasks: Iterable[Task],
    data: Path | None = None,
    *,
    folder: Path | None = None,
    two_stages: bool = True,
    seed: int = 0,
    verbose: bool = False,
) -> GridResults:
    """
    Score every granularity on every task; each task's texts are encoded once.

    Args:
        encoder ([`GridEncoder`]): Encoder and grid.
        tasks (`Iterable[Task]`): From [`find_tasks`].
        data (`Path`, *optional*): Folder of local data sets; what is not there comes from the Hub.
        folder (`Path`, *optional*): Where to keep embeddings, memory-mapped, for collections beyond memory and for
            runs that go on where they stopped; `None` keeps those of one task at a time in memory.
        two_stages (`bool`, *optional*, defaults to `True`): Whether to measure searches in two stages as well.
        seed (`int`, *optional*, defaults to 0): What the results say; the protocols draw nothing.
        verbose (`bool`, *optional*, defaults to `False`): Whether to show progress.

    Returns:
        [`GridResults`]

    Raises:
        ValueError: if a task has no data, an embedding is not finite, labels are of one class, or a metric is not
            defined; names the task.
    """
    tasks = list(tasks)
    protocols = {task.name: task.load(data) for task in tasks}  # all, before any work is done
    grid, config = encoder.grid, unwrap_encoder(encoder.model).config
    results = GridResults(
        model=config.name_or_path,
        revision=getattr(config, "_commit_hash", None),
        grid=str(grid),
        seed=seed,
        date=date.today().isoformat(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs",
        weights=encoder.weights_fingerprint(),
        versions={name: version(name) for name in PACKAGES},
        settings={
            "pooling": encoder.pooling,
            "max_length": encoder.max_length,
            "batch_size": encoder.batch_size,
            "prompts": dict(encoder.prompts),
            "dtype": str(config.dtype).removeprefix("torch."),
        },
    )
    for task in tasks:
        try:
            start = time.perf_counter()
            protocol = protocols.pop(task.name)
            embeddings = TaskEmbeddings(
                encoder, protocol, task.name if verbose else None, folder / task.name if folder else None
            )
            encoded = time.perf_counter()
            _score_task(task, protocol, embeddings, results, two_stages)
            done = time.perf_counter()
        except ValueError as error:
            raise ValueError(f"Task {task.name!r}: {error}") from error
        results.seconds[task.name] = {"encode": round(encoded - start, 2), "score": round(done - encoded, 2)}
        if verbose:
            print(f"{task.name}: encoded in {encoded - start:.1f} s, scored in {done - encoded:.1f} s", flush=True)
    return results


def _score_task(
    task: Task, protocol: Protocol, embeddings: TaskEmbeddings, results: GridResults, two_stages: bool
) -> None:
    """Add a task's numbers to the results."""
    split = "+".join(task.splits)
    for layer in embeddings.grid.layers:
        vectors, dims = embeddings.layer(layer), embeddings.grid.dims_of(layer)
        for dim, scores in protocol.score_layer(vectors, dims).items():
            for metric, value in scores.items():
                if not math.isfinite(value):
                    raise ValueError(f"{metric} is not defined at {layer}x{dim}: its embeddings may all be equal.")
                main = metric == protocol.main_metric
                results.scores.append(Score(task.name, protocol.family, split, metric, main, f"{layer}x{dim}", value))
        if two_stages:
            plans = protocol.score_two_stages(vectors, dims)
            results.plans += [Plan(task=task.name, layer=layer, **plan) for plan in plans]
        if variances := protocol.variances(vectors):
            rounded = [float(f"{variance:.6g}") for variance in variances]
            results.variances.setdefault(task.name, {})[str(layer)] = rounded
