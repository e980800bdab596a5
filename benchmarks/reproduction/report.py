"""
Write the tables of the studies into the pages that show them (`PAGES`):

    python -m benchmarks.reproduction.report

A table has the methods that finished the same seeds, and names those that did not. If some finished more seeds, a
second table has these. A number is bold if its difference to the second best, paired over seeds, is larger than the
standard deviation of that difference. A claim is tested with all seeds that both methods finished, by a paired t-test.
It holds if the difference is above its margin after a correction for the number of claims of the study: at most 5% of
the claims that hold are expected to be wrong (Benjamini and Hochberg's false discovery rate).
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import false_discovery_control, t as student

from benchmarks.reproduction.design import Claim, Study
from benchmarks.reproduction.run import RESULTS, from_earlier_script, quality, read_runs
from benchmarks.reproduction.studies import STUDIES
from benchmarks.reproduction.study import seeds_of
from benchmarks.reproduction.tables import TABLES
from benchmarks.reproduction.terms import RESULTS as TERMS
from m3bert.commands.command import argument_parser, run_command
from m3bert.hub_cards.tables import markdown
from m3bert.trainers import Grid


ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGES = {HERE / "README.md": True, HERE / "NOTES.md": True, ROOT / "README.md": False}  # page -> all tables
SHOWING = ("studies", "join", "quantize", "serve", "speed")
PAGES |= {ROOT / "docs" / f"{name}.md": False for name in SHOWING}
MEAN = "mean of the families"
CONFIDENCE = 0.95
MARKED = re.compile(r"<!-- (study|terms|table) ([\w-]+) -->.*?<!-- end of \1 \2 -->", re.DOTALL)
Runs = Mapping[tuple[str, int], Mapping[str, Any]]  # (method, seed) -> run


@dataclass(frozen=True)
class Difference:
    """
    A paired difference over seeds.

    Args:
        values (`tuple[float, ...]`): The difference of each seed, in points or nats.
        digits (`int`, *optional*, defaults to 1): Digits to print.
    """

    values: tuple[float, ...]
    digits: int = 1

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

    def p_value(self, margin: float) -> float:
        """The two-sided p-value of the t-test that the mean is not the margin. 0 where all seeds agree exactly."""
        distance, error = abs(self.mean - margin), self.spread / len(self.values) ** 0.5
        return float(2 * student.sf(distance / error, len(self.values) - 1)) if error else float(distance == 0)

    def __str__(self) -> str:
        count, digits = len(self.values), self.digits
        mean = f"{self.mean:+.{digits}f}"
        return f"{mean} ± {self.half_width:.{digits}f}, {count} seeds" if count > 1 else mean


def runs_on(
    study: Study, runs: Sequence[Mapping[str, Any]], backbone: str
) -> dict[tuple[str, int], Mapping[str, Any]]:
    """(method, seed) -> run of one backbone. Without training, a method is the same for every seed. Results of an
    earlier script count only where there are no others: the two saw their texts in different orders. ValueError if
    the backbone was made more than once, which gives other weights on another processor."""
    runs = [run for run in runs if run["backbone"] == backbone]
    if len({run["weights"] for run in runs if "weights" in run}) > 1:
        raise ValueError(f"The runs of {study.name} on {backbone} are of several backbones, which cannot be compared.")
    runs = [run for run in runs if not from_earlier_script(run)] or runs
    return {
        (run["method"], seed): run
        for run in runs
        for seed in (study.seeds if study.method(run["method"], backbone).seedless else (run["seed"],))
    }


def equal_seeds(study: Study, runs: Runs) -> tuple[list[int], list[str], list[str]]:
    """
    The seeds of a table, the methods that finished all of them, and those that finished some. The seeds are the most
    of the study's first ones that more than half of the methods with a run have finished.
    """
    started = [method for method in study.methods if any(name == method for name, _ in runs)]
    seeds_and_methods: tuple[list[int], list[str]] = ([], [])
    for count in range(1, len(study.seeds) + 1):
        seeds = list(study.seeds[:count])
        complete = [method for method in started if all((method, seed) in runs for seed in seeds)]
        if 2 * len(complete) > len(started):
            seeds_and_methods = seeds, complete
    return *seeds_and_methods, [method for method in started if method not in seeds_and_methods[1]]


def most_seeds(study: Study, runs: Runs) -> tuple[list[int], list[str]]:
    """The most of the study's first seeds that two trained methods have finished, and the methods that have."""
    for count in range(len(study.seeds), 0, -1):
        seeds = list(study.seeds[:count])
        complete = [name for name in study.methods if all((name, seed) in runs for seed in seeds)]
        if sum(not study.methods[name].seedless for name in complete) > 1:
            return seeds, complete
    return [], []


