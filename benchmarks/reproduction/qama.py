"""
QAMA on a real encoder: all-MiniLM-L6-v2 (extra `quickstart`), frozen, its last layer.

    python -m benchmarks.reproduction.qama --development --baselines --seeds 0    # settings, on msmarco-mini
    python -m benchmarks.reproduction.qama --baselines --seeds 0 1    # the six steps of the paper's ablation, on tests
    python -m benchmarks.reproduction.report                          # write the tables

Training texts and embeddings are those of the study of exits (runs/exits): 20,000 unlabelled texts, none of an
evaluation set. They are no pairs, so that the contrastive loss has no part. Tests: Cranfield, CISI, NPL (nDCG@10), 128
tokens per text. Development: msmarco-mini.

Steps, each with all before: thresholds only (no training); a feed-forward transform, trained to match similarities at
full width; the quantisation loss; the Matryoshka loss; orthogonality and information
bottleneck; variance control.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import faiss
import numpy as np
import torch
from datasets import Dataset

from benchmarks.reproduction.exits import DEPTH, RETRIEVAL_TESTS, WIDTH, evaluators, raw_states
from benchmarks.reproduction.fit_texts import sources
from benchmarks.reproduction.study import Run, add_results
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.convert import converted
from m3bert.commands.sources import data_folder, default_base
from m3bert.encode.coding import vectors_in_precision
from m3bert.evaluation.evaluators import Retrieval
from m3bert.evaluation.metrics import ranking_scores
from m3bert.evaluation.search import exact_search, rerank
from m3bert.modeling import M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers import Granularity, TeacherEmbeddings, truncate


FOLDER = Path("runs/qama")
DIMS = [96, 192, 384]
CODES = ["qama-2", "qama-1.5", "qama-hybrid", "qama-1", "qama-0.5"]
SHORTLIST = 100
CENTROIDS = 256  # of product quantisation, in 8 bits
TRAINING: dict[str, Any] = {
    "grid": f"{DEPTH}x48,96,192,384",
    "max_steps": 300,
    "per_device_train_batch_size": 256,
    "learning_rate": 1e-3,
    "temperature": 0.05,
    "warmup_steps": 0.1,
    "max_length": 8,  # the frozen encoder reads no tokens
    "text_columns": ["text"],
    "quantizer_config": {"skip": "identity"},
    "use_cpu": True,
}
OFF = {"quantization_loss": False, "matryoshka": False, "regularization": False, "variance_control": False}
# Step -> settings of its training.
STEPS: dict[str, dict[str, Any] | None] = {
    "thresholds only": None,
    "+ feed-forward transform": OFF,
    "+ quantisation loss": OFF | {"quantization_loss": True},
    "+ Matryoshka loss": OFF | {"quantization_loss": True, "matryoshka": True},
    "+ orthogonality, bottleneck": {"variance_control": False},
    "+ variance control": {},
}
# Settings that were compared on msmarco-mini, in addition to the steps; each is all steps with a change.
VARIANTS: dict[str, dict[str, Any]] = {
    "gradient through codes": {"quantized_gradient": True},
    "100 steps": {"max_steps": 100},
    "1,000 steps": {"max_steps": 1000},
    "skip none": {"quantizer_config": {"skip": "none", "intermediate_size": 32 * WIDTH}, "learning_rate": 1e-4},
    "skip principal": {"quantizer_config": {"skip": "principal"}},
    "learning rate 3e-4": {"learning_rate": 3e-4},
    "temperature 0.1": {"temperature": 0.1},
}
Vectors = Mapping[str, torch.Tensor]


def embeddings(data: Path, name: str) -> dict[str, dict[str, torch.Tensor]]:
    """Collection -> name of its texts -> embeddings of the last layer."""
    states = raw_states(data, name)
    collections = [task for task in states if task in (*RETRIEVAL_TESTS, "msmarco-mini")]
    return {task: {side: layers[DEPTH] for side, layers in states[task].items()} for task in collections}


def training_texts(data: Path) -> dict[str, torch.Tensor]:
    """Text -> its embedding, `(width,)`."""
    states = raw_states(data, "texts")
    return {
        text: vector
        for source, texts in sources(data).items()
        for text, vector in zip(texts, states[source][DEPTH], strict=True)
    }


def quantizer_of(data: Path, settings: dict[str, Any] | None, seed: int) -> tuple[M3BertQuantizer, float]:
    """A quantizer, and the seconds of its training."""
    rows, start = training_texts(data), time.perf_counter()
    if settings is None:
        torch.manual_seed(seed)
        quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=WIDTH, skip="identity", layers=[DEPTH]))
        quantizer.calibrate(torch.stack(list(rows.values())))
        return quantizer.eval(), time.perf_counter() - start
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / "teacher.npy"
    np.save(file, torch.stack(list(rows.values())).numpy())
    teacher = TeacherEmbeddings(list(rows), np.load(file, mmap_mode="r"))
    model, tokenizer = converted(default_base())
    dataset = Dataset.from_dict({"text": list(rows)})
    trainer = Run("qama", TRAINING | settings).train(model, tokenizer, dataset, {"teacher": teacher}, seed=seed)
    return trainer.quantizer.eval(), time.perf_counter() - start


def ndcg(evaluator: Retrieval, ranked: np.ndarray) -> float:
    """nDCG@10 of ranked documents."""
    return ranking_scores(ranked, evaluator.relevant, (10,))["ndcg@10"]


def score(
    evaluator: Retrieval, vectors: Vectors, codes: Sequence[str], quantizer: M3BertQuantizer | None = None
) -> dict[str, dict[Granularity, float]]:
    """
    Way to search -> granularity -> nDCG@10, at every dim in every code: `""` by the code alone, `"asymmetric"` by a
    float query against the codes, `"re-scored"` the first 100 by int8, and `"re-scored by codes"` by a float query
    against the codes.
    """
    scores: dict[str, dict[Granularity, float]] = {
        way: {} for way in ("", "asymmetric", "re-scored", "re-scored by codes")
    }
    for dim in DIMS:
        prefixes = {name: truncate(side, dim) for name, side in vectors.items()}
        exact = vectors_in_precision(prefixes, ["documents"], Granularity(DEPTH, dim, "int8"))
        for code in codes:
            g = Granularity(DEPTH, dim, code)
            coded = vectors_in_precision(vectors, ["documents"], g, quantizer)
            floats = vectors_in_precision(vectors, ["documents"], g, quantizer, float_queries=True)
            ranked = exact_search(coded["queries"], coded["documents"], SHORTLIST)
            scores[""][g] = ndcg(evaluator, ranked)
            scores["asymmetric"][g] = ndcg(evaluator, exact_search(floats["queries"], floats["documents"], 10))
            for way, sides in (("re-scored", exact), ("re-scored by codes", floats)):
                again = rerank(sides["queries"], sides["documents"], ranked, [SHORTLIST])[SHORTLIST]
                scores[way][g] = ndcg(evaluator, again)
    return scores


def agreement(vectors: Vectors, codes: Sequence[str], quantizer: M3BertQuantizer) -> dict[Granularity, float]:
    """
    Share of the ten nearest documents of a document that float32 at full width and the Hamming distance of codes have
    in common, over 500 documents. It needs no labels, and tells settings apart that nDCG@10 does not.
    """
    sides = {"queries": vectors["documents"][:500], "documents": vectors["documents"]}
    exact = exact_search(sides["queries"], sides["documents"], 11)
    shares = {}
    for g in (Granularity(DEPTH, dim, code) for code in codes for dim in DIMS):
        coded = vectors_in_precision(sides, ["documents"], g, quantizer)
        ranked = exact_search(coded["queries"], coded["documents"], 11)
        shares[g] = mean(
            len(others(row, by_codes) & others(row, by_floats)) / 10
            for row, (by_codes, by_floats) in enumerate(zip(ranked.tolist(), exact.tolist(), strict=True))
        )
    return shares


def others(row: int, ranked: list[int]) -> set[int]:
    """The first ten documents but the one that was asked for, which finds itself."""
    return set([other for other in ranked if other != row][:10])


def product_quantization(evaluator: Retrieval, vectors: Vectors, train: torch.Tensor) -> dict[int, float]:
    """Bytes per vector -> nDCG@10 of faiss' product quantisation, with codebooks of the training texts."""
    sides = {name: torch.nn.functional.normalize(side, dim=1).numpy() for name, side in vectors.items()}
    scores = {}
    for size in (12, 24, 48, 96, 128):
        index = faiss.IndexPQ(WIDTH, size, 8, faiss.METRIC_INNER_PRODUCT)
        index.train(torch.nn.functional.normalize(train, dim=1).numpy())
        index.add(sides["documents"])
        scores[size] = ndcg(evaluator, index.search(sides["queries"], 10)[1])
    return scores


