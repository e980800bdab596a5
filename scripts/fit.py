"""
Make an encoder elastic: any encoder of transformers, in its own repository, with its own weights. Chosen depths embed
into the space of the whole model, so that one index serves them all. A fit is a linear solve on unlabelled texts and
needs no training:

    m3bert fit intfloat/multilingual-e5-small runs/elastic --files passages.txt queries.txt

Each file is a source of its own, which helps to choose the penalty. A few thousand texts are enough; take texts like
those that will be searched, and queries like those that will be asked.

A depth is a number of layers. Which ones is chosen by comparison on the texts, unless the layers are listed. Depth 0
is a table look-up:

    m3bert fit SOURCE OUTPUT --files texts.txt --depths 2 1,2,5,6 1-3,10-12

An interrupted fit continues when it is called again.

With `--target_vectors`, the texts are those of an index, with their vectors: the model joins it.

Without `trust_remote_code`, the result is the source: its weights and its other files are copied as they are.
"""

from __future__ import annotations

import json
import re
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..data.formats import check_files, file_name
from ..models.repository import copy_source, naming
from ..utils.columns import fields_of
from ..utils.durable import replacing_files
from .command import MODEL_FILES, add_compute_options, argument_parser, compute_of, next_step, writing_to


if TYPE_CHECKING:
    from ..data.teacher import TeacherEmbeddings
    from ..exits.fit import ExitFit

    TargetVectors = tuple[dict[str, list[str]], TeacherEmbeddings]


def add_exit_options(parser: ArgumentParser) -> None:
    """Add the options of a fit, which `convert` has, too."""
    parser.add_argument(
        "--depths",
        nargs="+",
        metavar="DEPTH",
        help="depths to fit beside the table: a number of layers (2), or the layers (1,2,11,12 or 1-3,10-12); "
        "default: about a sixth, a third, a half and two thirds of the layers",
    )
    parser.add_argument("--exit_layers", type=int, nargs="+", help="depths that run the first layers: 2 is 1-2")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that output_dir holds")
    parser.add_argument(
        "--text_column",
        default="text",
        help="text column; title+text joins two (default: %(default)s)",
    )
    parser.add_argument(
        "--basis",
        default="last_layer",
        help="last_layer leaves the last layer as it is; principal rotates all embeddings to principal components "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--no_static", action="store_true", help="fit no static table: exits read their layer's hidden state alone"
    )
    parser.add_argument(
        "--cache_dir",
        help="folder that keeps finished parts for the next fit; default: OUTPUT_DIR.fit, until this one is saved",
    )
    parser.add_argument(
        "--teacher",
        "--teacher_name_or_path",
        help="folder or Hub id of another encoder, whose embeddings the exits predict",
    )
    parser.add_argument(
        "--teacher_cache_dir",
        default="runs/teachers",
        help="folder for the teacher's embeddings (default: %(default)s)",
    )
    parser.add_argument("--max_length", type=int, help="longest text in tokens; default: the model's limit")
    parser.add_argument(
        "--batch_size",
        type=int,
        default=64,
        help="texts of 128 tokens per batch; more short ones (default: %(default)s)",
    )
    add_compute_options(parser)


