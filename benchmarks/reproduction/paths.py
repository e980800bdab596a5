"""
Paths: models of fewer layers, which embed into the space of the whole encoder without an exit.

    python -m benchmarks.reproduction.paths minilm                     # all-MiniLM-L6-v2 (extra `quickstart`)
    python -m benchmarks.reproduction.paths e5 --model FOLDER          # multilingual-e5-small, trimmed
    python -m benchmarks.reproduction.paths mpnet --model FOLDER       # all-mpnet-base-v2
    python -m benchmarks.reproduction.paths minilm --candidates        # many lists of layers, not the chosen ones
    python -m benchmarks.reproduction.paths smollm2 --model FOLDER     # SmolLM2-135M-Instruct
    python -m benchmarks.reproduction.report                           # write the tables

`m3bert fit` fits to every fourth of the 20,000 texts of benchmarks.reproduction.exits, and to the 5,000 passages of
msmarco-mini, and mpnet to half of these; none is of Cranfield, CISI or NPL. It chooses the layers of each depth.
Queries are then embedded by the native export of the path, a plain model that sentence-transformers loads without
remote code, and documents by the whole encoder, or by the deepest path: nDCG@10, 128 tokens per text. STS and Tatoeba
are embedded by the deepest path alone. `benchmarks.reproduction.encoders` makes the folders of e5, mpnet and smollm2;
`m3bert trim` makes e5 smaller, with the same vectors. paths_with_exits_*.json hold the results of an earlier form of
paths, with an exit, on other texts.

With `--candidates`, all lists of layers with one gap, and their neighbours, are refitted to the same texts, and moved
to the mean of the whole model where a fit would do so. This tells how far the chosen list is from the best.

smollm2 is a decoder: a path of it is refitted to some of these texts, and others are embedded by the path and by the
whole model, as the mean of the last hidden states. Its score is the share of the ten nearest other texts that stay,
with both sides of the path, and with its queries and texts of the whole model. Interrupted, call again to continue.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.reproduction.embedding import FOLDER, MAX_LENGTH, documents_of, embed
from benchmarks.reproduction.exits import RETRIEVAL_TESTS, STS_TESTS
from benchmarks.reproduction.fit_texts import sources
from benchmarks.reproduction.study import (
    add_run,
    documents_there,
    encoder_parser,
    finished,
    main_score,
    source_of,
    tests_there,
)
from m3bert.commands import fit
from m3bert.commands.command import run_command
from m3bert.commands.sources import data_folder
from m3bert.exits.centred import Centring
from m3bert.exits.layer_lists import candidates_of, neighbours_of
from m3bert.exits.passes import TextPasses
from m3bert.exits.paths import fit_paths
from m3bert.exits.queries import Queries
from m3bert.exits.raw_states import RawStates
from m3bert.exits.solve import AfterLast
from m3bert.exits.tokenized_texts import TokenizedText, TokenizedTexts
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.modeling.modeling_elastic import make_elastic
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Granularity, nested_states, truncate
from m3bert.utils.durable import replacing_files


DEPTHS = {"minilm": [2, 3, 4], "e5": [4, 6, 8], "mpnet": [4, 6, 8], "late": [2, 3, 4]}
SHARE = {"minilm": 4, "e5": 4, "mpnet": 8, "late": 4}  # one text of so many
TESTS = {
    "minilm": [*RETRIEVAL_TESTS, "msmarco-mini"],
    "e5": [*RETRIEVAL_TESTS, "msmarco-mini"],
    "mpnet": RETRIEVAL_TESTS[:2],  # each takes a quarter of an hour
}
SYMMETRIC = {"minilm": [*STS_TESTS], "e5": [*STS_TESTS, "tatoeba-deu", "tatoeba-rus", "tatoeba-cmn"], "mpnet": []}
DECODER_PATH = [*range(1, 16), *range(26, 31)]
AT_ONCE = 6  # lists that are refitted together
CANDIDATE_TEXTS = 500  # of their refits, the chosen list included
DECODER_TEXTS, DECODER_LENGTH = 500, 64  # of the refit, and as many to embed


def about(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What identifies the study of an encoder."""
    return {
        "command": f"python -m benchmarks.reproduction.paths {name}",
        "settings": settings,
        "seed": "none: nothing is drawn",
        "metric": "nDCG@10, or the share of the nearest ten that stay; run -> seed -> test -> granularity",
    }


def listed(layers: Sequence[int]) -> str:
    """A list of layers, as the results file names its run."""
    return ",".join(map(str, layers))


