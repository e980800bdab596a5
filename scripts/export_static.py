"""
Export the static table of an elastic model, or both sides of a search, for sentence-transformers:

    m3bert export --format static --model_name_or_path runs/model --dim 384 --output_dir runs/static
    m3bert export --format router --model_name_or_path runs/model --granularity 0x384 --output_dir runs/router

`static` writes layer 0 as a `StaticEmbedding`, which model2vec's `StaticModel` loads, too. `router` writes a `Router`:
`encode_query` reads the static table, or with --granularity 4x384 a plain encoder of four layers, and
`encode_document` the plain encoder of all layers. Neither needs remote code or this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hub_cards.router_export import export_router
from hub_cards.static_export import DTYPES, export_static
from modeling_m3bert.settings_m3bert import MODULES_FILE
from trainers.core.codes import FLOAT
from trainers.core.durable import replacing_files
from trainers.core.granularity import Granularity

from .command import EXPORT_FILES, parse_options, writing_to
from .export_native import checkpoint_of


@dataclass
class StaticArguments:
    """What to export, and where to."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of the model.", "aliases": ["--model"]})
    output_dir: str = field(default="runs/static", metadata={"help": "Folder for the model."})
    overwrite: bool = field(default=False, metadata={"help": "Replace an export that output_dir holds."})
    format: str = field(default="static", metadata={"help": "static or router."})
    granularity: str | None = field(
        default=None, metadata={"help": "What embeds queries: 0x384. Default: layer 0 at all dims."}
    )
    dim: int | None = field(default=None, metadata={"help": "Dims of layer 0: --dim 384 is --granularity 0x384."})
    dtype: str = field(default="float32", metadata={"help": f"Type of the static table: {', '.join(DTYPES)}."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit on the Hub."})
    model_type: str | None = field(
        default=None, metadata={"help": "Model type of the encoders of a router of an m3BERT; see --format native."}
    )


def main(arguments: list[str]) -> None:
    (options,) = parse_options((StaticArguments,), __doc__, arguments)
    if options.granularity and options.dim:
        raise ValueError("Pass either --granularity 0x384 or --dim 384.")
    size = Granularity.parse(options.granularity) if options.granularity else None
    if options.dim:
        size = Granularity(0, options.dim)
    if size is not None and size.code != FLOAT:
        raise ValueError(f"--granularity {size}: exports have no precision; write {size.size}.")
    router = options.format == "router"
    if not router and size is not None and size.layer != 0:
        raise ValueError(f"--format static exports layer 0, not {size.layer}: use --format native or router.")
    if not router and options.model_type:
        raise ValueError("--model_type is for --format router: a static table has none.")
    if router and size is not None and size.layer != 0 and options.dtype != "float32":
        raise ValueError(f"--dtype {options.dtype} is for a static table, and {size} is none.")
    folder, source = Path(options.output_dir), options.model_name_or_path
    with writing_to(folder, EXPORT_FILES, options.overwrite, source):
        checkpoint = checkpoint_of(source, options.revision)
        with replacing_files(folder, last=MODULES_FILE, stale=EXPORT_FILES) as draft:
            if router:
                parts = export_router(checkpoint, draft, size, dtype=options.dtype, model_type=options.model_type)
                said = f"queries {parts[0]}, documents {parts[1]} of {source}."
            else:
                found = export_static(checkpoint, draft, None if size is None else size.dim, dtype=options.dtype)
                said = f"{found} of {source} as StaticEmbedding and StaticModel."
        print(f"{folder}: {said}")
    print("Needs no remote code. To publish it: hf upload user/name", folder)
