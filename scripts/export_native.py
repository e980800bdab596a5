"""
Export an elastic model without its remote code and without this package:

    m3bert export --format native --model_name_or_path runs/model --granularity 4x64 --output_dir runs/bert-4x64
    m3bert export --format static --model_name_or_path runs/model --granularity 0x384 --output_dir runs/static
    m3bert export --format router --model_name_or_path runs/model --granularity 0x384 --output_dir runs/router

`native` writes a plain encoder of transformers: an m3BERT becomes a BERT, RoBERTa, XLM-R, ...; any other encoder keeps
its class, and has the layers of the depth. Exit, output dim and projection are a Dense module after the pooling.
`static` writes the static table (layer 0) as a `StaticEmbedding`, which model2vec's `StaticModel` loads, too. `router`
writes a `Router`: `encode_query` reads the static table, or with --granularity 4x384 a plain encoder of four layers,
and `encode_document` the plain encoder of all layers.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from ..encode.durable import replacing_files
from ..encode.granularity import Granularity
from .command import EXPORT_FILES, naming, next_step, option, parse_options, writing_to


@dataclass
class PlainArguments:
    """The model to export, and the folder to write."""

    model_name_or_path: str = option(MISSING, "Folder or Hub id of the model.", aliases=["--model"])
    format: str = option(MISSING, "Format of the export.", choices=["native", "static", "router"])
    output_dir: str = option("runs/export", "Folder for the model.")
    overwrite: bool = option(False, "Replace an export that output_dir holds.")
    granularity: str | None = option(None, "Size to export: 4x64. Default: the full one; of a router: the table.")
    revision: str | None = option(None, "Branch, tag or commit on the Hub.")
    model_type: str | None = option(None, "With native: bert, roberta, ... Default: as before conversion, else bert.")
    encoder_only: bool = option(False, "With native, leave out a head.")
    dtype: Literal["float32", "float16", "int8"] = option("float32", "Type of the static table.")


def main(arguments: list[str]) -> None:
    (options,) = parse_options((PlainArguments,), __doc__, arguments)
    size = Granularity.parse(options.granularity) if options.granularity else None
    if options.format == "static" and size is not None and size.layer != 0:
        raise ValueError(f"--format static exports layer 0, not {size.layer}: use --format native or router.")
    folder, source = Path(options.output_dir), options.model_name_or_path
    with writing_to(folder, EXPORT_FILES, options.overwrite, source):
        from huggingface_hub import snapshot_download
        from transformers.utils import logging

        from ..hub_cards.checkpoint import Checkpoint
        from ..hub_cards.native_export import export_native, state_only
        from ..hub_cards.router_export import export_router
        from ..hub_cards.static_export import export_static
        from ..modeling.settings_m3bert import MODULES_FILE

        with naming(source):
            local = Path(source).is_dir()
            checkpoint = Checkpoint(Path(source if local else snapshot_download(source, revision=options.revision)))
        logging.disable_progress_bar()
        last = "config.json" if options.format == "native" else MODULES_FILE
        with replacing_files(folder, last=last, stale=EXPORT_FILES) as draft:
            if options.format == "native":
                native = export_native(
                    checkpoint, draft, size, model_type=options.model_type, encoder_only=options.encoder_only
                )
                said = f"{native.config.architectures[0]}, {native.full} of {source}."
                if state_only(checkpoint, native.config.num_hidden_layers):
                    said += " Its exit reads the hidden state alone, and no static table: evaluate this folder."
            elif options.format == "static":
                found = export_static(checkpoint, draft, None if size is None else size.dim, dtype=options.dtype)
                said = f"{found} of {source} as StaticEmbedding and StaticModel."
            else:
                queries, documents = export_router(checkpoint, draft, size, dtype=options.dtype)
                said = f"queries {queries}, documents {documents} of {source}."
        print(f"{folder}: {said} It needs no remote code.")
    if options.format == "native":
        next_step(model=folder)
    else:
        load = f"from sentence_transformers import SentenceTransformer; print(SentenceTransformer({str(folder)!r}))"
        next_step("python", "-c", load)
