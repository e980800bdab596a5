"""
Late interaction at every depth: a small `MultiVectorEncoder` from all-MiniLM-L6-v2, and its paths.

    python -m benchmarks.reproduction.late               # train, fit and score
    python -m benchmarks.reproduction.report             # write the table

The encoder is trained here, by the trainer and the loss of sentence-transformers; it is small, and says nothing about
larger ones. Its training pairs are the first sentence of a passage and the rest of it (passages of
benchmarks.reproduction.exits, and those of msmarco-mini, without their queries), summaries and texts of docstrings,
entailed pairs of SNLI, and captions of an image. None is of Cranfield, CISI or NPL.

`m3bert fit` then chooses and refits its paths on the texts of benchmarks.reproduction.paths. Their native exports are
plain folders, which `MultiVectorEncoder` loads: nDCG@10 by MaxSim, 128 tokens per text. Queries are embedded by a
path, and documents by the whole encoder (asymmetric) or by the same path (symmetric, without NPL). The vectors of
documents are stored in float16.

Interrupted, call again to continue.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.reproduction.embedding import FOLDER, MAX_LENGTH
from benchmarks.reproduction.exits import RETRIEVAL_TESTS
from benchmarks.reproduction.fit_texts import PASSAGES, sources
from benchmarks.reproduction.paths import exported, fitted, listed
from benchmarks.reproduction.study import add_run, computed_once, documents_there, finished, tests_there
from benchmarks.reproduction.training_data import Pair, training_pairs
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder, default_base
from m3bert.data.stdlib_docs import module_pairs
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.trainers import Granularity


TOKEN_DIMS, SHORT_PAIRS = 128, 4000
TRAINING: dict[str, Any] = {
    "max_steps": 200,
    "per_device_train_batch_size": 32,
    "learning_rate": 1e-4,
    "warmup_steps": 20,
    "max_length": {"query": 32, "document": 96},
    "seed": 0,
}
TESTS = [*RETRIEVAL_TESTS, "msmarco-mini"]
SENTENCE = re.compile(r"(?<=[.!?])\s+")


def pairs_of(data: Path) -> list[Pair]:
    """The training pairs, in a fixed random order."""
    of_passages = [text for name, texts in sources(data).items() if name in PASSAGES for text in texts]
    of_passages += documents_there("msmarco-mini", data)
    pairs = [(pair.summary, pair.body) for pair in module_pairs()]
    for text in of_passages:
        first, *rest = SENTENCE.split(text, maxsplit=1)
        if rest and len(first.split()) >= 4 and len(rest[0].split()) >= 8:
            pairs.append((first, rest[0]))
    pairs += training_pairs(data)[:SHORT_PAIRS]
    random.Random(0).shuffle(pairs)
    return pairs


def trained(data: Path) -> Path:
    """The folder of the encoder, which is trained once."""
    folder, run = FOLDER / "late-encoder", FOLDER / "late-training"
    if (folder / "modules.json").is_file():
        return folder
    from sentence_transformers import MultiVectorEncoder, MultiVectorEncoderTrainer
    from sentence_transformers.multi_vector_encoder.losses import MultiVectorMultipleNegativesRankingLoss
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sentence_transformers.multi_vector_encoder.training_args import MultiVectorEncoderTrainingArguments
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Transformer

    torch.manual_seed(TRAINING["seed"])
    tokens: Any = {"module_input_name": "token_embeddings"}
    transformer = Transformer(default_base(), max_seq_length=MAX_LENGTH)
    dense = Dense(
        transformer.get_embedding_dimension(),
        TOKEN_DIMS,
        bias=False,
        activation_function=torch.nn.Identity(),
        **tokens,
    )
    model = MultiVectorEncoder(modules=[transformer, dense, MultiVectorMask(), Normalize(**tokens)], device="cpu")
    pairs = pairs_of(data)
    dataset = Dataset.from_dict({"query": [one for one, _ in pairs], "positive": [other for _, other in pairs]})
    saving: Any = {"save_strategy": "steps", "save_steps": 25, "save_total_limit": 1, "logging_steps": 10}
    arguments = MultiVectorEncoderTrainingArguments(
        output_dir=str(run), use_cpu=True, report_to="none", **saving, **TRAINING
    )
    loss = MultiVectorMultipleNegativesRankingLoss(model)
    trainer = MultiVectorEncoderTrainer(model=model, args=arguments, train_dataset=dataset, loss=loss)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(run)) if run.is_dir() else None)
    model.save_pretrained(str(folder))
    return folder


def scored(model: Any, evaluator: Any, queries: Any, documents: list[torch.Tensor]) -> float:
    """nDCG@10 of queries against documents by MaxSim."""
    scores = model.similarity(queries, documents)
    rows = scores.topk(min(100, len(documents)), dim=1).indices.numpy()
    return evaluator.score_ranked(rows)[evaluator.main_metric]


def documents_of(model: Any, depth: int, test: str, texts: Sequence[str]) -> list[torch.Tensor]:
    """Token vectors of documents, which are computed once."""

    def encode() -> list[torch.Tensor]:
        return [vectors.half().clone() for vectors in model.encode_document(list(texts))]

    return [vectors.float() for vectors in computed_once(FOLDER / f"late-{depth}-{test}.pt", encode)]


def score(folders: Mapping[int, Path], tests: Mapping[str, Any], about: dict[str, Any]) -> None:
    """Score the sizes, one after the other; the last one is the whole encoder."""
    from sentence_transformers import MultiVectorEncoder

    last = max(folders)
    if "BM25" not in finished("late"):
        scores = {test: evaluator.score_bm25()[evaluator.main_metric] for test, evaluator in tests.items()}
        add_run("late", "BM25", scores, Granularity(0, TOKEN_DIMS), about)
    models = {depth: MultiVectorEncoder(str(folder), device="cpu") for depth, folder in folders.items()}
    for depth in sorted(folders, reverse=True):
        model, scores = models[depth], {}
        layers = listed(Checkpoint(FOLDER / "paths-late").source_layers(depth))
        if layers in finished("late"):
            continue
        for test, evaluator in tests.items():
            queries, texts = model.encode_query(list(evaluator.texts["queries"])), evaluator.texts["documents"]
            documents = documents_of(models[last], last, test, texts)
            scores[f"{test} asymmetric"] = scored(model, evaluator, queries, documents)
            if depth < last and test != "npl":  # the largest collection
                documents = documents_of(model, depth, test, texts)
                scores[f"{test} symmetric"] = scored(model, evaluator, queries, documents)
        add_run("late", layers, scores, Granularity(depth, TOKEN_DIMS), about)


def main(arguments: list[str]) -> None:
    argument_parser(__doc__).parse_args(arguments)
    data = data_folder()
    source = trained(data)
    checkpoint = Checkpoint(fitted("late", str(source), data))
    spec = Elasticity.of(checkpoint.config)
    folders = {depth: exported(checkpoint, depth, "paths-late") for depth in spec.depths}
    names = ("texts", "sources", "max_length", "paths", "candidates", "retrieval")
    about = {
        "command": "python -m benchmarks.reproduction.late",
        "settings": {"training": TRAINING, "fit": {name: (spec.fit or {}).get(name) for name in names}},
        "seed": "0: the Dense module, and the order of the pairs",
        "metric": "nDCG@10; run -> seed -> test -> granularity of the queries",
    }
    score(folders | {checkpoint.full.layer: source}, tests_there(TESTS, data), about)


if __name__ == "__main__":
    run_command(main)