def layers_of_depth(text: str, last: int) -> list[int]:
    """The layers of one value of `--depths`, counted from 1: `1,2,5,6` or `1-3,10-12`; none of a number of layers, as
    `2`, of a model with `last` layers."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ValueError(
            f"--depths {text} is neither a number of layers nor a list of them, such as 1,2,5,6 or 1-3,6."
        )
    if text.isdecimal():
        if int(text) >= last:
            raise ValueError(f"--depths {text} must be within 0..{last - 1}: the model has {last} layers.")
        return []
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    if wrong := next((each for each in ends if each[0] > each[-1]), None):
        raise ValueError(f"--depths {text}: {wrong[0]}-{wrong[1]} has no layers; write {wrong[1]}-{wrong[0]}.")
    return [layer for each in ends for layer in range(each[0], each[-1] + 1)]


def depths_of(options: Namespace, last: int) -> dict[str, Any]:
    """The depths that the options ask for, as arguments of [`fit_exits`]. ValueError if two have as many layers."""
    from ..exits.choice import default_depths

    named = {f"--exit_layers {depth}": [*range(1, depth + 1)] for depth in options.exit_layers or ()}
    named |= {text: layers_of_depth(text, last) for text in options.depths or ()}
    chosen: dict[int, list[int]] = {}
    for text, layers in named.items():
        depth = len(layers) or int(text)
        if chosen.setdefault(depth, layers) != layers:
            raise ValueError(
                f"--depths {' '.join(named)}: two of them are depth {depth}. A depth has one list of layers."
            )
    if not chosen:
        chosen = dict.fromkeys(default_depths(last), [])
    prefixes = [depth for depth, layers in chosen.items() if layers == [*range(1, depth + 1)]]  # depth 0, too
    paths = {depth: layers for depth, layers in chosen.items() if layers and depth not in prefixes}
    depths = [depth for depth, layers in chosen.items() if not layers and depth > 0]
    return {"layers": sorted(prefixes), "paths": paths, "depths": depths}


def streams_of(files: Sequence[str], *columns: str) -> dict[str, Any]:
    """The rows of some files, each as a stream with these columns. A missing one is found before a model is loaded."""
    fields = [field for column in columns for field in fields_of(column)]
    for file in files:
        check_files([file], fields)
    from ..data.dataset_checks import require_columns
    from ..data.files import load_files

    streams = {file: load_files([file], streaming=True) for file in files}
    for file, stream in streams.items():
        require_columns(stream, fields, file)
    return streams


def texts_in(rows: Iterable[Mapping[str, Any]], column: str, tokenizer: Any) -> Iterator[str]:
    """The texts of rows in a text column, as an encoder with this tokenizer reads them; a missing one is empty."""
    from ..data.collators import joined_texts, separator_for

    separator = separator_for([column], tokenizer)
    whole = ({name: value or "" for name, value in row.items()} for row in rows)
    return joined_texts(whole, column, separator)


def fit_to_files(
    model: Any, tokenizer: Any, datasets: Mapping[str, Any], options: Namespace, targets: TargetVectors | None = None
) -> ExitFit:
    """Fit the depths of an encoder, in place, to the texts of [`streams_of`] files, or to `targets` in their place,
    with the options of [`add_exit_options`]."""
    from ..data.teacher import Teacher
    from ..encode.device import place
    from ..exits.fit import fit_exits

    texts_of = partial(texts_in, column=options.text_column, tokenizer=tokenizer)
    compute, kept = compute_of(options), model.dtype
    named: Any = {}
    for file, dataset in datasets.items():
        name = file_name(file)
        named[file if name in named else name] = texts_of(dataset)
    sources, teacher = targets or (named, None)
    name = ", ".join(sources) if options.teacher is None else Path(options.teacher).name
    if options.teacher is not None:
        every = (text for dataset in datasets.values() for text in texts_of(dataset) if text.strip())
        loaded = Teacher(options.teacher, compute=compute)
        teacher = loaded.embed(every, options.teacher_cache_dir, description="Teacher")
    fit = fit_exits(
        place(model, compute),
        tokenizer,
        sources,
        **depths_of(options, model.config.num_hidden_layers),
        static=not options.no_static,
        basis=options.basis,
        teacher=teacher,
        teacher_name=name,
        max_length=options.max_length,
        batch_size=options.batch_size,
        compute_dtype=compute.autocast_dtype,
        cache_dir=options.cache_dir or unfinished(options.output_dir),
        description="Fitting exits",
    )
    if model.dtype != kept:
        model.to(kept)
    return fit


def unfinished(output_dir: str) -> Path:
    """The folder of the finished parts of a fit until it is saved."""
    return Path(output_dir.rstrip("/") + ".fit")


def save_with_exits(model: Any, tokenizer: Any, options: Namespace, fit: ExitFit) -> None:
    """Save a fitted m3BERT with its tokenizer and the settings of its source."""
    with replacing_files(Path(options.output_dir), stale=MODEL_FILES if options.overwrite else ()) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        write_map(fit, draft)


def write_map(fit: ExitFit, folder: Path) -> None:
    """Write the map from the model's space to that of its target, if there is one."""
    import numpy as np

    if fit.to_target is not None:
        np.save(folder / "elastic" / "to_target.npy", fit.to_target.numpy())


def write_repository(model: Any, source: str, folder: Path, revision: str | None = None) -> None:
    """Write the elastic repository of a fitted encoder: its source, and beside it the depths and the code that runs
    them."""
    from ..hub_cards.checkpoint import sha256_of
    from ..modeling.files_elastic import describe, write_parts
    from ..models.settings import hub_id

    encoder = model.base_model
    copy_source(source, folder, revision)
    digests = {file.name: sha256_of(file) for file in sorted(folder.glob("model*.safetensors"))}
    fit = {**encoder.config.elastic["fit"], **({} if hub_id(source) is None else {"source": source})}
    fit["source_sha256"] = digests.get("model.safetensors") or digests
    write_parts(
        folder, {name.replace("table.weight", "table"): its for name, its in encoder.elastic.state_dict().items()}
    )
    file = folder / "config.json"
    values = json.loads(file.read_text("utf-8"))
    own_code = {name: its for name, its in values.get("auto_map", {}).items() if "modeling_elastic" not in its}
    values["elastic"] = {**encoder.config.elastic, "fit": fit, **({"source_auto_map": own_code} if own_code else {})}
    values.pop("output_dim", None)
    if getattr(encoder.config, "output_dim", None) is not None:  # the target is narrower than the model
        values["output_dim"] = encoder.config.output_dim
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    describe(folder, native=True)


