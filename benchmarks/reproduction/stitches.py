"""
Stitches on a real encoder: all-MiniLM-L6-v2 (extra `quickstart`), converted. No training.

    python -m benchmarks.reproduction.stitches                         # fit and score every split of 1, 2 and 4 layers
    python -m benchmarks.reproduction.stitches --fit                   # fit only
    python -m benchmarks.reproduction.stitches --development           # on the development sets
    python -m benchmarks.reproduction.stitches --runs "default"        # some of the runs
    python -m benchmarks.reproduction.stitches --costs grid deep fit   # time a grid, a query, and a fit
    python -m benchmarks.reproduction.report                           # write the tables

Texts and raw states are those of benchmarks.reproduction.exits, which has the scores of prefixes (run "static").
Retrieval is asymmetric: queries at the stitched depth, documents at full depth. Tests: STS-B, STS13, STS16, SICK;
Cranfield, CISI, NPL. Settings were chosen on the development sets of STS-B and SICK, and msmarco-mini.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks._measure import commit
from benchmarks.reproduction.exits import (
    COUNTS,
    DEPTH,
    DIMS,
    FOLDER,
    MAX_LENGTH,
    RESULTS,
    RETRIEVAL_TESTS,
    WIDTH,
    encode,
    evaluators,
    fit,
    raw_states,
    sources,
)
from benchmarks.reproduction.study import add_results
from modeling_m3bert import M3BertConfig, M3BertModel
from scripts.command import run_command
from scripts.convert import converted
from scripts.sources import data_folder, default_base
from trainers import Granularity, Grid, fit_exits, nested_states, truncate
from trainers.evaluation import GridEncoder, Retrieval
from trainers.evaluation.evaluators import Evaluator
from trainers.evaluation.readers import read_rows
from trainers.exits import passes, stitches as stitching
from trainers.exits.sums import FEATURES, TARGET, ExitSums, Fit


STS = ["stsb", "sts13", "sts16", "sick"]
RUNS: dict[str, dict[str, Any]] = {
    "default": {"stitches": [1, 2, 4]},
    "0 + 2, 3 + 1": {"stitches": {2: 2, 4: 1}},
    "1 + 3": {"stitches": {4: 3}},
    "without the table": {"stitches": [1, 2, 4], "static": False},
}
ROUNDS = 9


class KeptSums(ExitSums):
    """The sums of the whole texts, which all runs with a table share: computed once, with the fit of the table."""

    file = FOLDER / "sums.pt"

    def add(self, texts: Any, vectors: Any) -> None:
        if not self.file.is_file():
            super().add(texts, vectors)

    def over_ranks(self) -> None:
        if self.file.is_file():
            self.folds, self.rows = torch.load(self.file, weights_only=False)
        else:
            torch.save((self.folds, self.rows), self.file)

    def fit(self, inputs: Any) -> Fit:
        file = self.file.with_name("table.pt")
        if not file.is_file():
            torch.save(super().fit(inputs), file)
        return torch.load(file, weights_only=False)


def fitted(data: Path, name: str) -> tuple[M3BertModel, Any]:
    """The encoder as a run fits it, and its tokenizer. A model that an earlier run has saved is not fitted again."""
    settings, folder = RUNS[name], FOLDER / f"stitches, {name}"
    if folder.is_dir():
        return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    start, sums = time.perf_counter(), passes.ExitSums

    def sums_of(widths: Any, texts: int) -> ExitSums:
        return (KeptSums if set(widths) == {FEATURES, TARGET} else sums)(widths, texts)

    with patch.object(passes, "ExitSums", sums_of):
        model, tokenizer = fit(data, **settings, layers=[0])  # of prefixes, only the table
    print(f"{name}: fitted in {time.perf_counter() - start:.0f} s", model.config.exit_fit, flush=True)
    model.save_pretrained(folder, halve_table=False)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def tests_of(data: Path, development: bool) -> dict[str, Evaluator]:
    """Name -> evaluator of each test, or of each development set."""
    every = evaluators(data, development)
    return every if development else {name: every[name] for name in [*STS, *RETRIEVAL_TESTS]}


def score(
    model: M3BertModel, tokenizer: Any, layers: list[int], tests: Mapping[str, Evaluator], raw: Mapping[str, Any]
) -> dict[str, dict[Granularity, float]]:
    """Test -> granularity -> main metric; of retrieval tests "NAME asymmetric"."""
    encoder = GridEncoder(model, tokenizer, Grid.product(layers, [WIDTH]), max_length=MAX_LENGTH)
    scores: dict[str, dict[Granularity, float]] = {}
    for test, evaluator in tests.items():
        sides = ["queries"] if isinstance(evaluator, Retrieval) else list(evaluator.texts)
        vectors = {side: encode(encoder, list(evaluator.texts[side])) for side in sides}
        for layer in layers:
            of_layer = {side: its[layer] for side, its in vectors.items()}
            if not isinstance(evaluator, Retrieval):
                for dim, values in evaluator.score_layer(of_layer, DIMS).items():
                    scores.setdefault(test, {})[Granularity(layer, dim)] = values[evaluator.main_metric]
                continue
            for dim in DIMS:
                pair = {
                    "queries": truncate(of_layer["queries"], dim),
                    "documents": truncate(raw[test]["documents"][DEPTH], dim),
                }
                found = scores.setdefault(f"{test} asymmetric", {})
                found[Granularity(layer, dim)] = evaluator.score(pair)[evaluator.main_metric]
    return scores


def about(development: bool) -> dict[str, Any]:
    """What identifies the study."""
    return {
        "command": f"python -m benchmarks.reproduction.stitches{' --development' if development else ''}",
        "settings": {"texts": COUNTS, "runs": {name: str(its) for name, its in RUNS.items()}},
        "metric": "Spearman correlation (STS), nDCG@10 (retrieval); run -> seed -> test -> granularity",
    }


def fit_and_score(data: Path, names: list[str], development: bool, file: Path) -> None:
    """Fit and score some runs, one after the other, and keep each."""
    tests, raw = tests_of(data, development), raw_states(data, "development" if development else "tests")
    for name in names:
        model, tokenizer = fitted(data, name)
        found = {"0": score(model, tokenizer, sorted(RUNS[name]["stitches"]), tests, raw)}
        add_results(file, {name: found}, about(development))
        print(f"{name}: scored", flush=True)


def cpu_seconds(call: Any) -> float:
    """Time of a call on the processors that it uses, which other programs of the machine disturb least."""
    start = time.process_time()
    call()
    return time.process_time() - start


@torch.no_grad()
def costs_of(data: Path, model: M3BertModel, tokenizer: Any, share: int = 8) -> dict[str, float]:
    """The time of a grid of four depths from one encode of `share` texts of each source, with and without two stitches
    (at a third and at two thirds of the layers), and of a query at a stitched depth and at a prefix of as many layers,
    in seconds of processor time and as ratios."""
    texts = [text for its in sources(data).values() for text in its[:share]]
    depth, width = model.eval().config.num_hidden_layers, model.config.hidden_size
    depths, no_map = (depth // 3, 2 * depth // 3), (torch.eye(width), torch.zeros(width))
    exits_of_all = dict.fromkeys(range(1, depth), no_map)
    stitches = {layer: (layer // 2, *no_map) for layer in depths}
    batch = tokenizer(texts, truncation=True, max_length=MAX_LENGTH, padding=True, return_tensors="pt")
    queries = [row["text"] for row in read_rows(data / "cranfield" / "queries.jsonl.gz")][:50]
    ids = [tokenizer(query, return_tensors="pt") for query in queries]
    calls: dict[str, Any] = {"grid": lambda: nested_states(model, batch, [depths[0], depth // 2, depths[1], depth])}
    calls |= {f"query at {layer}": lambda at=layer: [model(**its, output_layer=at) for its in ids] for layer in depths}
    found: dict[str, float] = {}
    for name, call in calls.items():
        rounds: dict[str, list[float]] = {"stitched": [], "prefix": []}
        for _ in range(ROUNDS):  # in turn
            for kind, taken in rounds.items():
                model.set_exits(exits_of_all, stitches=stitches if kind == "stitched" else None)
                taken.append(cpu_seconds(call))
        found |= {f"{name}, {kind}": median(taken) for kind, taken in rounds.items()}
        found[f"{name}, stitched / prefix"] = found[f"{name}, stitched"] / found[f"{name}, prefix"]
    return found


def grid_costs(data: Path) -> dict[str, float]:
    """[`costs_of`] the encoder of the study."""
    return costs_of(data, *converted(default_base()))


def deep_costs(data: Path) -> dict[str, float]:
    """[`costs_of`] random weights in the size of multilingual-e5-base: 12 layers of 768 dims. Its larger vocabulary
    takes no part in a forward pass."""
    tokenizer = AutoTokenizer.from_pretrained(default_base())
    config = M3BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        pad_token_id=tokenizer.pad_token_id,
    )
    return costs_of(data, M3BertModel(config), tokenizer, share=1)


def fit_costs(data: Path) -> dict[str, Any]:
    """The time of a fit with and without stitches in seconds of processor time, extrapolated from fits to two smaller
    numbers of texts, with the pass over the vocabulary."""
    texts = [text for its in sources(data).values() for text in its]
    seconds: dict[str, float] = {}
    few, more = 800, 1600
    # Passes over the vocabulary and keeps it in the folder, so that no fit below has this pass.
    fit_exits(*converted(default_base()), texts[:few], max_length=MAX_LENGTH, cache_dir=FOLDER)
    for name, stitches in (("exits", []), ("exits and stitches", [2, 4])):
        taken = {}
        for count in (few, more):
            share = count / len(texts)
            with (
                patch.object(stitching, "MOST_TEXTS", int(share * stitching.MOST_TEXTS)),
                patch.object(passes, "STITCHED_TEXTS", int(share * passes.STITCHED_TEXTS)),
            ):
                model, tokenizer = converted(default_base())
                start = time.process_time()
                fit_exits(
                    model,
                    tokenizer,
                    texts[:: len(texts) // count][:count],
                    stitches=stitches,
                    max_length=MAX_LENGTH,
                    cache_dir=FOLDER,
                )
                taken[count] = time.process_time() - start
        per_text = (taken[more] - taken[few]) / (more - few)
        seconds[name] = taken[few] + per_text * (len(texts) - few)
        seconds |= {f"{name}, {count} texts": value for count, value in taken.items()}
    model, tokenizer = converted(default_base())
    tokens = [[101, token, 102] for token in range(2000, 4000)]
    raw = passes.RawStates(model.eval(), tokenizer, pooling="mean", batch_size=64)
    part = cpu_seconds(lambda: raw.pooled(tokens, [DEPTH]))
    seconds["vocabulary"] = part * len(tokenizer) / len(tokens)
    ratio = (seconds["exits and stitches"] + seconds["vocabulary"]) / (seconds["exits"] + seconds["vocabulary"])
    return {"with / without stitches": ratio, **seconds}


COSTS = {"grid": grid_costs, "deep": deep_costs, "fit": fit_costs}


def add_costs(found: dict[str, Any]) -> None:
    """Print times, and add them to the file of costs."""
    file = RESULTS / "stitches_costs.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    content = {
        "command": "python -m benchmarks.reproduction.stitches --costs grid deep fit",
        "metric": "seconds of processor time on one thread, and their ratios",
        "machine": f"{platform.machine()}, no accelerator",
        "date": date.today().isoformat(),
        "commit": commit(),
    }
    file.write_text(json.dumps(earlier | content | found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="runs to fit and score")
    parser.add_argument("--fit", action="store_true", help="fit and save the runs, which are scored later")
    parser.add_argument("--development", action="store_true", help="score the development sets")
    parser.add_argument(
        "--costs", nargs="+", choices=COSTS, default=[], help="time a grid and a query; 12 layers; a fit"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # waiting threads would count as processor time
    data = data_folder()
    file = RESULTS / ("stitches_development.json" if options.development else "stitches.json")
    for kind in options.costs:
        add_costs({kind: COSTS[kind](data)})
    for name in options.runs if options.fit else []:
        fitted(data, name)
    if not options.costs and not options.fit:
        fit_and_score(data, options.runs, options.development, file)


if __name__ == "__main__":
    run_command(main)
