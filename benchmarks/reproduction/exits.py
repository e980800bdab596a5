"""
Exits and exit distillation on a real encoder: all-MiniLM-L6-v2 (extra `quickstart`), converted.

    python -m benchmarks.reproduction.exits --fit                      # every variant of the fit, no training
    python -m benchmarks.reproduction.exits --train --seeds 0 1        # exit distillation from the fit
    python -m benchmarks.reproduction.exits --fit --development        # on the development sets
    python -m benchmarks.reproduction.report                           # write the tables

Texts: at most 20,000, none of which is a sentence of an evaluation set: passages of 50 to 110 words (news, Brown, web,
Wikipedia), sentences (news, web), captions, and questions (Banking77). Raw states of all layers are computed once and
kept in runs/exits; an exit commutes with mean pooling, so all variants of the fit read them.

"static" is the fit with a static table, "fitted" the one without, "trained" is exit distillation from "static,
principal" on the short ones of these texts, one of ten longer ones, and 8,000 spans of 3 to 16 words of them, in place
of queries. It keeps its checkpoints: call again to continue.

Tests: STS-B, STS12 to STS16, SICK (Spearman); Cranfield, CISI, NPL (nDCG@10), 128 tokens per text. "NAME asymmetric"
is the same collection with queries at the layer and documents at the last one. Development: the development sets of
STS-B and SICK, and msmarco-mini. Settings were chosen there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer, set_seed

from benchmarks.reproduction.embedding import FOLDER, MAX_LENGTH
from benchmarks.reproduction.fit_texts import (
    COUNTS,
    LONGER_SHARE,
    PASSAGES,
    QUERIES,
    mostly_short,
    short_queries,
    sources,
)
from benchmarks.reproduction.study import Run, add_results, computed_once, main_score, tests_there
from benchmarks.reproduction.training_data import STS_TESTS
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.convert import converted
from m3bert.commands.sources import data_folder, default_base
from m3bert.encode.padded_batches import PassCost, tokenized_chunks
from m3bert.evaluation import GridEncoder, Retrieval
from m3bert.evaluation.evaluators import Evaluator
from m3bert.exits.raw_states import RawStates
from m3bert.modeling import M3BertModel
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.trainers import (
    Granularity,
    Grid,
    TeacherEmbeddings,
    fit_exits,
    truncate,
)


DEPTH, WIDTH = 6, 384
DIMS = [16, 32, 64, 128, 384]
RETRIEVAL_TESTS = ["cranfield", "cisi", "npl"]
TRAINED = Grid.product([0, 1, 2, 4, 6], [32, 64, 128, 384])
TRAINING: dict[str, Any] = {
    "grid": str(TRAINED),
    "max_steps": 600,
    "per_device_train_batch_size": 64,
    "learning_rate": 3e-4,
    "table_learning_rate": 5e-3,
    "warmup_steps": 0.1,
    "max_length": MAX_LENGTH,
    "text_columns": ["text"],
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "length",
    "bf16": True,
    "use_cpu": True,
}
States = dict[int, torch.Tensor]  # layer -> pooled embeddings
Encode = Callable[[list[str]], Mapping[int, torch.Tensor]]


def training_rows(data: Path) -> dict[str, torch.Tensor]:
    """Text to train on -> its raw state at the last layer."""
    texts = sources(data)
    texts["queries"] = short_queries(texts, data)
    states = raw_states(data, "texts") | raw_states(data, "queries")
    vectors = {
        text: vector
        for source, rows in texts.items()
        for text, vector in zip(rows, states[source][DEPTH], strict=True)
    }
    return {text: vectors[text] for text in mostly_short(vectors)}


def evaluators(data: Path, development: bool) -> dict[str, Evaluator]:
    """Name -> evaluator of each test, or of each development set."""
    names = ["stsb-dev", "sick-dev", "msmarco-mini"] if development else [*STS_TESTS, *RETRIEVAL_TESTS]
    return tests_there(names, data)


def encoded(encode: Encode, texts: Sequence[str]) -> States:
    """Layer -> embeddings of the texts; equal texts are encoded once."""
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    return {layer: vectors[[rows[text] for text in texts]] for layer, vectors in encode(list(rows)).items()}


def layers_of(encoder: GridEncoder, texts: list[str]) -> Mapping[int, torch.Tensor]:
    """Layer -> embeddings of the texts, at the layers of the encoder's grid."""
    return encoder.encode(texts).layers


def encode_tests(encode: Encode, tests: Mapping[str, Evaluator]) -> dict[str, dict[str, States]]:
    """Test -> name of its texts -> embeddings."""
    return {
        test: {name: encoded(encode, list(texts)) for name, texts in evaluator.texts.items()}
        for test, evaluator in tests.items()
    }


@torch.no_grad()
def raw_states(data: Path, name: str) -> Any:
    """The raw states of the fit's texts (`texts`), of [`short_queries`] (`queries`) or of tests (`tests`, `retrieval`,
    `development`), computed once."""
    return computed_once(FOLDER / f"{name}.pt", partial(timed_states, data, name))["states"]


