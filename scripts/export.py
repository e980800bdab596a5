"""
Export an encoder for servers that do not run Python code of a checkpoint:

    m3bert export --model_name_or_path runs/model --granularity 2x64 4x64 --output_dir runs/onnx

writes a folder in the layout of the Hub: config, tokenizer, the modules of sentence-transformers, and in `onnx/` the
full size as `model.onnx` and `model_quantized.onnx` (8 bits), the other granularities as `model_2x64.onnx` and
`model_4x64.onnx`, and `quality.json`. Each float32 graph is checked: onnxruntime must give what torch gives. The loss
of quality in 8 bits and in float16 is measured. If --output_dir is the folder of the encoder, only `onnx/` is added.
Prompts are not in the graph: prepend them to the texts. Needs the extra `onnx`.

`--layout semantic-router` writes what the semantic router of vLLM reads, `onnx/layer-4/model.onnx` and the like: each
depth in the space of the last layer, or those of --granularity.

The other formats are models of sentence-transformers that need neither remote code nor this package:

    m3bert export --format native --model_name_or_path runs/model --granularity 4x64 --output_dir runs/bert-4x64
    m3bert export --format static --model_name_or_path runs/model --granularity 0x384 --output_dir runs/static
    m3bert export --format router --model_name_or_path runs/model --granularity 0x384 --output_dir runs/router
    m3bert export --format native --model_name_or_path runs/model --sizes all --output_dir runs/sizes

`native` writes a plain encoder of transformers: an m3BERT becomes a BERT, RoBERTa, XLM-R, ...; any other encoder keeps
its class, and has the layers of the depth. Exit, output dim and projection are a Dense module after the pooling.
`static` writes the static table (layer 0) as a `StaticEmbedding`, which model2vec's `StaticModel` loads, too. `router`
writes a `Router`: `encode_query` reads the static table, or with --granularity 4x384 a plain encoder of four layers,
and `encode_document` the plain encoder of all layers. `--sizes all` writes a folder for each depth below the last that
needs no remote code, such as `4-layers`, and `table`; `--sizes 2 4 table` only these. For ONNX graphs beside one,
`m3bert export --model_name_or_path runs/sizes/4-layers --output_dir runs/sizes/4-layers`.
`m3bert export --format native --help` lists the options of these three.
"""

from __future__ import annotations

import argparse
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from ..encode.granularity import Granularity
from ..models.repository import loading_from
from ..utils.durable import remove_files, replacing_files
from ..utils.help_texts import option
from .command import EXPORT_FILES, SIZE_FOLDERS, next_step, parse_options, writing_to
from .encoder import EncoderArguments, load_encoder
from .sources import default_base, local_data


FORMATS = ("onnx", "native", "static", "router")


@dataclass
class ExportArguments:
    """An export to ONNX."""

    format: str = option("onnx", "Format of the export.", choices=[*FORMATS])
    layout: str = option("hub", "Names of the ONNX files, by who reads them.", choices=["hub", "semantic-router"])
    granularity: list[str] = option([], "Granularities to export besides the full size: 2x64 4x64.")
    output_dir: str = option("runs/onnx", "Folder for the files.")
    overwrite: bool = option(False, "Replace an export that output_dir holds.")
    normalize: bool | None = option(None, "L2-normalise the embeddings. Default: as the model was published.")
    int8: bool = option(False, "Also write each granularity with 8-bit weights.")
    fp16: bool = option(False, "Also write each graph in float16.")
    tasks: list[str] = option([], "Tasks to score each graph on. Default: stsb, if it is in the folder M3BERT_DATA.")


@dataclass
class PlainArguments:
    """An export to a model without remote code."""

    model_name_or_path: str = option(MISSING, "Folder or Hub id of the model.", aliases=["--model"])
    format: str = option(MISSING, "Format of the export.", choices=[*FORMATS[1:]])
    output_dir: str = option("runs/export", "Folder for the model.")
    overwrite: bool = option(False, "Replace an export that output_dir holds.")
    granularity: str | None = option(None, "Size to export: 4x64. Default: the full one; of a router: the table.")
    sizes: list[str] = option([], "With native, a folder for each of these numbers of layers, and table; all: each.")
    revision: str | None = option(None, "Branch, tag or commit on the Hub.")
    trust_remote_code: bool = option(False, "Run code that comes with the model.")
    model_type: str | None = option(None, "With native: bert, roberta, ... Default: as before conversion, else bert.")
    encoder_only: bool = option(False, "With native, leave out a head.")
    dtype: Literal["float32", "float16", "int8"] = option("float32", "Type of the static table.")


