"""
From a real encoder to an elastic one, in one command: convert it, fit exits, search one index with queries at any
depth, fine-tune all granularities from there, and ask questions.

    m3bert quickstart                                             # takes 4 to 8 minutes on two CPU cores
    m3bert quickstart --fast                                      # without fine-tuning: about a minute
    m3bert quickstart --query "How do I join two paths?"          # ask an existing run

The texts are the documentation of Python's standard library, which is on every machine: the summary line of a
docstring is the query, the text below it the document to find. All results go to one folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import save_file
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer, set_seed

from hub_cards.onnx_export import missing_packages
from hub_cards.onnx_latency import onnx_engines
from modeling_m3bert import M3BertModel
from trainers import (
    Composition,
    Contrastive,
    ContrastiveConfig,
    ContrastiveTrainer,
    ExitDistillation,
    Grid,
    TeacherEmbeddings,
    fit_exits,
    nested_states,
)
from trainers.core.compute import ComputeArguments, autocast, place
from trainers.core.extras import require_extra
from trainers.core.parts.cross_depth import CrossDepth
from trainers.data.stdlib_docs import Pair, split_by_module, stdlib_pairs
from trainers.evaluation import GridEncoder, exact_search, measure_latency, ranking_scores

from .command import add_compute_options, argument_parser, compute_of, run_command
from .convert import convert
from .quickstart_report import METRICS, Clock, Scores, draw, latency_report, report, require_figure, write_results
from .sources import DEFAULT_ENCODER, default_base


GRID = Grid.parse("0,2,4,6 x 32,64,128,384")
FULL = GRID.full
MAX_LENGTH = 128  # tokens per held-out text
SHORT_LENGTH = 64  # tokens per text in the fit, in training and in the index
BATCH_SIZE = 64
STEPS = 80
OUTPUT_DIR = Path("runs/quickstart")
QUESTIONS = [
    "measure how long a small piece of code takes",
    "delete a folder and everything in it",
    "the middle value of some numbers",
    "break a long text into lines of a given width",
]
ONNX_LAYERS = (2, FULL.layer)  # timed in onnxruntime as well
States = dict[int, torch.Tensor]  # layer -> pooled states, one row per text


@torch.no_grad()
def embed(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    layers: Sequence[int],
    max_length: int,
    description: str,
    dtype: torch.dtype | None = None,
) -> States:
    """Layer -> mean-pooled states of the texts, `(texts, width)`, computed in a type. Layers with an exit are read
    after it."""
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))  # little padding
    states = {layer: torch.empty(len(texts), model.config.hidden_size) for layer in layers}
    model.eval()
    for start in tqdm(range(0, len(texts), BATCH_SIZE), desc=description, unit=" batches", leave=False):
        rows = order[start : start + BATCH_SIZE]
        inputs = tokenizer(
            [texts[row] for row in rows], padding=True, truncation=True, max_length=max_length, return_tensors="pt"
        )
        with autocast(model.device, dtype):
            found = nested_states(model, inputs.to(model.device), layers)
        for layer in layers:
            states[layer][rows] = found.pooled(layer).cpu()
    return states


def sides_of(pairs: Sequence[Pair]) -> list[str]:
    """All summaries, then all bodies."""
    return [pair.summary for pair in pairs] + [pair.body for pair in pairs]


def documents_of(pairs: Sequence[Pair]) -> list[str]:
    """The texts of the index: summaries with their bodies."""
    return [f"{pair.summary} {pair.body}" for pair in pairs]


def search(states: States, query_layer: int, document_layer: int) -> dict[int, dict[str, float]]:
    """Dim -> scores of retrieving each body by its summary. `states` are those of [`sides_of`]."""
    count = len(states[query_layer]) // 2
    queries, documents = states[query_layer][:count], states[document_layer][count:]
    relevant = [{row: 1.0} for row in range(count)]
    return {
        dim: ranking_scores(exact_search(queries[:, :dim], documents[:, :dim], 100), relevant) for dim in GRID.dims
    }


def measure(states: States, name: str, asymmetric: bool) -> dict[str, Scores]:
    """Scores at every granularity with both sides at its layer and, on request, with documents at the last one."""
    found = {layer: search(states, layer, layer) for layer in GRID.layers}
    scores = {name: {g: found[g.layer][g.dim] for g in GRID}}
    if asymmetric:
        found = {layer: search(states, layer, FULL.layer) for layer in GRID.layers}
        scores[f"{name}_asymmetric"] = {g: found[g.layer][g.dim] for g in GRID}
    return scores


def require_tfidf() -> Any:
    """scikit-learn's `TfidfVectorizer`."""
    return require_extra("sklearn.feature_extraction.text", "quickstart", "The quickstart").TfidfVectorizer


