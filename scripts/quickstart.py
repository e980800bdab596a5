"""
From a real encoder to an elastic one, in one command: fit its small sizes, measure them, fine-tune them together, and
ask questions.

    m3bert quickstart                                             # takes about 10 minutes on two CPU cores
    m3bert quickstart --fast                                      # without fine-tuning: about 4 minutes
    m3bert quickstart --query "How do I join two paths?"          # ask an existing run

The texts are the documentation of Python's standard library, which is on every machine: the summary line of a
docstring is the query, the text below it the document to find. All results go to one folder.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import ProgressCallback, set_seed

from ..data.stdlib_docs import Pair, split_by_module, stdlib_pairs
from ..encode.device import ComputeArguments
from ..evaluation import TASKS, GridEncoder, exact_search, load_task, measure_latency, run_facts, score_vectors
from ..evaluation.evaluators import Retrieval, Scores
from ..evaluation.results import Latency
from ..hub_cards.figures import draw_curves
from ..hub_cards.tables import latency_report, markdown, percent
from ..modeling.configuration_elastic import Elasticity
from ..modeling.modeling_elastic import make_elastic
from ..models.repository import write_repository
from ..trainers import (
    Composition,
    Contrastive,
    ContrastiveConfig,
    ContrastiveTrainer,
    CrossDepth,
    ExitDistillation,
    Granularity,
    Grid,
    Objective,
    TeacherEmbeddings,
    fit_exits,
)
from ..utils.extras import require_extra
from ..utils.help_texts import option
from .command import parse_options
from .sources import DEFAULT_ENCODER, default_base


DIMS = (32, 64, 128)  # below the full width
MAX_LENGTH = 128  # tokens per held-out text
SHORT_LENGTH = 64  # tokens per text in the fit, in training and in the index
BATCH_SIZE = 64
OUTPUT_DIR, MARK = Path("runs/quickstart"), ".quickstart"
FOUND = 3  # documents that answer a question
QUESTIONS = [
    "how do I delete a directory tree",
    "wrap a paragraph at 70 columns",
    "run a command and get its output",
    "how to time a small snippet of code",
]
STAGES = {"truncated": "first layers alone", "fitted": "fitted", "trained": "fine-tuned"}


@dataclass
class QuickstartArguments:
    """The run."""

    model_name_or_path: str | None = option(
        None, "Folder or Hub id of an encoder. Default: one from PyPI.", aliases=["--model"]
    )
    output_dir: Path = option(OUTPUT_DIR, "Folder for all results.")
    fast: bool = option(False, "Stop before the fine-tuning.")
    steps: int = option(80, f"Training steps, of {BATCH_SIZE} pairs each.")
    seed: int = option(0, "Random seed.")
    query: list[str] = option([], "Questions to an existing run.")


class Steps:
    """Prints and times the steps of a run."""

    def __init__(self, count: int) -> None:
        self.count, self.seconds = count, dict[str, float]()

    @contextmanager
    def __call__(self, title: str, takes: str) -> Iterator[None]:
        print(f"\n[{len(self.seconds) + 1}/{self.count}] {title} ({takes})", flush=True)
        start = time.perf_counter()
        yield
        self.seconds[title] = round(time.perf_counter() - start, 1)


@dataclass(frozen=True)
class Measured:
    """What held-out queries find: stage of the encoder -> granularity -> metrics, and the metrics of baselines."""

    task: Retrieval
    scores: dict[str, dict[Granularity, Scores]] = field(default_factory=dict)
    baselines: dict[str, Scores] = field(default_factory=dict)

    def add(self, stage: str, encoder: GridEncoder, document_layer: int | None = None) -> None:
        """Score every size, with documents at the layer of the queries or at `document_layer`, beside BM25."""
        vectors = {
            name: encoder.encode(texts, description=f"Encoding the {name}") for name, texts in self.task.texts.items()
        }
        self.scores[stage] = score_vectors(self.task, vectors, document_layer)
        if document_layer is None:
            self.baselines["BM25"] = self.task.score_bm25()
            return
        full = encoder.grid.full
        for g in (Granularity(0, full.dim), full):
            sides = {"queries": vectors["queries"].at(g), "documents": vectors["documents"].at(full)}
            self.baselines[f"{in_words(g, encoder.grid)}, {stage} and BM25"] = self.task.score_bm25(sides)


class OnlyBar(ProgressCallback):
    """The progress bar of a training, without its logs."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Silence per-step logs."""