def score(study: Study, run: Mapping[str, Any], sizes: Grid, family: str | None = None) -> float:
    """The mean of a run over sizes and the tasks of a family, or over the means of all families, in percent, of
    the tasks whose data were there (NaN without any). Of a loss, minus its mean over sizes: higher is better."""
    if family in study.losses:
        return -statistics.mean(run["losses"][family][str(g)] for g in sizes)
    there = {
        name: [run["scores"][task][str(g)] for task in tasks if task in run["scores"] for g in sizes]
        for name, tasks in study.families.items()
        if family in (None, name)
    }
    means = [statistics.mean(values) for values in there.values() if values]
    return 100 * statistics.mean(means) if means else math.nan


def difference(
    study: Study,
    runs: Runs,
    seeds: Sequence[int],
    pair: tuple[str, str],
    sizes: Grid,
    family: str | None = None,
    worse_sizes: Grid | None = None,
) -> Difference:
    """The first method less the second one."""
    better, worse = pair
    values = (
        score(study, runs[better, seed], sizes, family) - score(study, runs[worse, seed], worse_sizes or sizes, family)
        for seed in seeds
    )
    return Difference(tuple(values), 3 if family in study.losses else 1)


def is_scored(run: Mapping[str, Any], sizes: Grid) -> bool:
    """Whether a run has scores at all sizes."""
    return all(str(g) in scores for scores in run["scores"].values() for g in sizes)


def table(study: Study, runs: Runs, seeds: Sequence[int], methods: Sequence[str], family: str | None = None) -> str:
    """One row per granularity, one column per method."""
    rows = []
    for g in Grid.parse(study.grid):
        sizes = Grid((g,))
        scored = [method for method in methods if all(is_scored(runs[method, seed], sizes) for seed in seeds)]
        if not scored:
            continue
        values = {method: [score(study, runs[method, seed], sizes, family) for seed in seeds] for method in scored}
        first, *others = sorted(scored, key=lambda method: -statistics.mean(values[method]))
        gap = difference(study, runs, seeds, (first, others[0]), sizes, family) if others else None
        cells = [str(g)]
        for method in methods:
            if method not in scored:
                cells.append("")
                continue
            digits = 3 if family in study.losses else 1
            text = f"{abs(statistics.mean(values[method])):.{digits}f}"
            if len(seeds) > 1:
                text += f" ± {statistics.stdev(values[method]):.{digits}f}"
            if method == first and gap is not None and gap.mean > gap.spread:
                text = f"**{text}**"
            cells.append(text)
        rows.append(cells)
    return markdown(["size", *methods], rows)


def measured(study: Study, claim: Claim, runs: Runs) -> Difference | str:
    """The difference of a claim on one backbone over all seeds that both methods finished; else why there is none."""
    pair = (claim.better, claim.worse)
    sizes = Grid.parse(claim.sizes or study.grid)
    worse_sizes = Grid.parse(claim.worse_sizes) if claim.worse_sizes else sizes
    scored = {key for key, run in runs.items() if is_scored(run, sizes if key[0] == claim.better else worse_sizes)}
    seeds = [seed for seed in study.seeds if all((name, seed) in scored for name in pair)]
    if not seeds:
        missing = [name for name in pair if not any(method == name for method, _ in scored)]
        return f"not testable here: no complete runs of {' and '.join(missing or pair)}"
    if not claim.speed:
        return difference(study, runs, seeds, pair, sizes, claim.family, worse_sizes)
    if any(from_earlier_script(runs[name, seed]) for name in pair for seed in seeds):
        return "not testable here: no seconds"
    better, worse = ([study.steps / runs[name, seed]["seconds"]["training"] for seed in seeds] for name in pair)
    return Difference(tuple(first - second for first, second in zip(better, worse, strict=True)))


Verdicts = dict[tuple[Claim, str], tuple[str, str]]  # (claim, backbone) -> the difference, and whether the claim holds


def verdicts_of(study: Study, runs: Sequence[Mapping[str, Any]]) -> Verdicts:
    """Test the claims of a study on every backbone that has runs, with a correction for their number."""
    on = {name: there for name in study.backbones if (there := runs_on(study, runs, name))}
    results = {(claim, name): measured(study, claim, on[name]) for claim in study.claims for name in on}
    tested = {
        key: result for key, result in results.items() if isinstance(result, Difference) and len(result.values) > 1
    }
    p_values = [result.p_value(key[0].margin) for key, result in tested.items()]
    corrected = dict(zip(tested, false_discovery_control(p_values) if p_values else (), strict=True))
    return {key: verdict(result, key[0].margin, corrected.get(key)) for key, result in results.items()}


