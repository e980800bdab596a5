"""What the tables share: results files, means, cells and the line above a table."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.reproduction.study import seeds_of
from m3bert.hub_cards.tables import percent, share


HERE = Path(__file__).parents[1]
RETRIEVAL = ("cranfield", "cisi", "npl")
ASYMMETRIC = tuple(f"{name} asymmetric" for name in RETRIEVAL)
FULL = "6x384"
Content = Mapping[str, Any]  # content of a results file


def results(name: str, folder: Path = HERE) -> dict[str, Any]:
    """The content of a results file."""
    content: dict[str, Any] = json.loads((folder / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return content


def is_file(name: str) -> bool:
    """Whether there is a results file."""
    return (HERE / "results" / f"{name}.json").is_file()


def depth_of(run: str) -> int:
    """The number of layers of a run that is named after them."""
    return run.count(",") + 1


def mean_of(content: Content, run: str, tests: Iterable[str], key: Any) -> float:
    """The mean of a run over tests and seeds, of 1, at a granularity or another key of the scores."""
    return mean(seed[test][str(key)] for test in tests for seed in content["scores"][run].values())


def cell(content: Content, run: str, key: Any, *groups: Sequence[str]) -> str:
    """The means of a run over groups of tests, in percent; empty where it has no scores."""
    seeds = content["scores"][run].values()
    if any(str(key) not in seed[test] for tests in groups for test in tests for seed in seeds):
        return ""
    return " / ".join(percent(mean_of(content, run, tests, key)) for tests in groups)


def with_share(value: float, whole: float) -> str:
    return f"{percent(value)} ({share(value, whole)}%)"


def titled(content: Content, table: str, options: str = "", seeds: Collection[Any] = ()) -> str:
    """A table below its source. `options` of the command are those that the file does not name; a fit has no seeds."""
    source = f"{content['date']}; {content['machine']}" + (f"; {seeds_of(sorted(seeds))}" if seeds else "")
    return f"`{content.get('command', 'm3bert quickstart')}{options}` ({source}):\n\n{table}"