def documents_of(pairs: list[Pair]) -> list[str]:
    """The texts of the index: summaries with their bodies."""
    return [f"{pair.summary} {pair.body}" for pair in pairs]


def training_texts(pairs: list[Pair]) -> list[str]:
    return [*(pair.summary for pair in pairs), *(pair.body for pair in pairs), *documents_of(pairs)]


def load(base: str, compute: ComputeArguments) -> GridEncoder:
    """The encoder, elastic without exits: its token embeddings are the table, and the first third and two thirds of
    its layers the depths. Without dropout: it costs time, and so few steps do not need it."""
    encoder = GridEncoder.from_pretrained(base, compute=compute, max_length=MAX_LENGTH)
    model = make_elastic(encoder.model)
    last, width = model.config.num_hidden_layers, model.config.hidden_size
    depths = [round(last / 3), round(2 * last / 3)]
    model.set_depths(depths=depths, table=model.get_input_embeddings().weight)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return replace(encoder, grid=Grid.product([0, *depths, last], [*(dim for dim in DIMS if dim < width), width]))


def fit(encoder: GridEncoder, pairs: list[Pair]) -> None:
    """Fit the depths of the grid in place, as `m3bert fit` does."""
    fit_exits(
        encoder.model,
        encoder.tokenizer,
        training_texts(pairs),
        depths=encoder.grid.layers[1:-1],
        basis="principal",
        max_length=SHORT_LENGTH,
        compute_dtype=encoder.compute_dtype,
        description="Fitting",
    )
    encoder.model.config.matryoshka_dims = encoder.grid.dims


