"""
Export an elastic model without its remote code and without this package:

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
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from ..encode.granularity import Granularity
from ..models.repository import naming
from ..utils.durable import replacing_files
from ..utils.help_texts import option
from .command import EXPORT_FILES, SIZE_FOLDERS, next_step, parse_options, writing_to


@dataclass
class PlainArguments:
    """The model to export, and the folder to write."""

    model_name_or_path: str = option(MISSING, "Folder or Hub id of the model.", aliases=["--model"])
    format: str = option(MISSING, "Format of the export.", choices=["native", "static", "router"])
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
        from ..hub_cards.exports import choose_sizes, export_plain, format_of
        from ..hub_cards.native_export import state_only

        with naming(source):
            local = Path(source).is_dir()
            checkpoint = Checkpoint(Path(source if local else snapshot_download(source, revision=options.revision)))
        code = checkpoint.source_code()
        if code and not options.trust_remote_code:
            names = ", ".join(code.values())
            raise ValueError(f"{source} runs code of its source, {names}: read it, then pass --trust_remote_code.")
        logging.disable_progress_bar()
        parts = choose_sizes(checkpoint, options.sizes) if options.sizes else {"": size}
        first, said = next(iter(parts)), {}
        last = Path(first, "config.json" if options.format == "native" else "modules.json")
        native = {"model_type": options.model_type, "encoder_only": options.encoder_only}
        with replacing_files(folder, last=str(last), stale=files) as draft:
            for name, part in parts.items():
                format = format_of(part) if name and part is not None else options.format
                what = export_plain(checkpoint, draft / name, format, part, dtype=options.dtype, **native)
                said[name] = f"{what} of {source}."
                if format == "native" and state_only(checkpoint, (part or checkpoint.full).layer):
                    said[name] += " Its exit reads the hidden state alone, and no static table: evaluate this folder."
        for name, what in said.items():
            print(f"{folder / name}: {what} It needs {'the code of its source' if code else 'no remote code'}.")
    late = checkpoint.settings.is_late
    if options.format == "native" and not late:
        next_step(model=folder / first, trust_remote_code=options.trust_remote_code)
    else:
        kind = "MultiVectorEncoder" if late else "SentenceTransformer"
        load = f"from sentence_transformers import {kind}; print({kind}({str(folder / first)!r}))"
        next_step("python", "-c", load)
