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

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.formats import check_files
from ..encode.device import ComputeArguments
from ..models.repository import MODEL_FILES
from ..utils.columns import fields_of
from ..utils.help_texts import option
from .command import check_overwriting, next_step, parse_options


if TYPE_CHECKING:
    from ..exits.plan import FitOptions, Sources
    from ..exits.repository import Embed, Fitted


@dataclass
class ExitArguments:
    """Which depths to fit, and how."""

    depths: list[str] = option(
        [],
        "Depths to fit beside the table: a number of layers (2), or the layers (1,2,11,12 or 1-3,10-12). Default: "
        "about a sixth, a third, a half and two thirds of the layers.",
    )
    overwrite: bool = option(False, "Replace a model that output_dir holds.")
    text_column: str = option("text", "Text column; title+text joins two.")
    basis: str = option(
        "last_layer",
        "last_layer leaves the last layer as it is; principal rotates all embeddings to principal components.",
    )
    no_static: bool = option(False, "Fit no static table: exits read their layer's hidden state alone.")
    cache_dir: str | None = option(
        None, "Folder that keeps finished parts for the next fit. Default: OUTPUT_DIR.fit, until this one is saved."
    )
    teacher: str | None = option(
        None,
        "Folder or Hub id of another encoder, whose embeddings the exits predict.",
        aliases=["--teacher_name_or_path"],
    )
    teacher_cache_dir: str = option("runs/teachers", "Folder for the teacher's embeddings.")
    max_length: int | None = option(None, "Longest text in tokens. Default: the model's limit.")
    batch_size: int = option(64, "Texts of 128 tokens per batch; more short ones.")


@dataclass
class FitArguments:
    """The texts to fit to."""

    files: list[str] = option([], "Texts: .txt, .jsonl, .csv or .parquet files, also gzipped.")
    target_vectors: list[str] = option([], "In place of --files: rows of text and vector of the index to join.")
    vector_column: str = option("vector", "Column with the vectors of --target_vectors.")
    revision: str | None = option(None, "Branch, tag or commit of the source.")
    trust_remote_code: bool = option(False, "Run code that comes with the source.")


