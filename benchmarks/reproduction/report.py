"""
Write the tables of the studies into README.md beside this file and into docs/studies.md:

    python -m benchmarks.reproduction.report

A table has the methods that finished the same seeds, and names those that did not. A number is bold if its difference
to the second best, paired over seeds, is larger than the standard deviation of that difference. A claim holds if the
95% interval (Student's t over seeds) of its paired difference is above its margin.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from benchmarks.reproduction.run import RESULTS, quality, read_runs
from benchmarks.reproduction.studies import STUDIES, Claim, Study
from scripts.command import run_command
from trainers import Grid


ROOT = Path(__file__).parents[2]
PAGES = {Path(__file__).with_name("README.md"): True, ROOT / "docs" / "studies.md": False}  # page -> all tables
MEAN = "mean of the families"
CONFIDENCE = 0.95
Runs = Mapping[tuple[str, int], Mapping[str, Any]]  # (method, seed) -> run


@dataclass(frozen=True)
class Difference:
    """
    A paired difference over seeds, in points.

    Args:
        values (`tuple[float, ...]`): The difference of each seed.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds; infinite for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else float("inf")

    @property
    def half_width(self) -> float:
        """Half the width of the 95% interval of the mean."""
        count = len(self.values)
        return float(student.ppf((1 + CONFIDENCE) / 2, count - 1)) * self.spread / count**0.5

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ± {self.half_width:.1f}" if len(self.values) > 1 else f"{self.mean:+.1f}"


def runs_on(runs: Sequence[Mapping[str, Any]], backbone: str) -> dict[tuple[str, int], Mapping[str, Any]]:
    """(method, seed) -> run of one backbone."""
    return {(run["method"], run["seed"]): run for run in runs if run["backbone"] == backbone}


def equal_seeds(study: Study, runs: Runs) -> tuple[list[int], list[str], list[str]]:
    """
    The seeds of a table, the methods that finished all of them, and those that finished some. The seeds are the most
    of the study's first ones that more than half of the methods with a run have finished.
    """
    started = [method for method in study.methods if any(name == method for name, _ in runs)]
    found: tuple[list[int], list[str]] = ([], [])
    for count in range(1, len(study.seeds) + 1):
        seeds = list(study.seeds[:count])
        complete = [method for method in started if all((method, seed) in runs for seed in seeds)]
        if 2 * len(complete) > len(started):
            found = seeds, complete
    return *found, [method for method in started if method not in found[1]]


def score(study: Study, run: Mapping[str, Any], sizes: Grid, family: str | None = None) -> float:
    """The mean of a run over sizes and the tasks of a family, or over the means of all families, in percent."""
    families = [family] if family else list(study.families)
    return 100 * statistics.mean(
        statistics.mean(run["scores"][task][str(g)] for task in study.families[name] for g in sizes)
        for name in families
    )


def difference(
    study: Study, runs: Runs, seeds: Sequence[int], pair: tuple[str, str], sizes: Grid, family: str | None = None
) -> Difference:
    """The first method less the second one."""
    better, worse = pair
    values = (
        score(study, runs[better, seed], sizes, family) - score(study, runs[worse, seed], sizes, family)
        for seed in seeds
    )
    return Difference(tuple(values))


def table(study: Study, runs: Runs, family: str | None) -> list[str]:
    """The lines of a table: one row per granularity, one column per method."""
    seeds, methods, _ = equal_seeds(study, runs)
    lines = ["| size | " + " | ".join(methods) + " |", "| --- |" + " --: |" * len(methods)]
    for g in Grid.parse(study.grid):
        sizes = Grid((g,))
        values = {method: [score(study, runs[method, seed], sizes, family) for seed in seeds] for method in methods}
        first, *others = sorted(methods, key=lambda method: -statistics.mean(values[method]))
        gap = difference(study, runs, seeds, (first, others[0]), sizes, family) if others else None
        cells = []
        for method in methods:
            text = f"{statistics.mean(values[method]):.1f}"
            if len(seeds) > 1:
                text += f" ± {statistics.stdev(values[method]):.1f}"
            if method == first and gap is not None and gap.mean > gap.spread:
                text = f"**{text}**"
            reported = study.reported.get(method, {}).get(str(g))
            cells.append(text if reported is None else f"{reported:.1f} / {text}")
        lines.append(f"| {g} | " + " | ".join(cells) + " |")
    return lines


