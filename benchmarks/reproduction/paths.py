"""
Paths: few layers that end in the last ones, fitted without training, as native models and with the static table.

    python -m benchmarks.reproduction.paths minilm                       # all-MiniLM-L6-v2 (extra `quickstart`)
    python -m benchmarks.reproduction.paths e5 --model FOLDER                    # multilingual-e5-small
    python -m benchmarks.reproduction.paths e5 --model FOLDER --fitted FOLDER    # with its elastic repository
    python -m benchmarks.reproduction.paths smollm2 --model FOLDER               # SmolLM2-135M-Instruct
    python -m benchmarks.reproduction.report                               # write the tables

`m3bert fit` fits minilm and e5 to the 20,000 texts of benchmarks.reproduction.exits, none of which is of a test. A
query is then embedded by the path and the documents by the whole encoder (nDCG@10, 128 tokens per text). "native" is
the native export of the path, a smaller model of the same class with a Dense module, which sentence-transformers loads
without remote code; "table" is the elastic model, whose exits also read the static table.
`python -m benchmarks.reproduction.encoders` writes the folders of e5 and smollm2.

smollm2 is a decoder: a path of it is refitted to some of these texts, and others are embedded by the path and by the
whole model, as the mean of the last hidden states. Its score is the share of the ten nearest other texts that stay,
with both sides of the path, and with its queries and texts of the whole model. Interrupted, call again to continue.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.reproduction.exits import FOLDER, MAX_LENGTH, RESULTS, RETRIEVAL_TESTS, sources
from benchmarks.reproduction.study import add_results, development_tasks
from m3bert.commands import fit
from m3bert.commands.command import run_command
from m3bert.commands.sources import data_folder, default_base
from m3bert.encode.tokenized_texts import TokenizedText
from m3bert.evaluation.readers import load_task
from m3bert.exits.passes import RawStates
from m3bert.exits.paths import fit_paths
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.modeling.modeling_elastic import Elasticity, make_elastic
from m3bert.trainers import Granularity, nested_states, truncate


PATHS = {"minilm": ["1,6", "1,2,6", "1,2,5,6"], "e5": ["1,2,11,12", "1-3,10-12"]}
TESTS = {"minilm": [*RETRIEVAL_TESTS, "msmarco-mini"], "e5": ["cranfield", "cisi"]}  # NPL takes e5 half an hour
DECODER_PATH = [*range(1, 16), *range(26, 31)]
DECODER_TEXTS, DECODER_LENGTH = 500, 64  # of the refit, and as many to embed


def about(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What identifies the study of an encoder."""
    return {
        "command": f"python -m benchmarks.reproduction.paths {name}",
        "settings": settings,
        "seed": "none: nothing is drawn",
        "metric": "nDCG@10, or the share of the nearest ten that stay; run -> seed -> test -> granularity",
    }


def finished(name: str) -> set[str]:
    """The runs of an encoder that have scores."""
    file = RESULTS / f"paths_{name}.json"
    return {*json.loads(file.read_text(encoding="utf-8"))["scores"]} if file.is_file() else set()


def fitted(name: str, source: str, data: Path) -> Path:
    """The elastic repository of an encoder, which is fitted once."""
    folder, texts = FOLDER / f"paths-{name}", FOLDER / "paths-texts"
    if not folder.is_dir():
        texts.mkdir(parents=True, exist_ok=True)
        files = []
        for kind, its in sources(data).items():
            files.append(texts / f"{kind.replace(' ', '_')}.jsonl")
            files[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in its), encoding="utf-8")
        options = ["--max_length", str(MAX_LENGTH), "--cache_dir", str(FOLDER)]
        fit.main([source, str(folder), "--files", *map(str, files), "--depths", *PATHS[name], *options])
    return folder


def embed(folder: Path, side: str, texts: Sequence[str], depth: int | None = None) -> torch.Tensor:
    """Normalised embeddings of a folder by sentence-transformers; with remote code at a `depth`, without if there is
    none."""
    from sentence_transformers import SentenceTransformer

    elastic: Any = {} if depth is None else {"trust_remote_code": True, "model_kwargs": {"output_layer": depth}}
    model = SentenceTransformer(str(folder), device="cpu", **elastic)
    model.max_seq_length = MAX_LENGTH
    encode = model.encode_query if side == "queries" else model.encode_document
    return encode(list(texts), convert_to_tensor=True, normalize_embeddings=True).float()


