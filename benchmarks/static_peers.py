"""
A query without a transformer, and its peers, on one encoder (all-MiniLM-L6-v2), the same texts, and the same scorer:
the static table of exits (layer 0), model2vec's `distill`, BM25, and the encoder at full depth.

    python -m benchmarks.static_peers                  # the tests: seven STS sets; Cranfield, CISI, NPL
    python -m benchmarks.static_peers --development    # the development sets

Needs `model2vec` with its extra `distill`. `benchmarks.reproduction.exits --fit` first: its states of the
fit's texts and of the tests are read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.reproduction import exits
from benchmarks.reproduction.study import commit
from m3bert.commands.command import run_command
from m3bert.commands.sources import data_folder, default_base
from m3bert.encode.hybrid import CANDIDATES, FUSIONS, Ranking, bm25_search, fuse_scores
from m3bert.encode.search import nearest
from m3bert.evaluation import Retrieval
from m3bert.evaluation.evaluators import Evaluator
from m3bert.evaluation.latency import seconds_in_turn
from m3bert.evaluation.metrics import ranking_scores


RESULTS = Path(__file__).with_name("results")
DIM, QUERIES = 384, 50
WEIGHTS = (0.25, 0.5, 1.0)  # of BM25
Embedded = dict[str, dict[str, torch.Tensor]]  # test -> name of its texts -> embeddings


def distilled() -> tuple[Any, float]:
    """model2vec's static model of the encoder, and the seconds of its fit."""
    from model2vec.distill import distill

    start = time.perf_counter()
    model = distill(default_base(), pca_dims=DIM)
    return model, time.perf_counter() - start


def score(evaluator: Evaluator, vectors: dict[str, torch.Tensor]) -> float:
    """Main metric of embeddings, in percent."""
    return 100 * evaluator.score(vectors)[evaluator.main_metric]


def search(vectors: dict[str, torch.Tensor]) -> Ranking:
    """The best documents of each query by cosine."""
    return Ranking(*nearest(vectors["queries"], vectors["documents"], CANDIDATES))


def retrieval_rows(evaluator: Retrieval, found: dict[str, dict[str, torch.Tensor]]) -> dict[str, float]:
    """System -> nDCG@10 in percent, of every system alone and with BM25 beside it."""
    words = bm25_search(evaluator.texts["queries"], evaluator.texts["documents"])

    def ndcg(rows: Any) -> float:
        return 100 * ranking_scores(rows, evaluator.relevant)[evaluator.main_metric]

    rows = {"BM25": ndcg(words.rows[:, :10])}
    for system, vectors in found.items():
        ranking = search(vectors)
        rows[system] = ndcg(ranking.rows[:, :10])
        for fusion, fuse in FUSIONS.items():
            rows[f"{system} + BM25, by {fusion}"] = ndcg(fuse(ranking, words, 10))
        for weight in WEIGHTS:
            rows[f"{system} + {weight} BM25"] = ndcg(fuse_scores(ranking, words, 10, weight))
    return rows


def latencies(static: Any, tokenizer: Any, peer: Any, full: Any, queries: list[str]) -> dict[str, float]:
    """System -> milliseconds to embed one query, tokenising included: medians, timed in turn in one run."""

    def by_table(query: str) -> None:
        inputs = tokenizer([query], truncation=True, max_length=exits.MAX_LENGTH, return_tensors="pt")
        static.static_states(inputs.input_ids, inputs.attention_mask)

    def by_encoder(query: str) -> None:
        full(**tokenizer([query], truncation=True, max_length=exits.MAX_LENGTH, return_tensors="pt"))

    systems = {"static table": by_table, "model2vec": lambda query: peer.encode([query]), "full depth": by_encoder}

    def every(embed: Any) -> Any:
        return lambda: [embed(query) for query in queries]

    with torch.no_grad():
        seconds = seconds_in_turn({name: every(embed) for name, embed in systems.items()}, rounds=10)
    return {name: 1000 * its / len(queries) for name, its in seconds.items()}


def measure(data: Path, development: bool) -> dict[str, Any]:
    """Everything that the results file holds, but for what identifies the run."""
    tests = exits.evaluators(data, development)
    raw = exits.raw_states(data, "development" if development else "tests")
    start = time.perf_counter()
    model, tokenizer = exits.fit(data, layers=[0])
    seconds = {"static table": time.perf_counter() - start}
    seconds["encoding the texts"] = torch.load(exits.FOLDER / "texts.pt")["seconds"]
    peer, seconds["model2vec"] = distilled()
    states = exits.after_exits(model, tokenizer, tests, raw)
    scores: dict[str, dict[str, float]] = {}
    for test, evaluator in tests.items():
        texts = {name: list(its) for name, its in evaluator.texts.items()}
        sides = {
            "static table": {name: layers[0] for name, layers in states[test].items()},
            "model2vec": {name: torch.from_numpy(peer.encode(its)).float() for name, its in texts.items()},
            "full depth": {name: layers[exits.DEPTH] for name, layers in states[test].items()},
        }
        if isinstance(evaluator, Retrieval):
            documents = sides["full depth"]["documents"]
            across = {"queries": sides["static table"]["queries"], "documents": documents}
            scores[test] = retrieval_rows(evaluator, {**sides, "static queries, full documents": across})
        else:
            scores[test] = {system: score(evaluator, vectors) for system, vectors in sides.items()}
        print(test, {name: round(value, 1) for name, value in scores[test].items()}, flush=True)
    queries = [text for test in tests.values() if isinstance(test, Retrieval) for text in test.texts["queries"]][
        :QUERIES
    ]
    size = {
        "static table": 2 * model.get_parameter("elastic.table.weight").numel(),
        "model2vec": peer.embedding.nbytes,
    }
    return {
        "scores": {test: {name: round(value, 2) for name, value in its.items()} for test, its in scores.items()},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "bytes": size,
        "milliseconds_per_query": {
            name: round(value, 4) for name, value in latencies(model, tokenizer, peer, model, queries).items()
        },
    }


def print_means(found: dict[str, Any], tests: dict[str, Evaluator]) -> None:
    """Means over STS sets and over collections, one row per system."""
    for kind in (False, True):
        names = [name for name, test in tests.items() if isinstance(test, Retrieval) is kind]
        print("nDCG@10" if kind else "STS", names)
        for system in found["scores"][names[0]]:
            print(f"  {system}: {mean(found['scores'][name][system] for name in names):.1f}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--development", action="store_true", help="score the development sets")
    options = parser.parse_args(arguments)
    data = data_folder()
    found = measure(data, options.development)
    about = {
        "command": f"python -m benchmarks.static_peers{' --development' if options.development else ''}",
        "metric": "percent: Spearman correlation (STS), nDCG@10 (retrieval); test -> system",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no accelerator",
        "versions": {name: version(name) for name in ("torch", "transformers", "model2vec")},
        "commit": commit(),
    }
    file = RESULTS / f"static_peers{'_development' if options.development else ''}.json"
    file.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")
    print_means(found, exits.evaluators(data, options.development))
    print({name: found[name] for name in ("seconds", "bytes", "milliseconds_per_query")})


if __name__ == "__main__":
    run_command(main)