def verdict(study: Study, claim: Claim, runs: Runs) -> tuple[str, str]:
    """The difference of a claim on one backbone, and whether it holds."""
    seeds, methods, _ = equal_seeds(study, runs)
    if missing := [name for name in (claim.better, claim.worse) if name not in methods]:
        return "", f"not testable here: no complete runs of {' and '.join(missing)}"
    found = difference(study, runs, seeds, (claim.better, claim.worse), Grid.parse(claim.sizes), claim.family)
    if len(seeds) < 2:
        return str(found), "not testable here: one seed"
    if found.mean - found.half_width > claim.margin:
        return str(found), "holds"
    if found.mean + found.half_width <= claim.margin:
        return str(found), "does not hold here: it is lower"
    return str(found), "does not hold here: the interval includes the margin"


def verdicts(study: Study, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the table of claims."""
    names = [name for name in study.backbones if runs_on(runs, name)]
    lines = ["| claim | by | tasks | sizes | backbone | difference | verdict |", "| --- |" * 1 + " --- |" * 6]
    for claim in study.claims:
        text = f"{claim.better} > {claim.worse}" + (f" {claim.margin:+.1f}" if claim.margin else "")
        for name in names:
            found, holds = verdict(study, claim, runs_on(runs, name))
            cells = (text, claim.source, claim.family or "all", f"`{claim.sizes}`", name, found, holds)
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def development_table(study: Study, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of the table of learning rates: the mean over development tasks and granularities."""
    lines = [
        f"Mean over {', '.join(study.development)} and all sizes on development data, by learning rate:",
        "",
        "| method | backbone | learning rate: mean |",
        "| --- | --- | --- |",
    ]
    for method in study.methods:
        for name in study.backbones:
            own = [run for run in runs if (run["method"], run["backbone"]) == (method, name)]
            cells = [f"{run['learning_rate']:g}: {100 * quality(run):.1f}" for run in own]
            if cells:
                lines.append(f"| {method} | {name} | {', '.join(cells)} |")
    return lines


def section(study: Study, *, every_table: bool, results: Path = RESULTS) -> str:
    """The text of a study for a page."""
    runs, searched = read_runs(study, results), read_runs(study, results, development=True)
    lines = [f"`python -m benchmarks.reproduction.run --study {study.name}`: {study.title} ({study.source})."]
    if not runs and not searched:
        return "\n".join([*lines, "", "No run is finished yet."])
    dates = sorted({run["date"] for run in (*runs, *searched)})
    machines = sorted({f"{run['machine']}, {run['threads']} threads" for run in (*runs, *searched)})
    lines[0] += (
        " Percent, mean and standard deviation over seeds;"
        f" {study.steps} steps of {study.settings['per_device_train_batch_size']} rows"
        f" ({dates[0]} to {dates[-1]}; {'; '.join(machines)})."
    )
    for name in study.backbones:
        own = runs_on(runs, name)
        if not own:
            continue
        seeds, methods, left_out = equal_seeds(study, own)
        seconds = statistics.mean(sum(run["seconds"].values()) for run in own.values())
        lines += ["", f"**Backbone `{name}`**, seeds {', '.join(map(str, seeds))}, {seconds:.0f} s per run."]
        if left_out:
            lines[-1] += f" Left out, without all of these seeds: {', '.join(left_out)}."
        if not methods:
            continue
        for family in (None, *study.families) if every_table else (None,):
            tasks = "" if family is None else f" ({', '.join(study.families[family])})"
            lines += ["", f"{(family or MEAN).capitalize()}{tasks}:", "", *table(study, own, family)]
    if runs and study.claims:
        lines += ["", *verdicts(study, runs)]
    if searched and every_table:
        lines += ["", *development_table(study, searched)]
    return "\n".join(lines)


def written(page: str, *, every_table: bool, results: Path = RESULTS) -> str:
    """A page with its marked sections written anew. A section is marked by `<!-- study NAME -->` and
    `<!-- end of study NAME -->`."""
    for study in STUDIES.values():
        start, end = f"<!-- study {study.name} -->", f"<!-- end of study {study.name} -->"
        if start not in page:
            continue
        before, _, rest = page.partition(start)
        after = rest.partition(end)[2]
        page = f"{before}{start}\n\n{section(study, every_table=every_table, results=results)}\n\n{end}{after}"
    return page


def main(arguments: list[str]) -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    for page, every_table in PAGES.items():
        page.write_text(written(page.read_text(encoding="utf-8"), every_table=every_table), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
