"""The sizes of an elastic checkpoint that need none of its code, by the names of their folders and branches."""

from __future__ import annotations

from collections.abc import Sequence

from ..encode.granularity import Granularity
from ..modeling.configuration_elastic import legal_layers
from .checkpoint import Checkpoint
from .native_export import is_plain


TABLE, LAYERS, EVERY = "table", "-layers", "all"


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