def timed_states(data: Path, name: str) -> dict[str, Any]:
    """`states`, as [`raw_states`] gives them, and the `seconds` that they took."""
    model, tokenizer = converted(default_base())
    raw = RawStates(model.eval(), tokenizer, "mean", batch_size=64)

    def encode(texts: list[str]) -> States:
        ids = tokenizer(texts, truncation=True, max_length=MAX_LENGTH)["input_ids"]
        return raw.pooled(ids, range(DEPTH + 1))

    start = time.perf_counter()
    if name in ("texts", "queries"):
        texts = sources(data)
        texts = texts if name == "texts" else {"queries": short_queries(texts, data)}
        states: Any = {source: encoded(encode, rows) for source, rows in texts.items()}
    else:
        tests = evaluators(data, name == "development")
        chosen = RETRIEVAL_TESTS if name == "retrieval" else [*tests]
        states = encode_tests(encode, {test: tests[test] for test in chosen if test in tests})
    seconds = time.perf_counter() - start
    print(f"{name}: encoded in {seconds:.0f} s", flush=True)
    return {"states": states, "seconds": seconds}


def fit(
    data: Path, share: float = 1.0, only: Sequence[str] = tuple(COUNTS), **options: Any
) -> tuple[M3BertModel, Any]:
    """
    The encoder with exits, as [`fit_exits`] fits them, and its tokenizer. Texts are not encoded again: their states
    are those of [`raw_states`]. `share` of each of the named sources is used.
    """
    states, texts = raw_states(data, "texts"), sources(data)
    model, tokenizer = converted(default_base())
    known: dict[tuple[int, ...], tuple[str, int]] = {}
    for source, rows in texts.items():
        every = tokenizer(rows, truncation=True, max_length=MAX_LENGTH)["input_ids"]
        known |= {tuple(ids): (source, row) for row, ids in enumerate(every)}
    encode = RawStates.pooled

    def remembered(raw: RawStates, ids: list[list[int]], layers: Sequence[int], **options: Any) -> States:
        if options or tuple(ids[0]) not in known:  # the vocabulary, and queries after the fit
            return encode(raw, ids, layers, **options)
        places = [known[tuple(tokens)] for tokens in ids]
        return {layer: torch.stack([states[source][layer][row] for source, row in places]) for layer in layers}

    with patch.object(RawStates, "pooled", remembered):
        fit_exits(
            model,
            tokenizer,
            {source: texts[source][: int(share * len(texts[source]))] for source in only if source in texts},
            max_length=MAX_LENGTH,
            cache_dir=FOLDER,
            **options,
        )
    return model.eval(), tokenizer