def layers_of_depth(text: str) -> list[int]:
    """The layers of one value of `--depths`, counted from 1: `1,2,5,6` or `1-3,10-12`; none for a number of layers,
    as `2`."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ValueError(
            f"--depths {text} is neither a number of layers nor a list of them, such as 1,2,5,6 or 1-3,6."
        )
    if text.isdecimal():
        return []
    layers: list[int] = []
    for part in text.split(","):
        first, last = int(part.partition("-")[0]), int(part.rpartition("-")[2])
        if first > last:
            raise ValueError(f"--depths {text}: {first}-{last} has no layers; write {last}-{first}.")
        layers += range(first, last + 1)
    return layers


def depths_of(options: ExitArguments) -> dict[str, Any]:
    """The depths that the options name, as fields of [`FitOptions`]. ValueError if two have as many layers."""
    depths: dict[int, list[int]] = {}
    for text in options.depths:
        layers = layers_of_depth(text)
        depth = len(layers) or int(text)
        if depths.setdefault(depth, layers) != layers:
            raise ValueError(
                f"--depths {' '.join(options.depths)}: two of them are depth {depth}. A depth has one list of layers."
            )
    if not depths:
        return {}
    prefixes = [depth for depth, layers in depths.items() if layers == [*range(1, depth + 1)]]  # depth 0, too
    others = {depth: layers for depth, layers in depths.items() if depth not in prefixes}
    paths = {depth: layers for depth, layers in others.items() if layers}
    return {"layers": sorted(prefixes), "paths": paths, "depths": sorted({*others} - {*paths})}


def fit_options(options: ExitArguments, **more: Any) -> FitOptions:
    """The options of a fit."""
    from ..exits.plan import FitOptions

    return FitOptions(
        **depths_of(options),
        static=not options.no_static,
        basis=options.basis,
        max_length=options.max_length,
        batch_size=options.batch_size,
        cache_dir=options.cache_dir,
        description="Fitting exits",
        **{"teacher_name": Path(options.teacher or "").name, **more},
    )


def teacher_of(options: ExitArguments, compute: ComputeArguments) -> Embed | None:
    """Embeds texts by the encoder of `--teacher`, if there is one."""
    if options.teacher is None:
        return None
    from ..data.teacher import Teacher

    teacher = Teacher(options.teacher, compute=compute)
    return partial(teacher.embed, cache_dir=options.teacher_cache_dir, description="Teacher")


def report(fitted: Fitted) -> str:
    """The depths of a fit as a table, with a bar for the retrieval that each keeps."""
    from ..modeling.configuration_elastic import Elasticity

    fit, spec = fitted.record, Elasticity.of(fitted.model.base_model.config)
    pooling = "a vector per token" if fit.pooling is None else f"pooling: {fit.pooling}"
    lines = [f"Fitted to {fit.texts:,} texts (target: {fit.target}, basis: {fit.basis}, {pooling}).", ""]
    lines += [f"{'depth':>5}  {'layers':<22} {'exit reads':<20} {'retrieval kept':<22} {'ms per query':>12}"]
    for depth, milliseconds in milliseconds_of(fitted).items():
        share = fit.retrieval.get(depth, 1.0)
        layers = f"1-{depth}" if depth else "the table"
        reads = "table" if depth == 0 else "hidden state, table" if depth in fit.state_only else "hidden state"
        if depth in fit.paths:
            layers = ",".join(map(str, fit.paths[depth].layers))
        if depth not in spec.exits:
            reads = "no exit"
        bar = "█" * round(10 * share)
        lines.append(f"{depth:>5}  {layers:<22} {reads:<20} {bar:<10} {share:>6.1%} {milliseconds:>17.1f}")
    lines += ["", "Retrieval kept: share of nDCG@10. Queries are spans of texts, documents have full depth."]
    if fit.pooling is not None:
        lines += ["Spans are harder than most queries. For your own: m3bert evaluate --retrieval FOLDER."]
    for depth, compared in fit.candidates.items():
        others = ", ".join(f"{name} {share:.1%}" for name, share in compared.items())
        lines.append(f"Compared for depth {depth}, after a quick refit: {others}.")
    if fit.to_target is not None:
        shape = " x ".join(map(str, fit.to_target.shape))
        lines.append(f"Multiply embeddings by elastic/to_target.npy ({shape}): that is the space of the target.")
    return "\n".join(lines)


def milliseconds_of(fitted: Fitted) -> dict[int, float]:
    """Milliseconds to embed one short query at each depth and, last, at full depth."""
    import torch

    from ..evaluation.latency import milliseconds_in_turn

    encoder = fitted.model.base_model
    inputs = fitted.tokenizer("how are the exits of an encoder fitted", return_tensors="pt").to(encoder.device)
    depths = [*(depth for depth in fitted.record.retrieval if depth >= 0), encoder.config.num_hidden_layers]
    with torch.no_grad():
        return milliseconds_in_turn({depth: partial(encoder, **inputs, output_layer=depth) for depth in depths}, 10)


def main(arguments: list[str]) -> None:
    exits, options, compute, place = parse_options(
        (ExitArguments, FitArguments, ComputeArguments),
        __doc__,
        arguments,
        source={"help": "folder or Hub id of an encoder"},
        output_dir={"help": "folder for the elastic encoder"},
    )
    if bool(options.files) == bool(options.target_vectors):
        raise ValueError("A fit needs texts: pass either --files or --target_vectors.")
    if options.target_vectors and exits.teacher:
        raise ValueError("--target_vectors are the vectors of a teacher: pass them or --teacher.")
    check_overwriting(place.output_dir, MODEL_FILES, exits.overwrite, place.source)
    columns = fields_of(exits.text_column) if options.files else [exits.text_column, options.vector_column]
    for file in options.files or options.target_vectors:  # before anything heavy is imported
        check_files([file], columns)
    from ..data.target_vectors import read_target_vectors
    from ..data.text_files import TextFiles
    from ..exits.repository import fit

    target: dict[str, Any] = {}
    sources: Sources | TextFiles
    if options.target_vectors:
        sources, teacher = read_target_vectors(options.target_vectors, exits.text_column, options.vector_column)
        target = {"teacher": teacher, "teacher_name": ", ".join(sources)}
    else:
        sources = TextFiles(options.files, exits.text_column)
    fitted = fit(
        place.source,
        place.output_dir,
        sources,
        fit_options(exits, **target),
        compute=compute,
        embed=teacher_of(exits, compute),
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        overwrite=exits.overwrite,
    )
    print(f"{report(fitted)}\nSaved to {place.output_dir}.")
    if fitted.record.pooling is None:  # evaluations compare one vector per text
        sizes = ("--sizes", "all", "--output_dir", f"{place.output_dir}-sizes")
        next_step("m3bert", "export", "--format", "native", "--model", place.output_dir, *sizes)
    else:
        next_step(model=place.output_dir, trust_remote_code=options.trust_remote_code)
