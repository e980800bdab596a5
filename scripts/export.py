"""
Export an encoder for servers that do not run Python code of a checkpoint:

    m3bert export --model_name_or_path runs/model --granularity 2x64 4x64 --output_dir runs/onnx

writes a folder in the layout of the Hub: config, tokenizer, the modules of sentence-transformers, and in `onnx/` the
full size as `model.onnx` and `model_quantized.onnx` (8 bits), the other granularities as `model_2x64.onnx` and
`model_4x64.onnx`, and `quality.json`. Each float32 graph is checked: onnxruntime must give what torch gives. The loss
of quality in 8 bits and in float16 is measured. If --output_dir is the folder of the encoder, only `onnx/` is added.
Prompts are not in the graph: prepend them to the texts. Needs the extra `onnx`.

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
    files = ["onnx"] if folder.resolve() == Path(source).resolve() else EXPORT_FILES
    with writing_to(folder, files, options.overwrite):
        from ..hub_cards.onnx_export import require_onnx
        from ..hub_cards.onnx_graphs import QUALITY, graph_table, write_encoder_files, write_graphs

        require_onnx()
        encoder = load_encoder(encoding)
        remove_files(folder, files)
        if files is EXPORT_FILES:
            write_encoder_files(encoder, folder)
        report = write_graphs(
            encoder,
            list(encoder.grid) if named else [],
            folder,
            int8=options.int8,
            fp16=options.fp16,
            normalize=options.normalize,
            tasks=options.tasks,
            data=local_data(),
        )
        print(f"{folder / QUALITY}:\n\n{graph_table(report)}\n")
    next_step("hf", "upload", "user/model", folder)
