"""Exports of a checkpoint that need none of its code, by format; and the sizes that have one, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..encode.granularity import Granularity
from ..modeling.configuration_elastic import legal_layers
from ..utils.typed import read_json
from .checkpoint import Checkpoint
from .export_files import PLACE
from .native_export import export_native, is_plain, state_only
from .router_export import export_router
from .static_export import export_static


TABLE, LAYERS, EVERY = "table", "-layers", "all"


def export_plain(
    checkpoint: Checkpoint,
    folder: Path,
    format: str,
    size: Granularity | None = None,
    *,
    dtype: str = "float32",
    place: str = PLACE,
    **native: Any,
) -> str:
    """Write a checkpoint, or one granularity of it, in a format that needs no remote code: `"native"`, `"static"` or
    `"router"`, where `size` embeds the queries. `native` are arguments of [`export_native`]; `place` is what the code
    in the README loads, as Python arguments. Returns what was written, in words."""
    if format == "router":
        queries, documents = export_router(checkpoint, folder, size, dtype=dtype, place=place)
        return f"queries {queries}, documents {documents}"
    if format == "static":
        return str(export_static(checkpoint, folder, None if size is None else size.dim, dtype=dtype, place=place))
    export_native(checkpoint, folder, size, place=place, **native)
    (architecture,) = read_json(folder / "config.json")["architectures"]
    return f"{architecture}, {size or checkpoint.full}"


def export_sizes(
    checkpoint: Checkpoint,
    folder: Path,
    format: str,
    sizes: Mapping[str, Granularity | None],
    source: str,
    **options: Any,
) -> dict[str, str]:
    """Write the sizes of [`choose_sizes`] in this format, each into a folder of its name, and the table as `"static"`;
    or one size without a name into `folder` itself. `options` are those of [`export_plain`]. Returns name -> what was
    written of the model `source`, in sentences."""
    written = {}
    for name, size in sizes.items():
        kind = "static" if name == TABLE else format
        what = export_plain(checkpoint, folder / name, kind, size, **options)
        written[name] = f"{what} of {source}{' as StaticEmbedding and StaticModel' if kind == 'static' else ''}."
        if kind == "native" and state_only(checkpoint, (size or checkpoint.full).layer):
            written[name] += " Its exit reads the hidden state alone, and no static table: evaluate this folder."
    return written


def plain_sizes(checkpoint: Checkpoint) -> dict[str, Granularity]:
    """The sizes below the full one whose exports give the vectors of the checkpoint, at its dims: `4-layers`, ..., and
    the static table as `table`."""
    depths = [depth for depth in legal_layers(checkpoint.config) if is_plain(checkpoint, depth)]
    named = {f"{depth}{LAYERS}": depth for depth in depths if depth < checkpoint.full.layer}
    if 0 in checkpoint.depths.table and checkpoint.full.layer > 0:
        named[TABLE] = 0
    return {name: Granularity(depth, checkpoint.full.dim) for name, depth in named.items()}


def choose_sizes(checkpoint: Checkpoint, sizes: Sequence[str]) -> dict[str, Granularity]:
    """The sizes of [`plain_sizes`] that a list names: numbers of layers and `table`, or only `all`. ValueError if the
    checkpoint lacks one, or has none."""
    plain = plain_sizes(checkpoint)
    legal = {name.removesuffix(LAYERS): name for name in plain}
    names = [*legal] if [*sizes] == [EVERY] else [size.removesuffix(LAYERS) for size in sizes]
    unknown = [name for name in names if name not in legal]
    if unknown or not legal:
        raise ValueError(
            f"--sizes {' '.join(unknown or sizes)}: {checkpoint.folder} has no such size that runs without its code; "
            f"legal values: {', '.join([*legal, EVERY]) if legal else 'none'}."
        )
    return {legal[name]: plain[legal[name]] for name in dict.fromkeys(names)}