def main(arguments: list[str]) -> None:
    formats = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    formats.add_argument("--format")
    is_plain = formats.parse_known_args(arguments)[0].format in FORMATS[1:]
    (export_model if is_plain else export_graphs)(arguments)


def export_graphs(arguments: list[str]) -> None:
    """Export ONNX graphs."""
    encoding, options = parse_options((EncoderArguments, ExportArguments), __doc__, arguments)
    if options.granularity and encoding.grid:
        raise ValueError("Pass either --granularity 2x64 6x384 or --grid 2,6x64,384.")
    for size in options.granularity:
        Granularity.parse(size)
    encoding.device = "cpu"
    named = bool(options.granularity or encoding.grid)
    encoding.grid = encoding.grid or ",".join(options.granularity)
    source, folder = encoding.model_name_or_path or default_base(), Path(options.output_dir)
    in_place = folder.resolve() == Path(source).resolve()
    if options.layout != "hub":
        given = {"int8": options.int8, "fp16": options.fp16, "normalize": options.normalize is not None}
        given |= {"tasks": options.tasks, f"output_dir {folder}, the encoder": in_place}
        if clash := [name for name, value in given.items() if value]:
            raise ValueError(f"--layout {options.layout} cannot be combined with --{clash[0]}.")
    files = ["onnx"] if in_place else EXPORT_FILES
    with writing_to(folder, files, options.overwrite):
        from ..hub_cards.onnx_export import require_onnx
        from ..hub_cards.onnx_graphs import QUALITY, write_encoder_files, write_graphs, write_semantic_router

        require_onnx()
        encoder = load_encoder(encoding)
        sizes = list(encoder.grid) if named else []
        if options.layout != "hub":
            layers = write_semantic_router(encoder, sizes, folder, stale=files)
            print(f"{folder}: layers {', '.join(map(str, layers))} of {source} for the semantic router.")
            return
        remove_files(folder, files)
        if not in_place:
            write_encoder_files(encoder, folder)
        report = write_graphs(
            encoder,
            sizes,
            folder,
            int8=options.int8,
            fp16=options.fp16,
            normalize=options.normalize,
            tasks=options.tasks,
            data=local_data(),
        )
        print(f"{folder / QUALITY}:\n\n{report.table()}\n")
    next_step("hf", "upload", "user/model", folder)


def export_model(arguments: list[str]) -> None:
    """Export a model of sentence-transformers: `--format` native, static or router."""
    (options,) = parse_options((PlainArguments,), __doc__, arguments)
    size = Granularity.parse(options.granularity) if options.granularity else None
    if options.format == "static" and size is not None and size.layer != 0:
        raise ValueError(f"--format static exports layer 0, not {size.layer}: use --format native or router.")
    if options.sizes and (options.format != "native" or size is not None):
        raise ValueError("--sizes needs --format native, and no --granularity.")
    folder, source = Path(options.output_dir), options.model_name_or_path
    files = SIZE_FOLDERS if options.sizes else EXPORT_FILES
    with writing_to(folder, files, options.overwrite, source):
        from huggingface_hub import snapshot_download
        from transformers.utils import logging

        from ..hub_cards.checkpoint import Checkpoint
        from ..hub_cards.exports import choose_sizes, export_sizes

        with loading_from(source):
            local = Path(source).is_dir()
            checkpoint = Checkpoint(Path(source if local else snapshot_download(source, revision=options.revision)))
        code = checkpoint.source_code()
        if code and not options.trust_remote_code:
            names = ", ".join(code.values())
            raise ValueError(f"{source} runs code of its source, {names}: read it, then pass --trust_remote_code.")
        logging.disable_progress_bar()
        parts = choose_sizes(checkpoint, options.sizes) if options.sizes else {"": size}
        first = next(iter(parts))
        last = Path(first, "config.json" if options.format == "native" else "modules.json")
        given = {"dtype": options.dtype, "model_type": options.model_type, "encoder_only": options.encoder_only}
        with replacing_files(folder, last=str(last), stale=files) as draft:
            written = export_sizes(checkpoint, draft, options.format, parts, source, **given)
        for name, what in written.items():
            print(f"{folder / name}: {what} It needs {'the code of its source' if code else 'no remote code'}.")
    late = checkpoint.settings.is_late
    if options.format == "native" and not late:
        next_step(model=folder / first, trust_remote_code=options.trust_remote_code)
    else:
        kind = "MultiVectorEncoder" if late else "SentenceTransformer"
        load = f"from sentence_transformers import {kind}; print({kind}({str(folder / first)!r}))"
        next_step("python", "-c", load)