def measure_tfidf(pairs: list[Pair]) -> dict[str, float]:
    """The same search with TF-IDF vectors of the words, a baseline without any training."""
    vectorizer = require_tfidf()(sublinear_tf=True).fit([pair.body for pair in pairs])
    queries, documents = (
        torch.from_numpy(vectorizer.transform(texts).toarray())
        for texts in ([pair.summary for pair in pairs], [pair.body for pair in pairs])
    )
    return ranking_scores(exact_search(queries, documents, 100), [{row: 1.0} for row in range(len(pairs))])


def add_exits(
    model: M3BertModel, tokenizer: Any, pairs: list[Pair], dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """
    Fit exits to the texts of some pairs: summaries, bodies, and both together.

    Returns:
        `dict[str, torch.Tensor]`: text -> its embedding at the last layer `(width,)`, from the same pass.
    """
    kept: dict[str, torch.Tensor] = {}

    def keep(texts: list[str], pooled: States) -> None:
        kept.update(zip(texts, pooled[FULL.layer].cpu(), strict=True))

    fit_exits(
        model,
        tokenizer,
        [*sides_of(pairs), *documents_of(pairs)],
        layers=[layer for layer in GRID.layers if layer != FULL.layer],
        basis="principal",
        max_length=SHORT_LENGTH,
        compute_dtype=dtype,
        description="Fitting exits",
        on_states=keep,
    )
    model.config.matryoshka_dims = GRID.dims
    vectors = apply_exits(model, {FULL.layer: torch.stack(list(kept.values()))})[FULL.layer]
    return dict(zip(kept, vectors, strict=True))


@torch.no_grad()
def apply_exits(model: M3BertModel, states: States) -> States:
    """The states after their exits: an exit of a mean is the mean of the exits."""
    return {layer: model.exit_state(layer, vectors.to(model.device)).cpu() for layer, vectors in states.items()}


class DepthsTrainer(ContrastiveTrainer):
    """
    Contrasts pairs at every granularity, and queries at every depth with documents at the last layer. Shallow layers
    also learn to embed like the last one did before training.
    """

    def build_objective(self, args: Any, grid: Grid) -> Composition:
        if self.teacher is None:
            raise ValueError("The quickstart trains with its embeddings from before training: pass teacher.")
        shallow = Grid(tuple(g for g in grid if g.layer != FULL.layer))
        before = torch.from_numpy(self.teacher.vectors)
        return Composition(
            {
                "same_depth": (1.0, Contrastive(grid)),
                "cross_depth": (1.0, CrossDepth(shallow, document_layer=FULL.layer)),
                "exit_distillation": (2.0, ExitDistillation(shallow, bank=before)),
            }
        )


def teacher_of(embeddings: dict[str, torch.Tensor], file: Path) -> TeacherEmbeddings:
    """The embeddings of texts before training, in a file, as a teacher."""
    vectors = torch.stack(list(embeddings.values())).numpy()
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file, vectors)
    return TeacherEmbeddings(list(embeddings), np.load(file, mmap_mode="r"))


def train(
    model: M3BertModel,
    tokenizer: Any,
    pairs: list[Pair],
    embeddings: dict[str, torch.Tensor],
    options: argparse.Namespace,
    compute: ComputeArguments,
) -> None:
    """Fine-tune at all granularities, and save the model in place of the fitted one. `embeddings` are those of the
    texts before training."""
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
        report_to="none",
        seed=options.seed,
        use_cpu=compute.uses_cpu,
        bf16=compute.compute_dtype == "bfloat16",
        fp16=compute.compute_dtype == "float16",
    )
    lengths = [len(ids) for ids in tokenizer([pair.body for pair in pairs]).input_ids]
    dataset = Dataset.from_dict(
        {
            "summary": [pair.summary for pair in pairs],
            "body": [pair.body for pair in pairs],
            "length": [min(length, SHORT_LENGTH) for length in lengths],
        }
    )
    teacher = teacher_of(embeddings, options.output_dir / "training" / "before.npy")
    trainer = DepthsTrainer(model, args, tokenizer, dataset, teacher=teacher)
    trainer.train()
    trainer.save_model(str(options.output_dir / "model"))


