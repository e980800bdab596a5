"""
Export both sides of search with asymmetric encoders as one repository: a `Router` of sentence-transformers with a
cheap encoder for queries and the full one for documents, in one space and without remote code.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ..encode.granularity import Granularity
from ..models.settings import MODULES_FILE, SIMILARITY_FILE
from .checkpoint import Checkpoint
from .export_files import PLACE, write_json, write_modules, write_readme
from .files import CARD, LICENSES, copy_files
from .native_export import export_native, state_only
from .static_export import export_static


ROUTER_FILE = "router_config.json"


def export_router(
    checkpoint: Checkpoint,
    folder: Path,
    queries: Granularity | None = None,
    *,
    dtype: str = "float32",
    place: str = PLACE,
) -> tuple[Granularity, Granularity]:
    """
    Write a repository that `SentenceTransformer` loads as a `Router`: `encode_query` reads the static table, or the
    native encoder of fewer layers, and `encode_document` and `encode` the native encoder of all layers.

    Args:
        checkpoint ([`Checkpoint`]): A post-norm m3BERT with exits, or an elastic repository of another encoder.
        folder (`Path`): Folder to write.
        queries ([`Granularity`], *optional*): What embeds the queries; its dims are also those of the documents.
            Default: layer 0 at all dims.
        dtype (`str`, *optional*, defaults to `"float32"`): Type of the static table. `similarity` of
            sentence-transformers does not compare float16 with float32; its `.float()` makes both sides float32.
        place (`str`, *optional*): What the code in the README loads, as Python arguments.

    Returns:
        `tuple[Granularity, Granularity]`: what embeds queries and documents.

    Raises:
        ValueError: as [`export_static`] and [`export_native`], or if the layer of the queries has no exit.
    """
    if checkpoint.settings.is_late:
        raise ValueError(f"{checkpoint.folder} is for late interaction, which a Router does not have: use native.")
    queries = queries or Granularity(0, checkpoint.full.dim)
    documents = Granularity(checkpoint.full.layer, queries.dim)
    if queries.layer not in checkpoint.query_layers:
        legal = ", ".join(map(str, checkpoint.query_layers)) or "none; fit exits with `m3bert fit`"
        raise ValueError(
            f"Depth {queries.layer} does not embed queries into the space of depth {documents.layer}; depths that do: "
            f"{legal}."
        )
    if queries.layer == 0:
        export_static(checkpoint, folder / "query", queries.dim, dtype=dtype)
    else:
        export_native(checkpoint, folder / "query", queries, encoder_only=True)
    export_native(checkpoint, folder / "document", documents, encoder_only=True)
    copy_files(checkpoint.folder, folder, *LICENSES)
    routes = {route: take_route(folder, route) for route in ("query", "document")}
    router = {
        "types": {name: kind for modules in routes.values() for name, kind in modules.items()},
        "structure": {route: list(modules) for route, modules in routes.items()},
        "parameters": {"default_route": "document", "allow_empty_key": True},
    }
    write_json(folder / ROUTER_FILE, router)
    write_modules(folder, "Router", "", checkpoint.settings, dtype if queries.layer == 0 else None)
    facts = {"dtype": dtype, "reads_state_only": state_only(checkpoint, queries.layer), "place": place}
    write_readme(checkpoint, folder, "router", queries, ("router", "asymmetric"), **facts)
    return queries, documents


def take_route(folder: Path, route: str) -> dict[str, str]:
    """Turn the folder of a sentence-transformers model, `folder / route`, into modules beside it. Returns folder of
    each module -> its class. Files that belong to the whole model, and code, are left out."""
    staged, types = folder / route, {}
    for module in json.loads((staged / MODULES_FILE).read_text(encoding="utf-8")):
        kind = module["type"].rpartition(".")[2]
        if kind == "Normalize":  # once, after both routes
            continue
        name = f"{route}_{module['idx']}_{kind}"
        types[name] = module["type"]
        if (staged / module["path"]).is_dir() and module["path"] not in ("", "."):  # Normalize has no files
            (staged / module["path"]).rename(folder / name)
    root = folder / next(iter(types))
    root.mkdir()
    for file in staged.iterdir():
        if file.is_file() and file.suffix != ".py" and file.name not in (MODULES_FILE, SIMILARITY_FILE, CARD):
            file.rename(root / file.name)
    shutil.rmtree(staged)
    return types
