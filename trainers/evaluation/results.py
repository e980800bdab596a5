"""What an evaluation found, as one versioned JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

from ..granularity import Granularity, Grid


SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Score:
    """
    One number.

    Args:
        task (`str`): Name of the task.
        family (`str`): Of its protocol.
        split (`str`): What was scored.
        metric (`str`): Name of the metric.
        main (`bool`): Whether it is the one its family is judged by.
        granularity (`str`): As text, `4x64`.
        value (`float`): Correlations in -1..1, shares in 0..1.
    """

    task: str
    family: str
    split: str
    metric: str
    main: bool
    granularity: str
    value: float


@dataclass(frozen=True)
class Plan:
    """
    A measured search in two stages, over prefixes of one layer's vectors.

    Args:
        task (`str`): Collection.
        documents (`int`): Its size.
        layer (`int`): Layer of the vectors.
        first_dim (`int`): Prefix that makes the shortlist.
        second_dim (`int`): Prefix that re-ranks it.
        shortlist (`int`): Its length.
        products_share (`float`): Multiplications, as a share of an exact search with the second prefix.
        metric (`str`): Name of the metric.
        value (`float`): Quality.
    """

    task: str
    documents: int
    layer: int
    first_dim: int
    second_dim: int
    shortlist: int
    products_share: float
    metric: str
    value: float


@dataclass(frozen=True)
class Latency:
    """
    What one query costs, in milliseconds: medians, measured in turn on the machine of the run.

    Args:
        encode_ms (`dict[str, float]`): Layer -> encoding of one query, early exit where the encoder has it.
        search_ms (`dict[str, float]`): Dim -> exact search of one query among `documents`.
        rerank_ms (`dict[str, dict[str, float]]`): Dim -> length of a shortlist -> re-ranking it.
        documents (`int`): Documents in the search that was timed. An exact search grows with them linearly.
        encoder (`str`): Type of the encoder that was timed.
        threads (`int`): Threads of either.
    """

    encode_ms: dict[str, float]
    search_ms: dict[str, float]
    rerank_ms: dict[str, dict[str, float]]
    documents: int
    encoder: str
    threads: int

    def of(self, granularity: Granularity, documents: int | None = None) -> float:
        """Milliseconds of a query: encoding, and exact search among so many documents (those measured by default)."""
        return self.encode_ms[str(granularity.layer)] + self._search(granularity.dim, documents)

    def of_two_stages(
        self, granularity: Granularity, first_dim: int, shortlist: int, documents: int | None = None
    ) -> float:
        """The same of a search by the first dims whose shortlist is re-ranked at the granularity."""
        rerank = self.rerank_ms[str(granularity.dim)][str(shortlist)]
        return self.encode_ms[str(granularity.layer)] + self._search(first_dim, documents) + rerank

    def _search(self, dim: int, documents: int | None) -> float:
        return self.search_ms[str(dim)] * (1.0 if documents is None else documents / self.documents)


@dataclass
class GridResults:
    """
    An evaluation of one model over a grid.

    Args:
        model (`str`): Hub id or folder.
        revision (`str`, *optional*): Commit on the Hub; `None` where it has none.
        grid (`str`): Granularities.
        seed (`int`): Of the run.
        date (`str`): Day of the run, ISO 8601.
        machine (`str`): Its kind.
        versions (`dict[str, str]`): Package -> version.
        weights (`str`, *optional*): Digest of the weights that were scored ([`GridEncoder.weights_fingerprint`]);
            `None` in files of before it was kept.
        settings (`dict`): Of the encoder: pooling, longest text, batch size, prompts.
        scores (`list[Score]`): All numbers.
        seconds (`dict[str, dict[str, float]]`): Task -> seconds of encoding and of scoring.
        plans (`list[Plan]`): Searches in two stages.
        variances (`dict[str, dict[str, list[float]]]`): Task -> layer -> variance of each dim over texts.
        latency ([`Latency`], *optional*): Where it was measured.
        schema_version (`int`): Of this form.
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
    plans: list[Plan] = field(default_factory=list)
    variances: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    latency: Latency | None = None
    weights: str | None = None
    schema_version: int = SCHEMA_VERSION

    def save(self, file: Path) -> None:
        """Write the JSON file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> GridResults:
        """
        Read a JSON file.

        Raises:
            ValueError: if it is not of this form.
        """
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is not JSON: {error}.") from error
        found = content.get("schema_version") if isinstance(content, dict) else None
        if found != SCHEMA_VERSION:
            raise ValueError(f"{file} has schema version {found}; this program reads {SCHEMA_VERSION}.")
        content.setdefault("weights", None)
        missing = sorted({part.name for part in fields(cls)} - content.keys())
        if missing:
            raise ValueError(f"{file} lacks {', '.join(missing)}.")
        content["scores"] = [Score(**score) for score in content["scores"]]
        content["plans"] = [Plan(**plan) for plan in content["plans"]]
        content["latency"] = Latency(**content["latency"]) if content["latency"] else None
        return cls(**content)

    @property
    def granularities(self) -> Grid:
        """The grid."""
        return Grid.parse(self.grid)

    def within(self, size: Granularity) -> GridResults:
        """
        What is said of the granularities of a part: cutting a model does not change their numbers.

        Raises:
            ValueError: if none of them was scored.
        """
        members = tuple(g for g in self.granularities if g.layer <= size.layer and g.dim <= size.dim)
        if not members:
            raise ValueError(f"Nothing within {size} was scored; scored: {self.grid}.")
        names = {str(g) for g in members}
        return replace(
            self,
            grid=str(Grid(members)),
            scores=[score for score in self.scores if score.granularity in names],
            plans=[plan for plan in self.plans if f"{plan.layer}x{plan.second_dim}" in names],
            variances={
                task: {layer: values[: size.dim] for layer, values in spectra.items() if int(layer) <= size.layer}
                for task, spectra in self.variances.items()
            },
        )

    def tasks(self, family: str | None = None) -> list[str]:
        """Tasks that were scored, of one family or of all, in the order of the run."""
        return list(dict.fromkeys(score.task for score in self.scores if family in (None, score.family)))

    def families(self) -> list[str]:
        """Families that were scored, in the order of the run."""
        return list(dict.fromkeys(score.family for score in self.scores))

    def judged_families(self) -> list[str]:
        """Families whose main metric is a quality, more of which is better: all but geometry."""
        return [family for family in self.families() if family != "geometry"]

    def main_metric(self, family: str) -> str:
        """The metric a family is judged by."""
        return next(score.metric for score in self.scores if score.family == family and score.main)

    def quality(self, tasks: Iterable[str]) -> dict[Granularity, float]:
        """
        Mean over tasks of their main metrics, for every granularity.

        Raises:
            ValueError: if a task was not scored.
        """
        tasks = list(tasks)
        unknown = [task for task in tasks if task not in self.tasks()]
        if unknown or not tasks:
            raise ValueError(f"No scores of {', '.join(unknown) or 'any task'}; scored: {', '.join(self.tasks())}.")
        values: dict[tuple[str, str], float] = {
            (score.task, score.granularity): score.value for score in self.scores if score.main
        }
        return {g: mean(values[task, str(g)] for task in tasks) for g in self.granularities}
