"""
From a real encoder to an elastic one, in one command: convert it, fine-tune it at 12 granularities at once, evaluate
each of them, and ask questions.

    m3bert quickstart                                             # takes 5 to 10 minutes on two CPU cores
    m3bert quickstart --query "How do I join two paths?"          # ask an existing run

The texts are the documentation of Python's standard library, which is on every machine: the summary line of a
docstring is the query, the text below it the document to find. All results go to one folder.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, set_seed

from modeling_m3bert import M3BertModel
from trainers import ContrastiveConfig, ContrastiveTrainer, Granularity, Grid
from trainers.core.extras import require_extra
from trainers.data.stdlib_docs import Pair, split_by_module, stdlib_pairs
from trainers.evaluation import (
    GridEncoder,
    Latency,
    Retrieval,
    exact_search,
    measure_latency,
    ranking_scores,
    score_grid,
)

from .command import argument_parser, run_command
from .convert import convert
from .sources import DEFAULT_ENCODER, default_base


GRID = Grid.parse("2,4,6 x 32,64,128,384")
MAX_LENGTH = 128
OUTPUT_DIR = Path("runs/quickstart")
QUESTIONS = [
    "measure how long a small piece of code takes",
    "delete a folder and everything in it",
    "the middle value of some numbers",
    "break a long text into lines of a given width",
]
Scores = dict[Granularity, dict[str, float]]


def encoder_of(model: Any, tokenizer: Any) -> GridEncoder:
    """The model as an encoder with the grid and the settings of the quickstart."""
    return GridEncoder(model, tokenizer, GRID, max_length=MAX_LENGTH)


def measure(model: Any, tokenizer: Any, pairs: list[Pair], description: str) -> Scores:
    """Scores of retrieving each body by its summary, at every granularity."""
    texts = {"queries": [pair.summary for pair in pairs], "documents": [pair.body for pair in pairs]}
    evaluator = Retrieval(texts, [{row: 1.0} for row in range(len(pairs))])
    return score_grid(encoder_of(model, tokenizer), evaluator, description)


def require_tfidf() -> Any:
    """scikit-learn's `TfidfVectorizer`."""
    return require_extra("sklearn.feature_extraction.text", "quickstart", "The quickstart").TfidfVectorizer


def measure_tfidf(pairs: list[Pair]) -> dict[str, float]:
    """The same with TF-IDF vectors of the words, a baseline without any training."""
    vectorizer = require_tfidf()(sublinear_tf=True).fit([pair.body for pair in pairs])
    queries, documents = (
        torch.from_numpy(vectorizer.transform(texts).toarray())
        for texts in ([pair.summary for pair in pairs], [pair.body for pair in pairs])
    )
    return ranking_scores(exact_search(queries, documents, 100), [{row: 1.0} for row in range(len(pairs))])


def train(model: M3BertModel, tokenizer: Any, pairs: list[Pair], options: argparse.Namespace) -> None:
    """Fine-tune at all granularities, and save the model in place of the converted one."""
    args = ContrastiveConfig(
        output_dir=str(options.output_dir / "training"),
        grid=str(GRID),
        max_length=64,
        per_device_train_batch_size=64,
        learning_rate=1.6e-4,
        warmup_steps=0.1,
        max_steps=options.steps,
        logging_strategy="no",  # the progress bar and the final table are enough
        save_strategy="no",
        report_to="none",
        seed=options.seed,
        use_cpu=not torch.cuda.is_available(),
    )
    dataset = Dataset.from_dict({"summary": [pair.summary for pair in pairs], "body": [pair.body for pair in pairs]})
    trainer = ContrastiveTrainer(model, args, tokenizer, dataset)
    trainer.train()
    trainer.save_model(str(options.output_dir / "model"))