@torch.no_grad()
def static_vectors(model: M3BertModel, tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """The static states of texts, `(texts, width)`."""
    vectors = torch.zeros(len(texts), WIDTH)
    for rows, inputs in tokenized_chunks(tokenizer, texts, MAX_LENGTH, PassCost.on(model.device)):
        vectors[rows] = model.static_states(**inputs)[:, 0]
    return vectors


def after_exits(
    model: M3BertModel, tokenizer: Any, tests: Mapping[str, Evaluator], states: Mapping[str, Mapping[str, States]]
) -> dict[str, dict[str, States]]:
    """Test -> name of its texts -> layer -> embeddings, from raw pooled states. Layer 0 is the static table."""
    after: dict[str, dict[str, States]] = {}
    for test, evaluator in tests.items():
        after[test] = {}
        for name, layers in states[test].items():
            static = None
            if model.elastic.table is not None:
                static = static_vectors(model, tokenizer, list(evaluator.texts[name]))
            with torch.no_grad():
                after[test][name] = {
                    layer: model.exit_state(layer, vectors, static=static)
                    for layer, vectors in layers.items()
                    if layer or static is not None
                }
    return after


def score(
    tests: Mapping[str, Evaluator], states: Mapping[str, Mapping[str, States]]
) -> dict[str, dict[Granularity, float]]:
    """
    Test -> granularity -> main metric. Retrieval tests also have "NAME asymmetric".

    Args:
        tests (`Mapping[str, Evaluator]`): The tests.
        states (`Mapping`): Test -> name of texts -> layer -> embeddings.
    """
    scores: dict[str, dict[Granularity, float]] = {}
    for test, evaluator in tests.items():
        vectors = states[test]
        layers = next(iter(vectors.values()))
        scores[test] = {}
        for layer in layers:
            sides = {name: states_of[layer] for name, states_of in vectors.items()}
            for dim, values in evaluator.score_layer(sides, DIMS).items():
                scores[test][Granularity(layer, dim)] = values[evaluator.main_metric]
        if isinstance(evaluator, Retrieval):
            asymmetric = scores[f"{test} asymmetric"] = {}
            for layer in layers:
                for dim in DIMS:
                    sides = {
                        "queries": truncate(vectors["queries"][layer], dim),
                        "documents": truncate(vectors["documents"][DEPTH], dim),
                    }
                    asymmetric[Granularity(layer, dim)] = main_score(evaluator, sides)
    return scores


FITS: dict[str, dict[str, Any]] = {
    "static": {},
    "static, principal": {"basis": "principal"},
    "fitted": {"static": False},
    "fitted, principal": {"static": False, "basis": "principal"},
    **{f"static, {share:.1%} of the texts": {"share": share} for share in (0.025, 0.1, 0.4)},
    "static, captions": {"only": ["captions"]},
    "static, news sentences": {"only": ["news"]},
    "static, no short texts": {"only": PASSAGES},
}


def train(data: Path, seed: int, steps: int | None) -> tuple[M3BertModel, Any, dict[str, Any]]:
    """Exit distillation from the fit with the static table, in the principal basis: the model, its tokenizer and the
    seconds that it took, since the last checkpoint if it was interrupted. A model that an earlier run has saved is not
    trained again."""
    parts = ["trained", str(seed), *([] if steps is None else [f"{steps}-steps"])]
    folder = FOLDER / "-".join(parts)
    if folder.is_dir():
        seconds = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
        return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), seconds
    rows = training_rows(data)
    model, tokenizer = fit(data, basis="principal")
    for name in ("embedding_dropout", "hidden_dropout", "attention_dropout"):
        setattr(model.config, name, 0.0)
    with TemporaryDirectory() as draft:
        model.save_pretrained(draft, exact=True)
        model = M3BertModel.from_pretrained(draft)
    # The cache of the teacher: the fit's own pass over the texts, and one over the queries.
    with torch.no_grad():
        vectors = model.exit_state(DEPTH, torch.stack(list(rows.values())))
    teacher = TeacherEmbeddings.write(list(rows), vectors, FOLDER / f"teacher-{seed}.npy")
    dataset = Dataset.from_dict({"text": list(rows), "length": [len(text) for text in rows]})
    set_seed(seed)
    start = time.perf_counter()
    changes = {} if steps is None else {"max_steps": steps}
    Run("exit-distillation", TRAINING | changes).train(
        model, tokenizer, dataset, {"teacher": teacher}, folder.with_name(f"{folder.name}-checkpoints"), seed=seed
    )
    seconds = time.perf_counter() - start
    encoding = torch.load(FOLDER / "texts.pt")["seconds"]
    print(f"seed {seed}: trained in {seconds:.0f} s, texts encoded in {encoding:.0f} s", flush=True)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    taken = {"training": round(seconds), "encoding": round(encoding)}
    (folder / "seconds.json").write_text(json.dumps(taken), encoding="utf-8")
    return model, tokenizer, taken


def about(development: bool, *, trained: bool = False) -> dict[str, Any]:
    """What identifies the study of the fit, or that of the training, which has a file of its own."""
    training = {"training": TRAINING | {"spans": QUERIES, "share of longer": 1 / LONGER_SHARE}}
    return {
        "command": f"python -m benchmarks.reproduction.exits{' --development' if development else ''}",
        "settings": {"texts": COUNTS, **(training if trained else {})},
        "metric": "Spearman correlation (STS), nDCG@10 (retrieval); run -> seed -> test -> granularity",
    }


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--fit", action="store_true", help="score every variant of the fit")
    parser.add_argument("--train", action="store_true", help="train from the fit, and score")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of --train")
    parser.add_argument("--steps", type=int, help="training steps; default: those of the study")
    parser.add_argument("--development", action="store_true", help="score the development sets")
    options = parser.parse_args(arguments)
    data = data_folder()
    name = "development" if options.development else "tests"
    file = "exits_development" if options.development else "exits"
    tests = evaluators(data, options.development)
    if options.fit:
        states = raw_states(data, name)
        add_results(file, {"untouched": {"0": score(tests, states)}}, about(options.development))
        for variant, settings in FITS.items():
            start = time.perf_counter()
            model, tokenizer = fit(data, **settings)
            print(
                f"{variant}: fitted in {time.perf_counter() - start:.0f} s",
                Elasticity.of(model.config).fit,
                flush=True,
            )
            scores = score(tests, after_exits(model, tokenizer, tests, states))
            add_results(file, {variant: {"0": scores}}, about(options.development))
    for seed in options.seeds if options.train else []:
        model, tokenizer, seconds = train(data, seed, options.steps)
        grid = Grid.product(TRAINED.layers, [WIDTH])
        encoder = GridEncoder(model, tokenizer, grid, max_length=MAX_LENGTH)
        label = "trained" if options.steps is None else f"trained, {options.steps} steps"
        scores = score(tests, encode_tests(partial(layers_of, encoder), tests))
        add_results(f"{file}_trained", {label: {str(seed): scores}}, about(options.development, trained=True))
        print(f"{label}, seed {seed}: {seconds}", flush=True)


if __name__ == "__main__":
    run_command(main)