def report(fit: ExitFit, model: Any, tokenizer: Any) -> str:
    """The depths of a fit as a table, with a bar for the retrieval that each keeps."""
    times = milliseconds_of(model.base_model, tokenizer, [depth for depth in fit.retrieval if depth >= 0])
    lines = [f"Fitted to {fit.texts:,} texts (target: {fit.target}, basis: {fit.basis}, pooling: {fit.pooling}).", ""]
    lines += [f"{'depth':>5}  {'layers':<22} {'exit reads':<20} {'retrieval kept':<22} {'ms per query':>12}"]
    for depth, milliseconds in times.items():
        kept = fit.retrieval.get(depth, 1.0)
        layers = f"1-{depth}" if depth else "the table"
        reads = "table" if depth == 0 else "hidden state, table" if depth in fit.state_only else "hidden state"
        if depth in fit.paths:
            layers = ",".join(map(str, fit.paths[depth].layers))
        if depth not in fit.layers:
            reads = "no exit"
        bar = "█" * round(10 * kept)
        lines.append(f"{depth:>5}  {layers:<22} {reads:<20} {bar:<10} {kept:>6.1%} {milliseconds:>17.1f}")
    lines += ["", "Retrieval kept: share of nDCG@10. Queries are spans of texts, documents have full depth."]
    lines += ["Spans are harder than most queries. For your own: m3bert evaluate --retrieval FOLDER."]
    for depth, compared in fit.candidates.items():
        others = ", ".join(f"{name} {share:.1%}" for name, share in compared.items())
        lines.append(f"Compared for depth {depth}, after a quick refit: {others}.")
    if fit.to_target is not None:
        shape = " x ".join(map(str, fit.to_target.shape))
        lines.append(f"Multiply embeddings by elastic/to_target.npy ({shape}): that is the space of the target.")
    return "\n".join(lines)


def milliseconds_of(encoder: Any, tokenizer: Any, depths: Sequence[int]) -> dict[int, float]:
    """Milliseconds of the embedding of one short query at each depth and, last, at full depth: the median of ten runs,
    in turn."""
    import torch

    from ..evaluation.latency import times_in_turn

    inputs = tokenizer("how are the exits of an encoder fitted", return_tensors="pt").to(encoder.device)
    every = [*depths, encoder.config.num_hidden_layers]
    with torch.no_grad():
        seconds = times_in_turn({depth: partial(encoder, **inputs, output_layer=depth) for depth in every}, 10)
    return {depth: 1000 * median(its) for depth, its in seconds.items()}


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", help="folder or Hub id of an encoder")
    parser.add_argument("output_dir", help="folder for the elastic encoder")
    texts = parser.add_mutually_exclusive_group(required=True)
    texts.add_argument("--files", nargs="+", help=".txt, .jsonl, .csv or .parquet files, also gzipped")
    texts.add_argument("--target_vectors", nargs="+", help="files with rows of text and vector: the index to join")
    parser.add_argument(
        "--vector_column", default="vector", help="column with the vectors of --target_vectors (default: %(default)s)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of the source")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the source")
    add_exit_options(parser)
    options = parser.parse_args(arguments)
    compute_of(options)  # refuses what is not there before the model is loaded
    if options.target_vectors and options.teacher:
        raise ValueError("--target_vectors are the vectors of a teacher: pass them or --teacher.")

    source, loading = options.source, {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    with writing_to(options.output_dir, MODEL_FILES, options.overwrite, source):
        datasets = streams_of(options.files or (), options.text_column)
        for file in options.target_vectors or ():
            check_files([file], (options.text_column, options.vector_column))
        from transformers import AutoModel

        from ..data.target_vectors import read_target_vectors
        from ..modeling.files_elastic import Source
        from ..models.settings import EmbeddingSettings, load_tokenizer, safetensors_only

        targets = None
        if options.target_vectors:
            targets = read_target_vectors(options.target_vectors, options.text_column, options.vector_column)
        with naming(source):
            origin = Source.at(source, loading).with_settings()
            settings = EmbeddingSettings.of_source(origin)  # refuses what exits cannot be fitted to
            model = AutoModel.from_pretrained(source, **safetensors_only(source), **origin.options)
            model.loaded_from = origin
            tokenizer = load_tokenizer(origin, settings)
        fit = fit_to_files(model, tokenizer, datasets, options, targets)
        if model.config.model_type == "m3bert":
            save_with_exits(model, tokenizer, options, fit)
        else:
            with replacing_files(Path(options.output_dir), stale=MODEL_FILES if options.overwrite else ()) as draft:
                write_repository(model, source, draft, origin.revision)
                write_map(fit, draft)
    shutil.rmtree(unfinished(options.output_dir), ignore_errors=True)
    print(f"{report(fit, model, tokenizer)}\nSaved to {options.output_dir}.")
    next_step(model=options.output_dir, trust_remote_code=options.trust_remote_code)