def write_index(model: Any, tokenizer: Any, pairs: list[Pair], folder: Path) -> None:
    """Save one vector per document and layer, at full width: smaller dims are prefixes of it."""
    texts = [f"{pair.summary} {pair.body}" for pair in pairs]
    index = encoder_of(model, tokenizer).encode(texts, role="document", description="Encoding the library")
    save_file({f"layer_{layer}": vectors for layer, vectors in index.layers.items()}, folder / "index.safetensors")
    with open(folder / "documents.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"name": pair.name, "summary": pair.summary}) + "\n" for pair in pairs)


def report(before: Scores, after: Scores, latency: Latency, tfidf: dict[str, float]) -> str:
    """The final table, in Markdown."""
    lines = [
        "| granularity | Recall@10 before | after | MRR@10 before | after | ms per query | bytes per vector |",
        "| --- | --: | --: | --: | --: | --: | --: |",
    ]
    for g in GRID:
        cells = [f"{100 * scores[g][name]:.1f}" for name in ("recall@10", "mrr@10") for scores in (before, after)]
        lines.append(f"| {g} | {' | '.join(cells)} | {latency.of(g):.1f} | {4 * g.dim} |")
    recall, mrr = f"{100 * tfidf['recall@10']:.1f}", f"{100 * tfidf['mrr@10']:.1f}"
    lines.append(f"| TF-IDF | {recall} | {recall} | {mrr} | {mrr} | | |")
    return "\n".join(lines)


def require_figure() -> Any:
    """matplotlib's `Figure`."""
    return require_extra("matplotlib.figure", "quickstart", "The quickstart").Figure


def draw(before: Scores, after: Scores, tfidf: dict[str, float], file: Path) -> None:
    """Plot Recall@10 over bytes per vector, one colour per layer, before (dashed) and after training (solid)."""
    figure = require_figure()(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, layer in zip(("#d95f02", "#7570b3", "#1b9e77"), GRID.layers, strict=True):
        dims = GRID.dims_of(layer)
        for scores, style, name in ((before, "--", "before"), (after, "-", "after")):
            recalls = [100 * scores[Granularity(layer, dim)]["recall@10"] for dim in dims]
            axes.plot(
                [4 * dim for dim in dims], recalls, style, color=color, marker="o", label=f"{layer} layers, {name}"
            )
    axes.axhline(100 * tfidf["recall@10"], color="grey", linestyle=":", label="TF-IDF")
    axes.set_xscale("log", base=2)
    axes.set_xticks([4 * dim for dim in GRID.dims], [str(4 * dim) for dim in GRID.dims])
    axes.set_xlabel("bytes per vector (float32)")
    axes.set_ylabel("Recall@10 of held-out documentation (%)")
    axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    figure.legend(handlelength=3, fontsize="small", ncols=4, loc="outside upper center")
    figure.savefig(file, dpi=150)


def ask(folder: Path, questions: list[str]) -> None:
    """Ask in another process that has the checkpoint and transformers, but not this project."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder.resolve() / "modules")}
    environment.pop("PYTHONPATH", None)
    script = Path(__file__).with_name("ask.py")
    done = subprocess.run([sys.executable, "-I", str(script), str(folder), *questions], env=environment)
    if done.returncode != 0:
        sys.exit(done.returncode)  # it has printed why


def run(options: argparse.Namespace) -> None:
    """
    The whole run.

    Raises:
        ValueError: if the default encoder or another package of the extra is not installed, or the encoder cannot be
            converted or is smaller than the grid.
    """
    base = options.base or default_base("--base")
    require_tfidf(), require_figure()  # before the work, not after it
    folder = options.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    set_seed(options.seed)
    pairs = stdlib_pairs()
    train_pairs, test_pairs = split_by_module(pairs)
    print(f"{len(train_pairs)} pairs to train on, {len(test_pairs)} of other modules held out.")

    convert(base, str(folder / "model"))
    # On a CPU, scaled_dot_product_attention has no fast path with dropout.
    model = AutoModel.from_pretrained(folder / "model", attention_dropout=0.0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    GRID.validate(model.config)
    before, tfidf = measure(model, tokenizer, test_pairs, "Before training"), measure_tfidf(test_pairs)
    start = time.perf_counter()
    train(model, tokenizer, train_pairs, options)
    training_seconds = time.perf_counter() - start
    after = measure(model, tokenizer, test_pairs, "After training")

    write_index(model, tokenizer, pairs, folder)
    latency = measure_latency(
        encoder_of(model, tokenizer), [pair.summary for pair in test_pairs[:40]], documents=len(pairs), rounds=40
    )
    results = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs",
        "seed": options.seed,
        "base": options.base or DEFAULT_ENCODER,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "python": platform.python_version(),
        "train_pairs": len(train_pairs),
        "test_pairs": len(test_pairs),
        "training_seconds": round(training_seconds),
        "tfidf": tfidf,
        "granularities": {
            str(g): {
                "before": before[g],
                "after": after[g],
                "ms_per_query": latency.of(g),
                "bytes_per_vector": 4 * g.dim,
            }
            for g in GRID
        },
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    draw(before, after, tfidf, folder / "recall.png")
    table = report(before, after, latency, tfidf)
    (folder / "table.md").write_text(table + "\n", encoding="utf-8")
    tqdm.write(f"\nTrained for {training_seconds:.0f} s. Retrieval of {len(test_pairs)} held-out texts:\n\n{table}\n")
    tqdm.write(
        f"Figure: {folder / 'recall.png'}. Checkpoint: {folder / 'model'}.\n"
        "Questions, answered in a process that has transformers but not this project:"
    )
    ask(folder, QUESTIONS)
    where = "" if folder == OUTPUT_DIR else f" --output_dir {folder}"
    tqdm.write(f"\nAsk your own: m3bert quickstart --query '...'{where}")


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--base", help="folder or Hub id of an encoder with 6 layers or more; default: one from PyPI")
    parser.add_argument("--output_dir", type=Path, default=OUTPUT_DIR, help="folder for all results")
    parser.add_argument("--steps", type=int, default=100, help="training steps, of 64 pairs each")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--query", action="append", help="ask an existing run; can be repeated")
    options = parser.parse_args(arguments)
    if options.query:
        ask(options.output_dir, options.query)
    else:
        run(options)


if __name__ == "__main__":
    run_command(main)