def texts_of(name: str, data: Path) -> dict[str, list[str]]:
    """Source -> its texts, for the fit of an encoder."""
    step = SHARE[name]
    texts = {kind: texts[::step] for kind, texts in sources(data).items()}
    texts["msmarco-mini"] = documents_there("msmarco-mini", data)[:: max(1, step // 4)]
    return {kind: rows for kind, rows in texts.items() if rows}


def fitted(name: str, source: str, data: Path) -> Path:
    """The elastic repository of an encoder, which is fitted once."""
    folder, texts = FOLDER / f"paths-{name}", FOLDER / f"paths-texts-{name}"
    if not (folder / "config.json").is_file():
        texts.mkdir(parents=True, exist_ok=True)
        files = []
        for kind, rows in texts_of(name, data).items():
            files.append(texts / f"{kind.replace(' ', '_')}.jsonl")
            files[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in rows), encoding="utf-8")
        options = ["--max_length", str(MAX_LENGTH), "--depths", *map(str, DEPTHS[name])]
        start = time.perf_counter()
        fit.main([source, str(folder), "--files", *map(str, files), *options])
        (folder / "seconds").write_text(str(round(time.perf_counter() - start)))
    return folder


def exported(checkpoint: Checkpoint, depth: int, name: str) -> Path:
    """The native export of a path, which is written once."""
    folder = FOLDER / f"{name}-{depth}-layers"
    if not (folder / "config.json").is_file():
        with replacing_files(folder) as draft:
            export_native(checkpoint, draft, Granularity(depth, checkpoint.full.dim))
    return folder


def score_encoder(name: str, source: str, folder: Path, data: Path) -> None:
    """Score the whole encoder, the table and the paths of an elastic repository, one after the other."""
    checkpoint = Checkpoint(folder)
    spec, last, width = Elasticity.of(checkpoint.config), checkpoint.full.layer, checkpoint.full.dim
    names = ("texts", "sources", "max_length", "prompts", "paths", "candidates", "retrieval")
    record = {key: (spec.fit or {}).get(key) for key in names}
    record["seconds"] = int((folder / "seconds").read_text())
    tests = tests_there(TESTS[name], data)
    symmetric = tests_there(SYMMETRIC[name], data) if SYMMETRIC[name] else {}
    depths = [depth for depth in sorted(spec.depths) if depth]
    paths = {depth: exported(checkpoint, depth, f"paths-{name}") for depth in depths}
    documents = documents_of(name, Path(source), tests)
    few = {test: evaluator for test, evaluator in tests.items() if test != "npl"}  # the largest collection
    by_path = documents_of(f"{name}-{depths[-1]}", paths[depths[-1]], few)
    runs = {"full": (last, Path(source)), "table": (0, folder)}
    runs |= {listed(spec.depths[depth]): (depth, paths[depth]) for depth in depths}
    for run, (depth, loaded) in runs.items():
        if run in finished(f"paths_{name}"):
            continue
        scores: dict[str, float] = {}
        for test, evaluator in tests.items():
            queries = embed(loaded, "queries", evaluator.texts["queries"], None if depth else 0)
            sides = {"queries": queries, "documents": documents[test]}
            scores[f"{test} asymmetric"] = main_score(evaluator, sides)
            if depth in depths and test in by_path:
                sides = {"queries": queries, "documents": by_path[test]}
                scores[f"{test} documents by {depths[-1]} layers"] = main_score(evaluator, sides)
        for test, evaluator in symmetric.items() if depth in (last, depths[-1]) else ():
            sides = {side: embed(loaded, "queries", texts) for side, texts in evaluator.texts.items()}
            scores[test] = main_score(evaluator, sides)
        add_run(f"paths_{name}", run, scores, Granularity(depth, width), about(name, {"fit": record}))


@torch.no_grad()
def score_candidates(name: str, source: str, data: Path) -> None:
    """Score many lists of layers for each depth, one after the other."""
    model, tokenizer = make_elastic(AutoModel.from_pretrained(source).eval()), AutoTokenizer.from_pretrained(source)
    settings = EmbeddingSettings.of(model) or EmbeddingSettings()
    prompt, prompts = settings.prompts.get("query", ""), list(settings.prompts.values()) or [""]
    last, width = model.config.num_hidden_layers, model.config.hidden_size
    tests = tests_there(TESTS[name], data)
    documents = documents_of(name, Path(source), tests)
    truncated = {"truncation": True, "max_length": MAX_LENGTH}
    ids = {
        test: tokenizer([prompt + text for text in evaluator.texts["queries"]], **truncated)["input_ids"]
        for test, evaluator in tests.items()
    }
    texts = TokenizedTexts(texts_of(name, data), tokenizer, MAX_LENGTH, prompts)
    model.set_depths()
    raw = RawStates(model, tokenizer, settings.pooling, 64)
    splits = [layers for depth in DEPTHS[name] for layers in candidates_of(depth, last)]
    lists = [*dict.fromkeys(each for layers in splits for each in (layers, *neighbours_of(layers)))]
    lists = [layers for layers in lists if listed(layers) not in finished(f"candidates_{name}")]
    passes = TextPasses(raw, texts, None, None)
    groups, spans = passes.sampled(CANDIDATE_TEXTS), passes.spans(prompt, MAX_LENGTH)
    passages = torch.cat(passes.targets(groups, None))
    of_spans = Queries.of(zip(spans, passes.targets(spans, None), strict=True), passages)
    centring = Centring.of(raw, of_spans, AfterLast(None))
    settings_of = {"texts": len(texts), "texts of a refit": CANDIDATE_TEXTS}
    for start in range(0, len(lists), AT_ONCE):
        for path in fit_paths(raw, groups, lists[start : start + AT_ONCE], "Refitting layers"):
            depth, scores = len(path.fit.layers), dict[str, float]()
            path = centring.centred({depth: path})[depth]
            model.set_depths(paths={depth: (path.fit.layers, path.tensors)})
            for test, evaluator in tests.items():
                queries = truncate(raw.pooled(ids[test], [depth])[depth], width, normalize=True)
                sides = {"queries": queries, "documents": documents[test]}
                scores[f"{test} asymmetric"] = main_score(evaluator, sides)
            described = about(f"{name} --candidates", settings_of)
            add_run(f"candidates_{name}", listed(path.fit.layers), scores, Granularity(depth, width), described)
        model.set_depths()


@torch.no_grad()
def score_decoder(source: str, data: Path) -> None:
    """Score the path of the decoder, plain and refitted."""
    model = make_elastic(AutoModel.from_pretrained(source).eval())
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    every = [text for texts in sources(data).values() for text in texts]
    step = max(1, len(every) // (2 * DECODER_TEXTS))  # spread over all sources
    some = every[::step][: 2 * DECODER_TEXTS]
    ids = tokenizer(some, truncation=True, max_length=DECODER_LENGTH)["input_ids"]
    of_refit = [TokenizedText("texts", text, tokens) for text, tokens in zip(some[::2], ids[::2], strict=True)]
    depth, last, width = len(DECODER_PATH), model.config.num_hidden_layers, model.config.hidden_size
    (path,) = fit_paths(RawStates(model, tokenizer, "mean", 64), [of_refit], [DECODER_PATH])
    print(path.fit, flush=True)
    settings: dict[str, Any] = {
        "texts": DECODER_TEXTS,
        "max_length": DECODER_LENGTH,
        "tokens": sum(map(len, ids[::2])),
    }
    settings |= {
        "layers": listed(DECODER_PATH),
        "borrowed": path.fit.borrowed,
        "r_squared": [value and round(value, 4) for value in path.fit.r_squared],
    }
    for run, matrices in (("plain", {}), ("refitted", path.tensors)):
        model.set_depths(paths={depth: (DECODER_PATH, matrices)})
        states: dict[int, list[torch.Tensor]] = {depth: [], last: []}
        for start in range(1, len(ids), 32):
            inputs = tokenizer.pad({"input_ids": ids[start : start + 32 : 2]}, return_tensors="pt")
            pooled = nested_states(model, inputs, [depth, last], exits=False)
            for layer, batches in states.items():
                batches.append(truncate(pooled.pooled(layer, "mean"), width, normalize=True))
        short, whole = (torch.cat(states[layer]) for layer in (depth, last))
        scores = {"nearest ten": nearest_kept(short, short, whole)}
        scores["nearest ten asymmetric"] = nearest_kept(short, whole, whole)
        add_run("paths_smollm2", run, scores, Granularity(depth, width), about("smollm2", settings))


def nearest_kept(queries: torch.Tensor, texts: torch.Tensor, whole: torch.Tensor) -> float:
    """The share of the ten nearest other texts of the whole model that queries find among texts."""
    near, nearest = (
        (side @ other.T).fill_diagonal_(-torch.inf).topk(10).indices
        for side, other in ((queries, texts), (whole, whole))
    )
    return float((near[:, :, None] == nearest[:, None]).any(dim=2).float().mean())


def main(arguments: list[str]) -> None:
    parser = encoder_parser(__doc__, [*TESTS, "smollm2"])
    parser.add_argument("--candidates", action="store_true", help="score many lists of layers")
    options = parser.parse_args(arguments)
    data, source = data_folder(), source_of(options)
    if options.encoder == "smollm2":
        score_decoder(source, data)
    elif options.candidates:
        score_candidates(options.encoder, source, data)
    else:
        score_encoder(options.encoder, source, fitted(options.encoder, source, data), data)


if __name__ == "__main__":
    run_command(main)