def write_index(pairs: list[Pair], vectors: torch.Tensor, folder: Path) -> None:
    """
    Save the one index, of the last layer at full width. Queries at any layer search it, and smaller dims are prefixes.

    Args:
        pairs (`list[Pair]`): The documented objects.
        vectors (`torch.Tensor` of shape `(pairs, width)`): Embeddings of [`documents_of`] them.
        folder (`Path`): Folder of the run.
    """
    save_file({f"layer_{FULL.layer}": vectors.contiguous()}, folder / "index.safetensors")
    with open(folder / "documents.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"name": pair.name, "summary": pair.summary}) + "\n" for pair in pairs)


def ask(folder: Path, questions: list[str], compute: ComputeArguments) -> None:
    """Ask in another process that has the checkpoint and transformers, but not this project."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder.resolve() / "modules")}
    environment.pop("PYTHONPATH", None)
    script = Path(__file__).with_name("ask.py")
    line = [sys.executable, "-I", str(script), str(folder), *questions, f"--device={compute.torch_device}"]
    done = subprocess.run(line, env=environment)
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
    compute = compute_of(options)
    dtype = compute.autocast_dtype
    folder, clock = options.output_dir, Clock()
    folder.mkdir(parents=True, exist_ok=True)
    set_seed(options.seed)
    train_pairs, test_pairs = split_by_module(stdlib_pairs())
    pairs = [*train_pairs, *test_pairs]
    print(f"{len(train_pairs)} pairs to fit and train on, {len(test_pairs)} of other modules held out.")

    convert(base, str(folder / "model"))
    # On a CPU, scaled_dot_product_attention has no fast path with dropout. Elsewhere, too, dropout costs time, and so
    # few steps do not need it.
    no_dropout = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "embedding_dropout": 0.0}
    model = place(AutoModel.from_pretrained(folder / "model", **no_dropout), compute)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    Grid.product([FULL.layer], GRID.dims).validate(model.config)
    with clock.time("encode"):
        states = embed(
            model, tokenizer, sides_of(test_pairs), GRID.layers, MAX_LENGTH, "Encoding the held-out texts", dtype
        )
    scores, tfidf = measure(states, "untouched", asymmetric=False), measure_tfidf(test_pairs)
    with clock.time("fit"):
        embeddings = add_exits(model, tokenizer, train_pairs, dtype)
    scores |= measure(apply_exits(model, states), "exits", asymmetric=True)
    index, to_index = torch.stack([embeddings[text] for text in documents_of(train_pairs)]), test_pairs
    if options.fast:
        model.save_pretrained(folder / "model")
    else:
        with clock.time("train"):
            train(model, tokenizer, train_pairs, embeddings, options, compute)
        with clock.time("encode again"):
            states = embed(
                model, tokenizer, sides_of(test_pairs), GRID.layers, MAX_LENGTH, "Encoding the held-out texts", dtype
            )
        scores |= measure(states, "trained", asymmetric=True)
        index, to_index = index[:0], pairs  # training moved the documents of the fit, too
    with clock.time("index"):
        found = embed(
            model, tokenizer, documents_of(to_index), [FULL.layer], SHORT_LENGTH, "Encoding the library", dtype
        )
        write_index(pairs, torch.cat([index, found[FULL.layer]]), folder)
    encoder = GridEncoder(model, tokenizer, GRID, max_length=MAX_LENGTH, compute_dtype=dtype)
    with clock.time("ONNX export"):
        engines = None if missing_packages() else onnx_engines(encoder, ONNX_LAYERS)
    with clock.time("latency"):
        queries = [pair.summary for pair in test_pairs[:40]]
        latency = measure_latency(encoder, queries, documents=len(pairs), rounds=40, engines=engines)

    settings = {
        "seed": options.seed,
        "compute": {**vars(compute), "device": str(compute.torch_device)},
        "base": options.base or DEFAULT_ENCODER,
        "train_pairs": len(train_pairs),
        "test_pairs": len(test_pairs),
        "steps": 0 if options.fast else options.steps,
    }
    write_results(folder / "results.json", settings, GRID, scores, latency, tfidf, clock)
    table = f"{report(GRID, scores, latency, tfidf)}\n\n{latency_report(GRID, latency)}"
    (folder / "table.md").write_text(table + "\n", encoding="utf-8")
    draw(GRID, scores, tfidf, folder / "recall.png")
    stages = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in clock.seconds.items())
    tqdm.write(
        f"\nRetrieval of {len(test_pairs)} held-out texts, {' / '.join(METRICS.values())} in percent "
        f"({stages}):\n\n{table}\n"
    )
    tqdm.write(
        f"Figure: {folder / 'recall.png'}. Checkpoint: {folder / 'model'}.\n"
        f"Questions at several depths against one index of layer {FULL.layer}, answered in a process that has "
        "transformers but not this project:"
    )
    ask(folder, QUESTIONS, compute)
    where = "" if folder == OUTPUT_DIR else f" --output_dir {folder}"
    tqdm.write(f"\nAsk your own: m3bert quickstart --query '...'{where}")


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--base", help="folder or Hub id of an encoder with 6 layers or more; default: one from PyPI")
    parser.add_argument("--output_dir", type=Path, default=OUTPUT_DIR, help="folder for all results")
    parser.add_argument("--fast", action="store_true", help="stop before the fine-tuning")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps, of {BATCH_SIZE} pairs each")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--query", action="append", help="ask an existing run; can be repeated")
    add_compute_options(parser)
    options = parser.parse_args(arguments)
    if options.query:
        ask(options.output_dir, options.query, compute_of(options))
    else:
        run(options)


if __name__ == "__main__":
    run_command(main)