def verdict(result: Difference | str, margin: float, corrected: float | None) -> tuple[str, str]:
    """A difference as text, and whether it is above its margin by a corrected p-value (`None`: one seed)."""
    if isinstance(result, str):
        return "", result
    if corrected is None:
        return str(result), "not testable here: one seed"
    if corrected > 1 - CONFIDENCE:
        alone = abs(result.mean - margin) > result.half_width
        return str(result), "not clear" + (" after the correction" if alone else "")
    return str(result), "holds" if result.mean > margin else "does not hold here: it is lower"


def group_of(claim: Claim) -> tuple[Any, ...]:
    """What claims of one method against several others have in common."""
    return tuple(value for name, value in vars(claim).items() if name != "worse")


def sizes_of(claim: Claim) -> str:
    return ", ".join(f"`{sizes}`" for sizes in (claim.sizes, claim.worse_sizes) if sizes)


def rivals_table(study: Study, claims: Sequence[Claim], results: Verdicts) -> str:
    """Claims of the same methods against several others, one column for each of these."""
    others, rows = list(dict.fromkeys(claim.worse for claim in claims)), []
    for group in dict.fromkeys(map(group_of, claims)):
        members = {claim.worse: claim for claim in claims if group_of(claim) == group}
        first = next(iter(members.values()))
        name = first.better + (f", holds above {first.margin:+.1f}" if first.margin else "")
        for backbone in study.backbones:
            cells = []
            for other in others:
                text, holds = results.get((members[other], backbone), ("", "")) if other in members else ("", "")
                text = text.partition(", ")[0]
                cells.append(f"**{text}**" if holds == "holds" else text)
            if any(cells):
                rows.append([name, first.family or "all", sizes_of(first), backbone, *cells])
    header = ["difference to", "tasks", "sizes", "backbone", *others]
    return markdown(header, rows, words=len(header))


def verdicts(study: Study, runs: Sequence[Mapping[str, Any]], *, every_claim: bool) -> str:
    """The tables of claims: one row for claims of a method against three others or more, one row for each
    other claim. With `every_claim`, those that cannot be tested have a row too, or are named below without results."""
    groups = [group_of(claim) for claim in study.claims]
    against_many = [claim for claim in study.claims if groups.count(group_of(claim)) > 2]
    results, blocks = verdicts_of(study, runs), []
    if against_many:
        source = (
            "Differences to other methods with their 95% interval over seeds (none: one seed), in bold where the claim"
        )
        blocks += [f"{source} holds:", rivals_table(study, against_many, results)]
    rows, untested = [], []
    for claim in study.claims:
        if claim in against_many:
            continue
        text = f"{claim.better} > {claim.worse}" + (f" {claim.margin:+.1f}" if claim.margin else "")
        tasks, sizes = claim.family or "all", sizes_of(claim)
        if claim.speed:
            text, tasks, sizes = f"{text} in training steps per second", "", ""
        for name in study.backbones:
            if (claim, name) not in results:
                continue
            difference_here, holds = results[claim, name]
            if not every_claim and holds.startswith("not testable"):
                continue
            if difference_here:
                paper = "" if claim.reported is None else f"{claim.reported:+.1f}"
                cells = (text, claim.source, tasks, sizes, paper, name, difference_here, holds)
                rows.append(cells)
            else:
                untested.append(text)
    if rows:
        header = ["claim", "by", "tasks", "sizes", "paper", "backbone", "difference here", "verdict"]
        blocks.append(markdown(header, rows, words=len(header)))
    if untested:
        blocks.append(f"Not testable here, without results: {'; '.join(dict.fromkeys(untested))}.")
    return "\n\n".join(blocks)


def development_table(study: Study, runs: Sequence[Mapping[str, Any]]) -> str:
    """The mean over development tasks and granularities, by learning rate."""
    rows = []
    for method in study.methods:
        for name in study.backbones:
            searched = [run for run in runs if (run["method"], run["backbone"]) == (method, name)]
            if searched:
                means = (f"{run['learning_rate']:g}: {100 * quality(run):.1f}" for run in searched)
                rows.append([method, name, ", ".join(means)])
    table = markdown(["method", "backbone", "learning rate: mean"], rows, words=3)
    return f"Mean over {', '.join(study.development)} and all sizes on development data, by learning rate:\n\n{table}"


