"""
From a real encoder to an elastic one, in one command: convert it, fit exits, search one index with queries at any
depth, fine-tune all granularities from there, and ask questions.

    m3bert quickstart                                             # takes 5 to 10 minutes on two CPU cores
    m3bert quickstart --fast                                      # without fine-tuning: about two minutes
    m3bert quickstart --query "How do I join two paths?"          # ask an existing run

The texts are the documentation of Python's standard library, which is on every machine: the summary line of a
docstring is the query, the text below it the document to find. All results go to one folder.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer, set_seed

from ..encode.device import ComputeArguments, place
from ..encode.extras import require_extra
from ..evaluation import (
    TASKS,
    GridEncoder,
    exact_search,
    load_task,
    measure_latency,
    run_facts,
    score_vectors,
    tfidf_scores,
)
from ..hub_cards.figures import draw_curves
from ..hub_cards.onnx_export import missing_packages
from ..hub_cards.onnx_latency import onnx_engines
from ..hub_cards.tables import latency_report, markdown, percent
from ..trainers import (
    Composition,
    Contrastive,
    ContrastiveConfig,
    ContrastiveTrainer,
    CrossDepth,
    ExitDistillation,
    Granularity,
    Grid,
    TeacherEmbeddings,
    fit_exits,
)
from ..trainers.data.stdlib_docs import Pair, split_by_module, stdlib_pairs
from .command import add_compute_options, argument_parser, compute_of
from .convert import convert
from .sources import DEFAULT_ENCODER, default_base


GRID = Grid.parse("0,2,4,6 x 32,64,128,384")
FULL = GRID.full
MAX_LENGTH = 128  # tokens per held-out text
SHORT_LENGTH = 64  # tokens per text in the fit, in training and in the index
BATCH_SIZE = 64
OUTPUT_DIR = Path("runs/quickstart")
FOUND = 3  # documents that answer a question
QUESTIONS = [
    "measure how long a small piece of code takes",
    "delete a folder and everything in it",
    "the middle value of some numbers",
    "break a long text into lines of a given width",
]


def documents_of(pairs: list[Pair]) -> list[str]:
    """The texts of the index: summaries with their bodies."""
    return [f"{pair.summary} {pair.body}" for pair in pairs]


def add_exits(encoder: GridEncoder, pairs: list[Pair]) -> None:
    """Fit exits to summaries, bodies, and both together."""
    fit_exits(
        encoder.model,
        encoder.tokenizer,
        training_texts(pairs),
        layers=[layer for layer in GRID.layers if 0 < layer < FULL.layer],
        basis="principal",
        max_length=SHORT_LENGTH,
        compute_dtype=encoder.compute_dtype,
        description="Fitting exits",
    )
    encoder.model.config.matryoshka_dims = GRID.dims


def training_texts(pairs: list[Pair]) -> list[str]:
    """Summaries, bodies, and both together."""
    return [*(pair.summary for pair in pairs), *(pair.body for pair in pairs), *documents_of(pairs)]


def train(encoder: GridEncoder, pairs: list[Pair], options: argparse.Namespace) -> None:
    """Contrast pairs at every granularity, and queries at every depth with documents at the last layer; shallow layers
    also learn to embed like the last one did before. The model is saved in place of the fitted one."""
    compute, texts = compute_of(options), list(dict.fromkeys(training_texts(pairs)))
    at_full = replace(encoder, grid=Grid((FULL,)), max_length=SHORT_LENGTH)
    vectors = at_full.encode(texts, description="Encoding what to train on").at(FULL)
    before = TeacherEmbeddings.write(texts, vectors, options.output_dir / "training" / "before.npy")
    args = ContrastiveConfig(
        output_dir=str(options.output_dir / "training"),
        grid=str(GRID),
        text_columns=["summary", "body"],
        max_length=SHORT_LENGTH,
        per_device_train_batch_size=BATCH_SIZE,
        train_sampling_strategy="group_by_length",  # little padding
        learning_rate=2e-4,
        warmup_steps=0.1,
        max_steps=options.steps,
        logging_strategy="no",  # the progress bar and the final table are enough
        save_strategy="no",
        seed=options.seed,
        use_cpu=compute.uses_cpu,
        bf16=compute.compute_dtype == "bfloat16",
        fp16=compute.compute_dtype == "float16",
    )
    shallow = Grid(tuple(g for g in GRID if g.layer != FULL.layer))
    across = CrossDepth(shallow, document_layer=FULL.layer)
    kept = ExitDistillation(shallow, bank=torch.from_numpy(before.vectors))
    parts = {"same_depth": (1.0, Contrastive(GRID)), "cross_depth": (1.0, across), "exit_distillation": (2.0, kept)}
    lengths = [min(len(ids), SHORT_LENGTH) for ids in encoder.tokenizer([pair.body for pair in pairs]).input_ids]
    rows = [{"summary": pair.summary, "body": pair.body, "length": n} for pair, n in zip(pairs, lengths, strict=True)]
    trainer = ContrastiveTrainer(
        encoder.model, args, encoder.tokenizer, Dataset.from_list(rows), teacher=before, objective=Composition(parts)
    )
    trainer.train()
    trainer.save_model(str(options.output_dir / "model"))


def write_index(pairs: list[Pair], vectors: torch.Tensor, folder: Path) -> None:
    """Save the one index: embeddings `(pairs, width)` of [`documents_of`] pairs at the last layer."""
    save_file({f"layer_{FULL.layer}": vectors.contiguous()}, folder / "index.safetensors")
    lines = [json.dumps({"name": pair.name, "summary": pair.summary}) + "\n" for pair in pairs]
    (folder / "documents.jsonl").write_text("".join(lines), encoding="utf-8")


def ask(folder: Path, questions: list[str], compute: ComputeArguments) -> None:
    """Print the nearest documents to questions at several depths, which all search the one index."""
    if not (folder / "index.safetensors").is_file():
        raise ValueError(f"{folder} holds no finished run: run `m3bert quickstart` first.")
    documents = [json.loads(line) for line in (folder / "documents.jsonl").read_text(encoding="utf-8").splitlines()]
    (vectors,) = load_file(folder / "index.safetensors").values()
    encoder = GridEncoder.from_pretrained(str(folder / "model"), grid=f"0,2,{FULL.layer}x{FULL.dim}", compute=compute)
    encoded = encoder.encode(questions)
    found = {str(g): exact_search(encoded.at(g), vectors, FOUND) for g in encoder.grid}
    for number, question in enumerate(questions):
        rows = zip(*(rows[number].tolist() for rows in found.values()), strict=True)
        names = [[documents[row]["name"] for row in rank] for rank in rows]
        print(f"\n{question}\n\n{markdown(list(found), names, words=len(found))}")


def report(folder: Path, settings: dict[str, Any], scores: dict[str, Any], baselines: Any, latency: Any) -> None:
    """Write results, table and figure, and print the table."""
    results = {**run_facts(), **settings, "baselines": baselines, "latency": asdict(latency)}
    results["granularities"] = {
        str(g): {name: its[g] for name, its in scores.items()}
        | {"ms_per_query": latency.of(g), "bytes_per_vector": 4 * g.dim}
        for g in GRID
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    headings = {"untouched": "converted", "exits_asymmetric": f"exits, documents at layer {FULL.layer}"}
    headings |= {"trained_asymmetric": f"trained, documents at layer {FULL.layer}"}
    searches = {headings.get(name, name): its for name, its in scores.items()}

    def cell(found: dict[str, float]) -> str:
        return f"{percent(found['recall@10'])} / {percent(found['mrr@10'])}"

    rows = [
        [str(g), *(cell(its[g]) for its in searches.values()), f"{latency.of(g):.1f}", str(4 * g.dim)] for g in GRID
    ]
    rows += [[name, *[cell(found)] * len(searches), "", ""] for name, found in baselines.items()]
    table = markdown(["granularity", *searches, "ms per query", "bytes per vector"], rows)
    table += f"\n\n{latency_report(latency, GRID.layers)}"
    if not latency.engine_ms:
        table += f" onnxruntime needs {', '.join(missing_packages())}: pip install 'm3bert[onnx]'."
    (folder / "table.md").write_text(table + "\n", encoding="utf-8")
    panels = {
        f"{title}: recall@10 (%)": [(f"layer {g.layer}", 4 * g.dim, 100 * its[g]["recall@10"]) for g in sorted(its)]
        for title, its in searches.items()
    }
    lines = {name: 100 * baselines[name]["recall@10"] for name in ("TF-IDF", "BM25")}
    draw_curves(panels, "bytes per vector", folder / "recall.png", lines, sharey=True)
    stages = ", ".join(f"{stage} {took:.0f} s" for stage, took in settings["seconds"].items())
    print(f"\nRecall@10 / MRR@10 in percent of {settings['test_pairs']} held-out texts ({stages}):\n\n{table}\n")
    print(f"Figure: {folder / 'recall.png'}. Checkpoint: {folder / 'model'}.")


def run(options: argparse.Namespace) -> None:
    """The whole run. Raises a ValueError if a package is missing or the encoder does not suit."""
    base, compute = options.model_name_or_path or default_base(), compute_of(options)
    for module in ("sklearn", "matplotlib"):  # before the work, not after it
        require_extra(module, "quickstart", "The quickstart")
    folder, dtype, start = options.output_dir, compute.autocast_dtype, time.perf_counter()
    scores: dict[str, Any] = {}
    seconds: dict[str, float] = {}

    def lap(stage: str) -> None:
        seconds[stage] = round(time.perf_counter() - start - sum(seconds.values()), 1)

    def encode() -> dict[str, Any]:
        return {name: encoder.encode(texts, description=f"Encoding the {name}") for name, texts in task.texts.items()}

    def measure(name: str) -> None:
        scores[name] = score_vectors(task, vectors)
        scores[f"{name}_asymmetric"] = score_vectors(task, vectors, FULL.layer)
        for layer in (0, FULL.layer):
            sides = {"queries": Granularity(layer, FULL.dim), "documents": FULL}
            found = {side: vectors[side].at(granularity) for side, granularity in sides.items()}
            baselines[f"{sides['queries']} {name} + BM25"] = task.score_bm25(found)

    set_seed(options.seed)
    train_pairs, test_pairs = split_by_module(stdlib_pairs())
    pairs = [*train_pairs, *test_pairs]
    task: Any = load_task(TASKS["stdlib"])  # retrieval, of the test pairs
    print(f"{len(train_pairs)} pairs to fit and train on, {len(test_pairs)} of other modules held out.")
    convert(base, str(folder / "model"), overwrite=True)
    # Dropout costs time, most of all in attention on a CPU, and so few steps do not need it.
    no_dropout = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "embedding_dropout": 0.0}
    model = place(AutoModel.from_pretrained(folder / "model", **no_dropout), compute)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model.set_depths(table=model.get_input_embeddings().weight)  # layer 0 before the fit
    encoder = GridEncoder(model, tokenizer, GRID, max_length=MAX_LENGTH, compute_dtype=dtype)
    lap("convert")
    vectors = encode()
    scores["untouched"] = score_vectors(task, vectors)
    baselines = {"TF-IDF": tfidf_scores(task), "BM25": task.score_bm25()}
    lap("encode")
    add_exits(encoder, train_pairs)
    lap("fit")
    vectors = encode()
    measure("exits")
    lap("encode again")
    if options.fast:
        model.save_pretrained(folder / "model")
    else:
        train(encoder, train_pairs, options)
        lap("train")
        vectors = encode()
        measure("trained")
        lap("encode once more")
    indexer = replace(encoder, grid=Grid((FULL,)), max_length=SHORT_LENGTH)
    write_index(pairs, indexer.encode(documents_of(pairs), description="Encoding the library").at(FULL), folder)
    lap("index")
    engines = None if missing_packages() else onnx_engines(encoder, (2, FULL.layer))
    lap("ONNX export")
    queries = task.texts["queries"][:40]
    latency = measure_latency(encoder, queries, documents=len(pairs), rounds=40, engines=engines)
    lap("latency")
    settings = {"seed": options.seed, "base": options.model_name_or_path or DEFAULT_ENCODER, "seconds": seconds}
    settings |= {"train_pairs": len(train_pairs), "test_pairs": len(test_pairs), "python": sys.version.split()[0]}
    settings |= {"steps": 0 if options.fast else options.steps}
    settings |= {"compute": {**vars(compute), "device": str(compute.torch_device)}}
    report(folder, settings, scores, baselines, latency)
    print("Questions at several depths against one index:")
    ask(folder, QUESTIONS, compute)
    where = "" if folder == OUTPUT_DIR else f" --output_dir {folder}"
    print(f"\nAsk your own: m3bert quickstart --query '...'{where}")


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--model_name_or_path",
        "--model",
        help="folder or Hub id of an encoder with 6 layers or more; default: one from PyPI",
    )
    parser.add_argument("--output_dir", type=Path, default=OUTPUT_DIR, help="folder for all results")
    parser.add_argument("--fast", action="store_true", help="stop before the fine-tuning")
    parser.add_argument("--steps", type=int, default=80, help=f"training steps, of {BATCH_SIZE} pairs each")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--query", action="append", help="ask an existing run; can be repeated")
    add_compute_options(parser)
    options = parser.parse_args(arguments)
    if options.query:
        ask(options.output_dir, options.query, compute_of(options))
    else:
        run(options)
