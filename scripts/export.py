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

    m3bert export --format native --model_name_or_path runs/model --granularity 4x64 --output_dir runs/bert-4x64

writes a plain encoder that needs no remote code. `--format static` writes the static table for
sentence-transformers and model2vec, `--format router` queries by this table and documents by all layers as one model.
`m3bert export --format native --help` lists the options of these three.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ..encode.granularity import Granularity
from ..utils.durable import remove_files
from ..utils.help_texts import option
from . import export_native
from .command import EXPORT_FILES, next_step, parse_options, writing_to
from .encoder import EncoderArguments, load_encoder
from .sources import default_base, local_data


FORMATS = ("onnx", "native", "static", "router")


@dataclass
class ExportArguments:
    """The model to export, and the folder to write."""

    format: str = option("onnx", "Format of the export.", choices=[*FORMATS])
    layout: str = option("hub", "Names of the ONNX files, by who reads them.", choices=["hub", "semantic-router"])
    granularity: list[str] = option([], "Granularities to export besides the full size: 2x64 4x64.")
    output_dir: str = option("runs/onnx", "Folder for the files.")
    overwrite: bool = option(False, "Replace an export that output_dir holds.")
    normalize: bool | None = option(None, "L2-normalise the embeddings. Default: as the model was published.")
    int8: bool = option(False, "Also write each granularity with 8-bit weights.")
    fp16: bool = option(False, "Also write each graph in float16.")
    tasks: list[str] = option([], "Tasks to score each graph on. Default: stsb, if it is in the folder M3BERT_DATA.")


def main(arguments: list[str]) -> None:
    formats = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    formats.add_argument("--format")
    if formats.parse_known_args(arguments)[0].format in FORMATS[1:]:
        export_native.main(arguments)
        return
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
        from ..hub_cards.onnx_graphs import QUALITY, graph_table, write_encoder_files, write_graphs
        from ..hub_cards.semantic_router import write_layers

        require_onnx()
        encoder = load_encoder(encoding)
        sizes = list(encoder.grid) if named else []
        if options.layout != "hub":
            layers = write_layers(encoder, sizes, folder, stale=files)
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
        print(f"{folder / QUALITY}:\n\n{graph_table(report)}\n")
    next_step("hf", "upload", "user/model", folder)
