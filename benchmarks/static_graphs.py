"""
How many candidates a graph needs for queries by table look-up: recall@10 against exact search of faiss' HNSW (M 32,
efConstruction 200) over embeddings of full depth, with queries at layers 0, 2 and 6. The time of a search is about
linear in the number of candidates.

    python -m benchmarks.static_graphs

Encoder: all-MiniLM-L6-v2 with fitted exits, 384 dims; Cranfield, CISI, NPL. `benchmarks.reproduction.exits --fit`
first: its states are read. Indexes search with `CANDIDATES` of faiss_engine.py.
"""

from __future__ import annotations

import json
from typing import Any

import faiss
import numpy as np
import torch

from benchmarks._measure import RESULTS, about
from benchmarks.reproduction import exits
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder


LAYERS, CANDIDATES, FOUND = (0, 2, 6), (16, 32, 64, 128, 256), 10


def unit(vectors: torch.Tensor) -> np.ndarray:
    """The vectors with length 1."""
    return torch.nn.functional.normalize(vectors).numpy().copy()


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """Collection -> layer of the queries -> candidates -> recall@10."""
    data = data_folder()
    model, tokenizer = exits.fit(data)
    tests = {name: test for name, test in exits.evaluators(data, False).items() if name in exits.RETRIEVAL_TESTS}
    vectors = exits.after_exits(model, tokenizer, tests, exits.raw_states(data, "tests"))
    recalls: dict[str, dict[str, dict[str, float]]] = {}
    for name in tests:
        documents = unit(vectors[name]["documents"][exits.DEPTH])
        flat = faiss.index_factory(documents.shape[1], "Flat", faiss.METRIC_INNER_PRODUCT)
        graph: Any = faiss.index_factory(documents.shape[1], "HNSW32", faiss.METRIC_INNER_PRODUCT)
        graph.hnsw.efConstruction = 200
        flat.add(documents)
        graph.add(documents)
        recalls[name] = {}
        for layer in LAYERS:
            queries = unit(vectors[name]["queries"][layer])
            _, exact = flat.search(queries, FOUND)
            rows = recalls[name][str(layer)] = {}
            for candidates in CANDIDATES:
                graph.hnsw.efSearch = candidates
                _, near = graph.search(queries, FOUND)
                recall = np.mean([len({*a} & {*b}) / FOUND for a, b in zip(exact, near, strict=True)])
                rows[str(candidates)] = round(float(recall), 4)
            print(name, len(documents), layer, rows, flush=True)
    return recalls


def main(arguments: list[str]) -> None:
    argument_parser(__doc__).parse_args(arguments)
    faiss.omp_set_num_threads(1)
    described = {
        "command": "python -m benchmarks.static_graphs",
        "metric": "collection -> layer of the queries -> candidates -> recall@10",
        **about(packages=("faiss-cpu",)),
    }
    content = json.dumps({**described, "found": measure()}, indent=1)
    (RESULTS / "static_graphs.json").write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
