"""The results of an evaluation, saved as one versioned JSON file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from ..encode.granularity import Granularity, Grid
from ..encode.precisions import FLOAT, bytes_per_vector, precision_of
from ..utils.durable import replace_text
from ..utils.typed import read_json, typed


SCHEMA_VERSION = 7
NOT_JUDGED = ("geometry",)  # task types whose metrics are no quality
# What rescores a shortlist, with a float query; "codes" are the vectors that found it.
RESCORERS = ("codes", "int8", FLOAT)

Key = TypeVar("Key")


@dataclass(frozen=True)
class Score:
    """
    The value of one metric on one task at one granularity.

    Args:
        task (`str`): Name of the task.
        task_type (`str`): Type of the task: `sts`, `retrieval`, ..., or `mteb_sts`, ... for tasks that MTEB scored.
        split (`str`): Split that was scored.
        metric (`str`): Name of the metric.
        main (`bool`): Whether this is the main metric of the task type.
        granularity (`str`): Granularity as text, such as `4x64` or `4x64@int8`.
        value (`float`): Value. Correlations are in -1..1, shares in 0..1.
    """

    task: str
    task_type: str
    split: str
    metric: str
    main: bool
    granularity: str
    value: float


@dataclass(frozen=True)
class MeasuredSearch:
    """
    A measured search of a retrieval task. Each list of [`GridResults`] uses some of the fields: a two-stage search
    `layer`, `first_dim`, `second_dim`, `shortlist` and `products_share`; a rescored search `layer`, `dim`, `code`,
    `rescore` and `shortlist`; asymmetric encoders `query_layer`, `document_layer` and `dim`; hybrid search these and
    `fusion`.

    Args:
        task (`str`): Name of the task.
        documents (`int`): Number of documents in its collection.
        metric (`str`): Name of the metric.
        value (`float`): Value of the metric.
        layer (`int`, *optional*): Layer of all vectors.
        dim (`int`, *optional*): Dim of all vectors.
        first_dim (`int`, *optional*): Dim of the first stage, which finds the shortlist.
        second_dim (`int`, *optional*): Dim of the second stage, which reranks the shortlist.
        shortlist (`int`, *optional*): Length of the shortlist.
        products_share (`float`, *optional*): Multiplications, as a share of an exact search at `second_dim`.
        code (`str`, *optional*): Precision that finds the shortlist.
        rescore (`str`, *optional*): What rescores the shortlist, with a float query: `"codes"`, the stored vectors in
            `code`, or vectors beside them in `"int8"` or `"float32"`.
        query_layer (`int`, *optional*): Layer of the query vectors; `None` in a hybrid search is BM25 alone.
        document_layer (`int`, *optional*): Layer of the document vectors.
        fusion (`str`, *optional*): `"scores"` or `"ranks"`; see [`fuse_scores`] and [`fuse_ranks`].
    """

    task: str
    documents: int
    metric: str
    value: float
    layer: int = 0
    dim: int = 0
    first_dim: int = 0
    second_dim: int = 0
    shortlist: int = 0
    products_share: float = 0.0
    code: str = FLOAT
    rescore: str = ""
    query_layer: int | None = None
    document_layer: int = 0
    fusion: str | None = None

    @property
    def granularity(self) -> Granularity:
        """Granularity of a rescored search."""
        return Granularity(self.layer, self.dim, self.code)

    @property
    def sizes(self) -> set[str]:
        """Granularities of the vectors that are compared, as text; none for BM25 alone."""
        if self.second_dim:
            return {f"{self.layer}x{self.second_dim}"}
        if self.rescore:
            return {str(self.granularity)}
        return {f"{layer}x{self.dim}" for layer in (self.query_layer, self.document_layer) if self.dim}


SEARCHES = ("two_stage_searches", "asymmetric_searches", "rescored_searches", "hybrid_searches")
SEARCH_DEFAULTS = {each.name: each.default for each in fields(MeasuredSearch)}


def rescorers_of(code: str) -> list[str]:
    """Those of [`RESCORERS`] whose rescoring of a shortlist differs from the search in this precision."""
    precision = precision_of(code)
    beside = [name for name in ("int8", FLOAT) if precision.bits < min(16, precision_of(name).bits)]
    return ["codes", *beside] if precision.symmetric else beside


def rescored_bytes(granularity: Granularity, rescore: str) -> int:
    """Bytes per vector in a precision and of the vector beside it that rescores a shortlist."""
    beside = 0 if rescore == "codes" else bytes_per_vector(rescore, granularity.dim)
    return bytes_per_vector(granularity.code, granularity.dim) + beside


@dataclass(frozen=True)
class Latency:
    """
    Latency of one query in milliseconds, measured on the machine of the run.

    Args:
        encode_ms (`dict[str, float]`): Layer -> time to encode one query in torch.
        search_ms (`dict[str, float]`): Dim, or dim and precision (`64@int8`) -> time of one exact search.
        rerank_ms (`dict[str, dict[str, float]]`): Dim, or dim and precision -> length of a shortlist -> time to rerank
            it, decoded.
        documents (`int`): Number of searched documents. The time of an exact search is linear in it.
        encoder (`str`): Model type of the encoder.
        threads (`int`): Number of threads for encoding and search.
        engine (`str`, *optional*, defaults to `"faiss"`): Library that searched: `"faiss"` or `"torch"`.
        quantile (`float`, *optional*, defaults to 0.5): Which quantile of the measured times each value is.
        engine_ms (`dict[str, dict[str, float]]`, *optional*): Other runtime (`"ONNX int8"`) -> layer -> time to encode
            one query.
    """

    encode_ms: dict[str, float]
    search_ms: dict[str, float]
    rerank_ms: dict[str, dict[str, float]]
    documents: int
    encoder: str
    threads: int
    engine: str = "faiss"
    quantile: float = 0.5
    engine_ms: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def statistic(self) -> str:
        """The quantile in words, for tables and cards."""
        if self.quantile == 0.5:
            return "the median of its measurements"
        percentile = f"the {100 * self.quantile:g}th percentile of its measurements"
        return f"{percentile}, because other work on the machine can only add time"

    def encode_ms_by_engine(self, layer: int) -> dict[str, float]:
        """Runtime -> milliseconds to encode one query at a layer: torch, and the other runtimes measured at it."""
        others = {engine: times[str(layer)] for engine, times in self.engine_ms.items() if str(layer) in times}
        return {"torch": self.encode_ms[str(layer)], **others}

    def of(
        self,
        granularity: Granularity,
        documents: int | None = None,
        *,
        first_dim: int | None = None,
        rescore: str = "codes",
        shortlist: int | None = None,
    ) -> float:
        """
        Milliseconds per query for encoding and search; infinite if a part was not measured.

        Args:
            granularity ([`Granularity`]): Granularity of the vectors.
            documents (`int`, *optional*): Number of documents. Default: as many as measured.
            first_dim (`int`, *optional*): Dim of the first stage of a two-stage search. Default: all dims.
            rescore (`str`, *optional*, defaults to `"codes"`): What rescores the shortlist, see [`MeasuredSearch`].
            shortlist (`int`, *optional*): Length of the shortlist; `None` is an exact search.
        """
        encode = self.encode_ms.get(str(granularity.layer), float("inf"))
        dim, code = granularity.dim, granularity.code
        search = self.search_ms.get(str(first_dim) if first_dim else stored_as(dim, code), float("inf"))
        if documents is not None:
            search *= documents / self.documents
        if shortlist is None:
            return encode + search
        again = stored_as(dim, code if rescore == "codes" else rescore)
        return encode + search + self.rerank_ms.get(again, {}).get(str(shortlist), float("inf"))


def stored_as(dim: int, code: str) -> str:
    """Dim and precision as text, which is the key of a [`Latency`]: `64`, or `64@int8`."""
    return str(dim) if code == FLOAT else f"{dim}@{code}"


@dataclass
class GridResults:
    """
    The evaluation of one model over a grid.

    Args:
        model (`str`): Hub id or folder of the model.
        revision (`str`, *optional*): Commit on the Hub; `None` for a local model.
        grid (`str`): Granularities as text.
        seed (`int`): Seed of the run.
        date (`str`): Date of the run, ISO 8601.
        machine (`str`): Processor type, number of cores and number of GPUs.
        versions (`dict[str, str]`): Package -> version.
        settings (`dict`): What the encoder is ([`GridEncoder.identity`]) and how it ran; `own_data`, your own tasks ->
            Hub id, file or folder; `mteb`, tasks of MTEB -> `type`, and `dataset` and `revision` on the Hub;
            `quantizer`, the fingerprint of the quantizer, if a precision needed it.
        scores (`list[Score]`, *optional*): All scores.
        seconds (`dict[str, dict[str, float]]`, *optional*): Task -> seconds to `encode` and to `score`.
        two_stage_searches (`list[MeasuredSearch]`, *optional*): Searches with two stages of one layer.
        asymmetric_searches (`list[MeasuredSearch]`, *optional*): Searches with two layers for queries and documents.
        variances (`dict[str, dict[str, list[float]]]`, *optional*): Task -> layer -> variance of each dim over texts.
        latency ([`Latency`], *optional*): Latency; `None` if it was not measured.
        weights (`str`, *optional*): Fingerprint of the scored weights (`weights` of [`GridEncoder.identity`]).
        rescored_searches (`list[MeasuredSearch]`, *optional*): Searches in a precision, with a rescored shortlist.
        hybrid_searches (`list[MeasuredSearch]`, *optional*): Searches with BM25, alone and beside embeddings.
        texts (`dict[str, dict[str, int]]`, *optional*): Task -> list of texts (`queries`, ...) -> number of texts.
        schema_version (`int`, *optional*): Version of this schema.
    """

    model: str
    revision: str | None
    grid: str
    seed: int
    date: str
    machine: str
    versions: dict[str, str]
    settings: dict[str, Any]
    scores: list[Score] = field(default_factory=list)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    two_stage_searches: list[MeasuredSearch] = field(default_factory=list)
    asymmetric_searches: list[MeasuredSearch] = field(default_factory=list)
    variances: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    latency: Latency | None = None
    weights: str | None = None
    rescored_searches: list[MeasuredSearch] = field(default_factory=list)
    hybrid_searches: list[MeasuredSearch] = field(default_factory=list)
    texts: dict[str, dict[str, int]] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def save(self, file: Path) -> None:
        """Write the results to a JSON file, without the fields that a search does not use."""
        file.parent.mkdir(parents=True, exist_ok=True)
        content = asdict(self)
        for name in SEARCHES:
            content[name] = [
                {key: value for key, value in search.items() if value != SEARCH_DEFAULTS[key]}
                for search in content[name]
            ]
        replace_text(file, json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> GridResults:
        """
        Read results from a JSON file. ValueError if the file is not JSON, has another schema version, or a field is
        missing or of another form.
        """
        content = read_json(file)
        if (schema := content.get("schema_version")) != SCHEMA_VERSION:
            raise ValueError(f"{file} has schema version {schema}; this version of m3bert reads {SCHEMA_VERSION}.")
        for name in SEARCHES:
            if name in content:
                content[name] = _without_nulls(content[name])
        try:
            results: GridResults = typed(cls, content)
            for text in {results.grid, *(score.granularity for score in results.scores)}:
                Grid.parse(text)
        except ValueError as error:
            raise ValueError(f"{file} is not a results file: {error}") from error
        named = {*results.variances, *(name for score in results.scores for name in (score.task, score.task_type))}
        if outside := [name for name in named if re.search(r"^\.|[/\\\0]", name)]:
            raise ValueError(f"{file} has the task {outside[0]!r}, which cannot be a part of the name of a figure.")
        return results

    def add(self, score: Score) -> None:
        """Add a score. A ValueError says that its metric is not defined."""
        if not math.isfinite(score.value):
            where = f"{score.metric} is not defined at {score.granularity}"
            raise ValueError(f"{where}: its embeddings or gold labels may all be equal.")
        self.scores.append(score)

    @property
    def granularities(self) -> Grid:
        """The grid of the evaluation."""
        return Grid.parse(self.grid)

    def within(self, size: Granularity, lost_layers: Collection[int] = ()) -> GridResults:
        """
        The results of the granularities within `size`: its layer and below, its dim and fewer. They also hold for a
        model that is truncated to `size`, but not for `lost_layers`, whose exits such a model lacks. ValueError if no
        granularity within `size` was scored.
        """

        def has(layer: int) -> bool:
            return layer <= size.layer and layer not in lost_layers

        members = [g for g in self.granularities if has(g.layer) and g.dim <= size.dim]
        if not members:
            raise ValueError(f"Nothing within {size} was scored; scored: {self.grid}.")
        variances = {
            task: {layer: values[: size.dim] for layer, values in spectra.items() if has(int(layer))}
            for task, spectra in self.variances.items()
        }
        return replace(self.only(members), variances=variances)

    def only(self, members: Iterable[Granularity]) -> GridResults:
        """The results of some granularities, and of the searches that use no other. Variances stay as they are."""
        grid = Grid(tuple(members))
        names = {str(g) for g in grid}
        searches: dict[str, Any] = {
            name: [search for search in getattr(self, name) if search.sizes <= names] for name in SEARCHES
        }
        scores = [score for score in self.scores if score.granularity in names]
        return replace(self, grid=str(grid), scores=scores, **searches)

    def tasks(self, task_type: str | None = None) -> list[str]:
        """Scored tasks of one task type, or of all types, in the order of the run."""
        return list(dict.fromkeys(score.task for score in self.scores if task_type in (None, score.task_type)))

    def task_types(self) -> list[str]:
        """Scored task types, in the order of the run."""
        return list(dict.fromkeys(score.task_type for score in self.scores))

    def judged_task_types(self) -> list[str]:
        """Scored task types whose main metric measures quality (higher is better): all except geometry."""
        return [task_type for task_type in self.task_types() if task_type not in NOT_JUDGED]

    def main_metric(self, task_type: str) -> str:
        """The main metric of a task type; a type of MTEB may have several."""
        metrics = (score.metric for score in self.scores if score.task_type == task_type and score.main)
        return ", ".join(dict.fromkeys(metrics))

    def quality(self, tasks: Iterable[str]) -> dict[Granularity, float]:
        """Mean of the main metrics of tasks, per granularity. ValueError if there are none, or one was not scored."""
        tasks = list(tasks)
        unknown = [task for task in tasks if task not in self.tasks()]
        if unknown or not tasks:
            raise ValueError(f"No scores of {', '.join(unknown) or 'any task'}; scored: {', '.join(self.tasks())}.")
        values = {(score.task, score.granularity): score.value for score in self.scores if score.main}
        return {g: mean(values[task, str(g)] for task in tasks) for g in self.granularities}

    def asymmetric_quality(self, tasks: Iterable[str]) -> dict[tuple[Granularity, int], float]:
        """Documents' granularity and queries' layer -> mean of the main metrics, of pairs measured on every task."""
        return mean_over_tasks(
            self.asymmetric_searches, tasks, lambda s: (Granularity(s.document_layer, s.dim), s.query_layer or 0)
        )

    def rescored_quality(self, tasks: Iterable[str]) -> dict[tuple[Granularity, str, int], float]:
        """Granularity, what rescores, and length of the shortlist -> mean of the main metrics, if measured on every
        task."""
        return mean_over_tasks(self.rescored_searches, tasks, lambda s: (s.granularity, s.rescore, s.shortlist))


def _without_nulls(searches: object) -> object:
    """Searches as JSON has them, without the fields of earlier files that say that there is nothing."""
    if not isinstance(searches, list):
        return searches
    objects = (search if isinstance(search, dict) else {} for search in searches)
    return [{key: value for key, value in search.items() if value is not None} for search in objects]


def mean_over_tasks(
    searches: Iterable[MeasuredSearch],
    tasks: Iterable[str],
    key_of: Callable[[MeasuredSearch], Key],
    value_of: Callable[[MeasuredSearch], float] = lambda search: search.value,
) -> dict[Key, float]:
    """Mean over tasks of the value of each key of a search, for keys that were measured on every task."""
    tasks, values = set(tasks), dict[Key, dict[str, float]]()
    for search in searches:
        if search.task in tasks:
            values.setdefault(key_of(search), {})[search.task] = value_of(search)
    return {key: mean(by_task.values()) for key, by_task in values.items() if by_task.keys() == tasks}