def scalar_codes(evaluator: Retrieval, vectors: Vectors) -> dict[Granularity, float]:
    """float32, int8 and binary of sentence-transformers, int4 of faiss, at dims of the same bytes as QAMA's codes."""
    sizes = {"float32": [12, 24, 36, *DIMS], "int8": [24, 48, 78, 96, 144, *DIMS[1:]], "binary": DIMS}
    sizes["int4"] = [48, 96, 156, 192, 288, 384]
    scores = {}
    for code, dims in sizes.items():
        for dim in dims:
            g = Granularity(DEPTH, dim, code)
            prefixes = {name: truncate(side, dim) for name, side in vectors.items()}
            coded = vectors_in_precision(prefixes, ["documents"], g)
            scores[g] = ndcg(evaluator, exact_search(coded["queries"], coded["documents"], 10))
    return scores


def about(development: bool) -> dict[str, Any]:
    """What identifies the study."""
    return {
        "command": f"python -m benchmarks.reproduction.qama{' --development' if development else ''}",
        "settings": {"training": TRAINING, "shortlist": SHORTLIST},
        "metric": "nDCG@10; run -> seed -> test, and way to search -> granularity; faiss PQ: bytes per vector",
    }


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="seeds to train and score")
    parser.add_argument("--steps", nargs="+", choices=[*STEPS, *VARIANTS], help="steps to train; default: all")
    parser.add_argument("--development", action="store_true", help="score msmarco-mini, and the variants")
    parser.add_argument("--baselines", action="store_true", help="score codes that are not trained")
    options = parser.parse_args(arguments)
    data = data_folder()
    file = "qama_development" if options.development else "qama"
    vectors = embeddings(data, "development" if options.development else "tests")
    every: Any = evaluators(data, options.development)
    tests = [test for test in every if test in (*RETRIEVAL_TESTS, "msmarco-mini")]
    if options.baselines:
        train = torch.stack(list(training_texts(data).values()))
        if len(train) < CENTROIDS:
            raise ValueError(f"{len(train)} texts are too few for product quantisation: {CENTROIDS} are the minimum.")
        baselines = {test: scalar_codes(every[test], vectors[test]) for test in tests}
        products: Any = {test: product_quantization(every[test], vectors[test], train) for test in tests}
        add_results(file, {"no quantizer": {"0": baselines}, "faiss PQ": {"0": products}}, about(options.development))
    known = STEPS | (VARIANTS if options.development else {})
    for seed in options.seeds:
        for step in options.steps or known:
            quantizer, seconds = quantizer_of(data, known[step], seed)
            scores: dict[str, dict[Granularity, float]] = {}
            for test in tests:
                by_way = score(every[test], vectors[test], CODES, quantizer)
                scores |= {f"{test} {way}".strip(): values for way, values in by_way.items()}
                if options.development:
                    scores[f"{test} agreement"] = agreement(vectors[test], CODES, quantizer)
            add_results(file, {step: {str(seed): scores}}, about(options.development))
            shown = {str(g): round(100 * value, 1) for g, value in scores[tests[0]].items() if g.code == "qama-2"}
            print(f"{step}, seed {seed}: trained in {seconds:.0f} s, {tests[0]} {shown}", flush=True)


if __name__ == "__main__":
    run_command(main)