def train(encoder: GridEncoder, pairs: list[Pair], options: QuickstartArguments, compute: ComputeArguments) -> None:
    """Contrast pairs at every granularity, and queries at every depth with documents at the last layer; shallow layers
    also learn to embed like the last one did before. The model is saved in place of the fitted one."""
    texts, grid = list(dict.fromkeys(training_texts(pairs))), encoder.grid
    at_full = replace(encoder, grid=Grid((grid.full,)), max_length=SHORT_LENGTH)
    vectors = at_full.encode(texts, description="Encoding what to train on").at(grid.full)
    before = TeacherEmbeddings.write(texts, vectors, options.output_dir / "training" / "before.npy")
    args = ContrastiveConfig(
        output_dir=str(options.output_dir / "training"),
        grid=str(grid),
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
    shallow = Grid(tuple(g for g in grid if g.layer != grid.full.layer))
    across = CrossDepth(shallow, document_layer=grid.full.layer)
    distillation = ExitDistillation(shallow, bank=torch.from_numpy(before.vectors))
    parts: dict[str, tuple[float, Objective]] = {"same_depth": (1.0, Contrastive(grid)), "cross_depth": (1.0, across)}
    parts["exit_distillation"] = (2.0, distillation)
    bodies = encoder.tokenizer([pair.body for pair in pairs], truncation=True, max_length=SHORT_LENGTH).input_ids
    rows = [
        {"summary": pair.summary, "body": pair.body, "length": len(ids)}
        for pair, ids in zip(pairs, bodies, strict=True)
    ]
    trainer = ContrastiveTrainer(
        encoder.model, args, encoder.tokenizer, Dataset.from_list(rows), teacher=before, objective=Composition(parts)
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(OnlyBar)
    trainer.train()
    shutil.rmtree(options.output_dir / "model")
    trainer.save_model(str(options.output_dir / "model"))


def write_index(encoder: GridEncoder, pairs: list[Pair], folder: Path) -> None:
    """Save the one index: embeddings `(pairs, width)` of [`documents_of`] pairs at full size."""
    full = encoder.grid.full
    encoder = replace(encoder, grid=Grid((full,)), max_length=SHORT_LENGTH)
    vectors = encoder.encode(documents_of(pairs), description="Encoding the library").at(full)
    save_file({f"layer_{full.layer}": vectors.contiguous()}, folder / "index.safetensors")
    lines = [json.dumps({"name": pair.name, "summary": pair.summary}) + "\n" for pair in pairs]
    (folder / "documents.jsonl").write_text("".join(lines), encoding="utf-8")


def ask(folder: Path, questions: list[str], compute: ComputeArguments) -> None:
    """Print the nearest documents to questions at several depths, which all search the one index."""
    if not (folder / "index.safetensors").is_file():
        raise ValueError(f"{folder} holds no finished run: run `m3bert quickstart` first.")
    documents = [json.loads(line) for line in (folder / "documents.jsonl").read_text(encoding="utf-8").splitlines()]
    (vectors,) = load_file(folder / "index.safetensors").values()
    encoder = GridEncoder.from_pretrained(str(folder / "model"), compute=compute)
    grid = encoder.grid
    encoder = replace(encoder, grid=Grid.product([0, *grid.layers[1:2], grid.full.layer], [grid.full.dim]))
    encoded = encoder.encode(questions)
    ranks = {in_words(g, encoder.grid): exact_search(encoded.at(g), vectors, FOUND) for g in encoder.grid}
    for number, question in enumerate(questions):
        rows = zip(*(rows[number].tolist() for rows in ranks.values()), strict=True)
        names = [[documents[row]["name"] for row in rank] for rank in rows]
        print(f"\n{question}\n\n{markdown(list(ranks), names, words=len(ranks))}")


def in_words(g: Granularity, grid: Grid) -> str:
    some = f"{g.layer} layer{'s' if g.layer > 1 else ''}"
    depth = {0: "table look-up", grid.full.layer: f"all {grid.full.layer} layers"}.get(g.layer, some)
    return depth if g.dim == grid.full.dim else f"{depth}, {g.dim} dims"


def report(folder: Path, facts: dict[str, Any], measured: Measured, grid: Grid, latency: Latency) -> None:
    """Write results, tables and figure, and print the short table under a sentence that says what it shows."""
    scores, bm25 = measured.scores, measured.baselines["BM25"]
    sizes = {
        str(g): {stage: scores[stage][g] for stage in scores}
        | {"ms_per_query": latency.of(g), "bytes_per_vector": 4 * g.dim}
        for g in grid
    }
    results = {**facts, "baselines": measured.baselines, "latency": asdict(latency), "granularities": sizes}
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")

    def row(g: Granularity, *names: str) -> list[str]:
        cells = [" / ".join(percent(scores[stage][g][name]) for name in names) for stage in scores]
        return [in_words(g, grid), *cells, f"{latency.of(g):.1f}"]

    header, full = ["query", *(STAGES[stage] for stage in scores), "ms per query"], grid.full
    rows = [row(g, "recall@10", "mrr@10") for g in grid]
    for name, metrics in measured.baselines.items():
        of_stages = [stage for stage in scores if f" {stage} " in name] or list(scores)
        value = f"{percent(metrics['recall@10'])} / {percent(metrics['mrr@10'])}"
        rows.append([name, *(value if stage in of_stages else "" for stage in scores), ""])
    table = f"Recall@10 / MRR@10 in percent.\n\n{markdown(header, rows)}\n\n{latency_report(latency, grid.layers)}\n"
    (folder / "table.md").write_text(table, encoding="utf-8")
    depths = [Granularity(layer, full.dim) for layer in grid.layers]
    points = [(STAGES[stage], latency.of(g), 100 * scores[stage][g]["recall@10"]) for stage in scores for g in depths]
    panels = {f"Recall@10 at {', '.join(map(str, grid.layers))} layers": points}
    draw_curves(panels, "ms per query", folder / "recall.png", {"BM25": 100 * bm25["recall@10"]})
    short = [row(g, "recall@10") for g in (*depths[:-1], Granularity(full.layer, min(64, full.dim)), full)]
    short.append(["BM25", *[percent(bm25["recall@10"])] * len(scores), ""])
    last_stage = list(scores.values())[-1]
    hits, whole = (100 * last_stage[g]["recall@10"] for g in (depths[0], full))
    print(
        f"\nA table look-up finds {hits:.0f} of 100 at {latency.of(depths[0]):.1f} ms, the full model {whole:.0f} at "
        f"{latency.of(full):.1f} ms.\nRecall@10 in percent of {facts['test_pairs']} held-out queries; documents are "
        f"embedded once, by all layers:\n\n{markdown(header, short)}"
    )


def claim(folder: Path) -> None:
    """Mark a folder as that of a quickstart. ValueError if it holds a model of another command."""
    if folder != OUTPUT_DIR and (folder / "model").exists() and not (folder / MARK).is_file():
        raise ValueError(f"{folder / 'model'} is not of a quickstart: name another --output_dir.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()


def run(options: QuickstartArguments, compute: ComputeArguments) -> None:
    base = options.model_name_or_path or default_base()
    require_extra("matplotlib", "quickstart", "The quickstart")  # before the work, not after it
    logging.getLogger(GridEncoder.__module__).setLevel(logging.ERROR)  # texts are cut on purpose
    folder, step = options.output_dir, Steps(4 if options.fast else 6)
    set_seed(options.seed)
    with step("Read the documentation of Python and an encoder, and measure its first layers", "about 30 s"):
        train_pairs, test_pairs = split_by_module(stdlib_pairs())
        task: Any = load_task(TASKS["stdlib"])  # retrieval, of the test pairs
        measured = Measured(task)
        print(f"{len(train_pairs)} pairs to fit and train on, {len(test_pairs)} of other modules held out.")
        encoder = load(base, compute)
        last = encoder.grid.full.layer
        measured.add("truncated", encoder)
    with step("Fit fewer layers and a look-up table to embed queries like all layers", "about 3 min"):
        fit(encoder, train_pairs)
        shutil.rmtree(folder / "model", ignore_errors=True)
        (folder / "model").mkdir(parents=True)
        write_repository(encoder.model, folder / "model")
    with step("Measure every size on held-out texts", "about 30 s"):
        measured.add("fitted", encoder, last)
    if not options.fast:
        with step(f"Fine-tune all sizes together, {options.steps} steps", "about 5 min"):
            train(encoder, train_pairs, options, compute)
        with step("Measure every size again", "about 30 s"):
            measured.add("trained", encoder, last)
    with step("Embed all documents once, and time a query", "about 30 s"):
        pairs = [*train_pairs, *test_pairs]
        write_index(encoder, pairs, folder)
        latency = measure_latency(encoder, task.texts["queries"][:40], documents=len(pairs), rounds=40)
    facts = {**run_facts(), "seed": options.seed, "base": options.model_name_or_path or DEFAULT_ENCODER}
    facts |= {"seconds": step.seconds, "train_pairs": len(train_pairs), "test_pairs": len(test_pairs)}
    facts |= {"python": sys.version.split()[0], "steps": 0 if options.fast else options.steps}
    facts |= {"compute": {**vars(compute), "device": str(compute.torch_device)}}
    facts |= {"layers": Elasticity.of(encoder.model.config).depths}
    report(folder, facts, measured, encoder.grid, latency)
    print("\nFour questions to one index, by the depth of the query:")
    ask(folder, QUESTIONS, compute)
    where = f" --output_dir {folder}" * (folder != OUTPUT_DIR)
    program = "m3bert" if shutil.which("m3bert") else Path(sys.executable).with_name("m3bert")
    print(
        f"\nPicture: {folder / 'recall.png'}. All sizes: {folder / 'table.md'}. Encoder: {folder / 'model'}.\n\n"
        "Next:\n"
        f'  {program} quickstart --query "How do I join two paths?"{where}\n'
        f"  {program} demo --model {folder / 'model'}    # a page to try every size; needs the extra `demo`\n"
        f"  {program} fit {base} my-encoder --files my-texts.txt    # your texts, one per line"
    )


def main(arguments: list[str]) -> None:
    options, compute = parse_options((QuickstartArguments, ComputeArguments), __doc__, arguments)
    if options.query:
        ask(options.output_dir, options.query, compute)
    else:
        claim(options.output_dir)
        run(options, compute)