def score_encoder(name: str, source: str, folder: Path, data: Path) -> None:
    """Score the whole encoder, the table and the paths of an elastic repository, one after the other."""
    config = Checkpoint(folder).config
    spec, width, last = Elasticity.of(config), config.hidden_size, config.num_hidden_layers
    record = {key: (spec.fit or {}).get(key) for key in ("texts", "sources", "max_length", "prompts", "paths")}
    tests = {task.name: load_task(task, data) for task in development_tasks(TESTS[name])}
    documents = {}
    for test, evaluator in tests.items():
        file = FOLDER / f"paths-{name}-{test}.pt"
        if not file.is_file():
            torch.save(embed(Path(source), "documents", list(evaluator.texts["documents"])), file)
        documents[test] = torch.load(file)
    native = FOLDER / f"paths-{name}-native"
    runs = {"full": (last, Path(source), None), "table": (0, folder, 0)}
    for depth, layers in spec.depths.items():
        if depth:
            path = ",".join(map(str, layers))
            runs |= {f"{path}, native": (depth, native, None), f"{path}, table": (depth, folder, depth)}
    for run, (depth, loaded, at) in runs.items():
        if run in finished(name):
            continue
        if loaded == native:
            shutil.rmtree(native, ignore_errors=True)
            export_native(Checkpoint(folder), native, Granularity(depth, width))
        scores = {}
        for test, evaluator in tests.items():
            sides = {"queries": embed(loaded, "queries", list(evaluator.texts["queries"]), at)}
            value = evaluator.score({**sides, "documents": documents[test]})[evaluator.main_metric]
            scores[f"{test} asymmetric"] = {Granularity(depth, width): value}
        add_results(RESULTS / f"paths_{name}.json", {run: {"0": scores}}, about(name, {"fit": record}))
        print(run, {test: round(100 * next(iter(its.values())), 1) for test, its in scores.items()}, flush=True)


@torch.no_grad()
def score_decoder(source: str, data: Path) -> None:
    """Score the path of the decoder, plain and refitted."""
    model = make_elastic(AutoModel.from_pretrained(source).eval())
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    every = [text for its in sources(data).values() for text in its]
    step = len(every) // (2 * DECODER_TEXTS)  # spread over all sources
    some = every[::step][: 2 * DECODER_TEXTS]
    ids = tokenizer(some, truncation=True, max_length=DECODER_LENGTH)["input_ids"]
    of_refit = [TokenizedText("texts", text, its) for text, its in zip(some[::2], ids[::2], strict=True)]
    depth, last, width = len(DECODER_PATH), model.config.num_hidden_layers, model.config.hidden_size
    raw, found = RawStates(model, tokenizer, "mean", 64), {}
    ((path, tensors),) = fit_paths(raw, [of_refit], [DECODER_PATH])
    print(path, flush=True)
    settings: dict[str, Any] = {
        "texts": DECODER_TEXTS,
        "max_length": DECODER_LENGTH,
        "tokens": sum(map(len, ids[::2])),
    }
    settings |= {
        "layers": ",".join(map(str, DECODER_PATH)),
        "kinds": path.kinds,
        "r_squared": [round(its, 4) for its in path.r_squared],
    }
    for run, matrices in (("plain", {}), ("refitted", tensors)):
        model.set_depths(paths={depth: (DECODER_PATH, matrices)})
        states: dict[int, list[torch.Tensor]] = {depth: [], last: []}
        for start in range(1, len(ids), 32):
            inputs = tokenizer.pad({"input_ids": ids[start : start + 32 : 2]}, return_tensors="pt")
            pooled = nested_states(model, inputs, [depth, last], exits=False)
            for layer, its in states.items():
                its.append(truncate(pooled.pooled(layer, "mean"), width, normalize=True))
        short, whole = (torch.cat(states[layer]) for layer in (depth, last))
        found[run] = {"0": {
            "nearest ten": {Granularity(depth, width): kept(short, short, whole)},
            "nearest ten asymmetric": {Granularity(depth, width): kept(short, whole, whole)},
        }}  # fmt: skip
        print(run, found[run], flush=True)
    add_results(RESULTS / "paths_smollm2.json", found, about("smollm2", settings))


def kept(queries: torch.Tensor, texts: torch.Tensor, whole: torch.Tensor) -> float:
    """The share of the ten nearest other texts of the whole model that queries find among texts."""
    near = [
        (its @ other.T).fill_diagonal_(-torch.inf).topk(10).indices
        for its, other in ((queries, texts), (whole, whole))
    ]
    return float((near[0][:, :, None] == near[1][:, None]).any(dim=2).float().mean())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", choices=[*PATHS, "smollm2"], help="the encoder")
    parser.add_argument("--model", help="its folder; minilm has a package")
    parser.add_argument("--fitted", type=Path, help="its elastic repository, to score and not to fit")
    options = parser.parse_args(arguments)
    if options.model is None and options.encoder != "minilm":
        raise ValueError(f"{options.encoder} needs --model, the folder of the encoder.")
    data, source = data_folder(), options.model or default_base()
    if options.encoder == "smollm2":
        score_decoder(source, data)
    else:
        score_encoder(options.encoder, source, options.fitted or fitted(options.encoder, source, data), data)


if __name__ == "__main__":
    run_command(main)