def seconds_of(methods: Sequence[str], runs: Runs) -> str:
    """The mean seconds of each method, without the evaluation; nothing for results of an earlier script."""
    listed = []
    for method in methods:
        took = [
            sum(value for name, value in run["seconds"].items() if name != "evaluation")
            for (name, _), run in runs.items()
            if name == method and not from_earlier_script(run)
        ]
        if took:
            listed.append(f"{method} {statistics.mean(took):.0f}")
    return ", ".join(listed)


def machine(run: Mapping[str, Any]) -> str:
    """The machine of a run, and its number of threads if it is known."""
    return ", ".join([run["machine"], *([f"{run['threads']} threads"] if "threads" in run else [])])


def section(study: Study, *, every_table: bool, results: Path = RESULTS) -> str:
    """The text of a study for a page."""
    finished, searched = read_runs(study, results), read_runs(study, results, development=True)
    runs = [run for name in study.backbones for run in runs_on(study, finished, name).values()]
    lines = [f"`python -m benchmarks.reproduction.run --study {study.name}`: {study.title} ({study.source})."]
    if not runs and not (searched and every_table):
        return "\n".join([*lines, "", "No run is finished yet."])
    dates = sorted({run["date"] for run in (*runs, *searched)})
    machines = sorted({machine(run) for run in (*runs, *searched)})
    lines[0] += (
        " Percent, mean and standard deviation over seeds;"
        f" {study.steps} steps of {study.settings['per_device_train_batch_size']} rows"
        f" ({' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {'; '.join(machines)})."
    )
    for name in study.backbones:
        there = runs_on(study, runs, name)
        if not there:
            continue
        seeds, methods, left_out = equal_seeds(study, there)
        seconds = seconds_of(methods, there)
        lines += ["", f"**Backbone `{name}`**, {seeds_of(seeds)}{'' if seconds else ', from an earlier script'}."]
        if left_out:
            lines[-1] += f" Left out, without all of these seeds: {'; '.join(left_out)}."
        if seconds:
            lines[-1] += f" Mean seconds of fit and training: {seconds}."
        if not methods:
            continue
        shown = [None, *study.families] if every_table else [None]
        for family in (*(shown if len(study.families) > 1 else study.families), *study.losses):
            tasks = f" ({', '.join(study.families[family])})" if family in study.families else ""
            if family in study.losses:
                tasks = " (loss in nats, lower is better)"
            lines += ["", f"{(family or MEAN).capitalize()}{tasks}:", "", table(study, there, seeds, methods, family)]
        more, those = most_seeds(study, there)
        if len(more) > len(seeds):
            lines += ["", f"{MEAN.capitalize()}, {seeds_of(more)}:", "", table(study, there, more, those)]
    if runs and (claims := verdicts(study, runs, every_claim=every_table)):
        lines += ["", claims]
    if searched and every_table:
        lines += ["", development_table(study, searched)]
    return "\n".join(lines)


def terms_table(model: str) -> str:
    """The table of `terms.py` for one model."""
    content = json.loads(TERMS.read_text(encoding="utf-8"))
    terms = content["terms"][model]
    first = next(iter(terms))
    rows = [
        [name, f"{term['value']:.3g}", f"{term['gradient']:.3g}", f"{term['cosine']:.2f}"]
        for name, term in terms.items()
    ]
    table = markdown([f"term, {model}", "value", f"gradient / {first}'s", f"cosine with {first}'s"], rows)
    return f"`python -m benchmarks.reproduction.terms` ({content['date']}, {machine(content)}):\n\n{table}"


def written(page: str, *, every_table: bool, results: Path = RESULTS) -> str:
    """A page with its marked sections written anew. A section is marked by `<!-- study NAME -->` and
    `<!-- end of study NAME -->`, or the same with `terms` and the name of a model, or with `table` and a name of
    `TABLES`."""

    def text(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if kind == "study":
            inner = section(STUDIES[name], every_table=every_table, results=results)
        else:
            inner = terms_table(name) if kind == "terms" else TABLES[name]()
        return f"<!-- {kind} {name} -->\n\n{inner}\n\n<!-- end of {kind} {name} -->"

    return MARKED.sub(text, page)


def main(arguments: list[str]) -> None:
    argument_parser(__doc__).parse_args(arguments)
    for page, every_table in PAGES.items():
        page.write_text(written(page.read_text(encoding="utf-8"), every_table=every_table), encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
