"""
What an index costs in every engine: seconds of a build, bytes on the disk, and milliseconds of a query, on the CPU.

    python -m benchmarks.index_costs                # needs the extra `engines`
    python -m benchmarks.index_costs --quick        # few documents

100,000 vectors of 384 dims are drawn like those of real texts (see `quantised_search`) and put into the files of an
index, as if they had been embedded. Every engine builds its index from these, of exact search and of two stages (64
dims find 100 documents, 384 dims sort them). `bytes_...` are those of the engine's index per document. Queries are
single ones: one thread, and eight threads that ask at once, each with its own handle (Qdrant's local mode allows only
one, which is shared). Qdrant's local mode, which is for tests, gets a tenth of the documents.

The last line printed is a JSON object with the figures; the table is in the results file.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most
from benchmarks.index_engines import BUILDS, TOP, named
from benchmarks.quantised_search import Distribution, embed
from hub_cards.tables import markdown
from scripts.command import run_command
from trainers.evaluation.coding import Coder
from trainers.index.engine import Engine, find_engine
from trainers.index.layout import Layout
from trainers.index.store import Batch, Store


DIMS, FIRST, SHORTLIST = 384, 64, 100
VECTORS, QUERIES = 100_000, 100  # queries per thread
QUICK_VECTORS, QUICK_QUERIES = 3000, 10
THREADS = 8
FEWER = {"qdrant": 10}  # engine -> one of how many documents it gets
WARM = 5  # queries before a measurement
CHUNK = 2048
UNITS = ("build s", "bytes", "ms, 1 thread", f"ms, {THREADS} threads")

# A flat index is little more than its vectors, of 1,536 bytes.
LIMITS = {"faiss_flat": at_most(1600), "lancedb_flat": at_most(1700)}
BOUNDS: Bounds = {f"bytes_{named(*build)}": LIMITS.get(named(*build)) for build in BUILDS}


def fill(store: Store, distribution: Distribution, layout: Layout, count: int) -> None:
    """Put drawn vectors into the files of an index."""
    for start in range(0, count, CHUNK):
        keys = np.arange(start, min(start + CHUNK, count), dtype=np.int64)
        vectors = normalize(distribution.draw(len(keys)), dim=1)
        names = [str(key) for key in keys.tolist()]
        second = None if layout.second is None else layout.second.pack(vectors)
        store.add(Batch(keys, names, names, [{}] * len(keys), layout.first.pack(vectors), second), {})


def query_milliseconds(handles: list[Engine], queries: torch.Tensor) -> float:
    """Median milliseconds of a single query, asked at once by a thread per handle."""
    ready = threading.Barrier(len(handles))

    def ask(engine: Engine) -> list[float]:
        for query in queries[:WARM]:
            engine.search(query.unsqueeze(0), TOP)
        ready.wait()
        times = []
        for query in queries:
            start = time.perf_counter()
            engine.search(query.unsqueeze(0), TOP)
            times.append(time.perf_counter() - start)
        return times

    with ThreadPoolExecutor(len(handles)) as pool:
        return 1000 * median(seconds for times in pool.map(ask, handles) for seconds in times)


def cost(name: str, layout: Layout, distribution: Distribution, queries: torch.Tensor, count: int) -> dict[str, float]:
    """What one index costs, by unit."""
    kind = find_engine(name)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        store = Store(folder, layout)
        fill(store, distribution, layout, count)
        before = folder_bytes(folder)
        engine = kind(folder, layout, store)
        start = time.perf_counter()
        engine.add(store.keys())
        seconds = time.perf_counter() - start
        size = (folder_bytes(folder) - before) / count
        handles = (
            [engine] * THREADS
            if name == "qdrant"
            else [kind(folder, layout, Store(folder, layout)) for _ in range(THREADS)]
        )
        times = [query_milliseconds(handles[:threads], queries) for threads in (1, THREADS)]
        for handle in {id(handle): handle for handle in (engine, *handles)}.values():
            handle.close()
            handle.store.close()
    return dict(zip(UNITS, (seconds, size, *times), strict=True))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(run: Run) -> dict[str, float]:
    vectors, count = (QUICK_VECTORS, QUICK_QUERIES) if run.quick else (VECTORS, QUERIES)
    queries, sample = embed(60 if run.quick else 400)
    distribution, queries = Distribution(sample), queries[:count]
    sizes: dict[str, float] = {}
    for stages, dims in (("", (DIMS,)), (", two stages", (FIRST, DIMS))):
        costs: dict[str, dict[str, float]] = {unit: {} for unit in UNITS}
        for name, kind in BUILDS:
            if stages and kind != "flat":
                continue
            torch.manual_seed(SEED)
            first, *rest = (Coder("float32", dim) for dim in dims)
            layout = Layout(first, rest[0] if rest else None, SHORTLIST if rest else None, kind)
            found = cost(name, layout, distribution, queries, vectors // FEWER.get(name, 1))
            for unit, value in found.items():
                costs[unit][f"{name} {kind}"] = value
            if not stages:
                sizes[f"bytes_{named(name, kind)}"] = found["bytes"]
        for unit, values in costs.items():
            run.record(f"{unit}{stages}", values, "cost")
    print(table(run.measured), flush=True)
    return sizes


COLUMNS = ("build, s per 100,000", "bytes per document", *UNITS[2:])
HEADER = ("vector store", "index type", *COLUMNS)


def table(results: Mapping[str, Any]) -> str:
    """
    Costs of exact search at 384 dims in every engine, in Markdown.

    Args:
        results (`dict[str, Any]`): The results file.
    """
    cost, rows = results["cost"], []
    for engine, kind in BUILDS:
        case = f"{engine} {kind}"
        seconds = cost["build s"][case] * FEWER.get(engine, 1)
        times = [f"{cost[unit][case]:.1f}" for unit in UNITS[2:]]
        rows.append([engine, kind, f"{seconds:.1f}", f"{cost['bytes'][case]:,.0f}", *times])
    return markdown(HEADER, rows, words=2)


BENCHMARK = Benchmark("index_costs", __doc__, BOUNDS, measure, packages=("faiss-cpu", "qdrant-client", "lancedb"))


if __name__ == "__main__":
    run_command(BENCHMARK.main)
