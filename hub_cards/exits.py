"""Exits of a checkpoint on its card: how they were fitted, how good they are, and search with fewer layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..modeling.native_m3bert import without_native
from .checkpoint import Checkpoint, sha256_of
from .native_export import state_only
from .tables import markdown


def exit_values(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The template's variables about exits; `None` if the checkpoint has none."""
    spec, below = checkpoint.depths, checkpoint.query_layers
    if not spec.exits:
        return None
    fit = spec.fit if spec.fit and spec.fit.get("layers") else None  # else it only says where the exits are from
    file = checkpoint.folder / "model.safetensors"
    compared = not checkpoint.is_m3bert and file.is_file() and "source_sha256" in (spec.fit or {})
    layers = {depth: source_layers(checkpoint, depth) for depth in spec.exits}
    exact = fit and (fit["target"], fit["basis"]) == ("last layer", "last_layer")
    return {
        "below": below,
        "joint": [depth for depth in spec.table if depth > 0],
        "paths": {depth: ran for depth, ran in layers.items() if ran != [*range(1, depth + 1)]},
        "fit": fit,
        "table": exit_table(checkpoint) if fit else None,
        "index_stays_valid": bool(exact and checkpoint.fitted and below and checkpoint.source),
        "weights_digest": sha256_of(file) if compared else None,
    }


def plain_exports(checkpoint: Checkpoint, query_layer: int | None) -> list[tuple[str, str, str]]:
    """What `m3bert export` can make of an elastic embedding model that runs without remote code: format, further
    options, and what it is. `query_layer` embeds the queries of a router if there is no static table."""
    full, has_table = checkpoint.full, 0 in checkpoint.depths.table
    if not checkpoint.elastic or checkpoint.head != "AutoModel" or checkpoint.quantized:
        return []
    known = not checkpoint.is_m3bert or without_native(checkpoint.config) is None
    native = known and full.layer > 0 and not state_only(checkpoint, full.layer)
    size = "" if has_table else f" --granularity {query_layer}x{full.dim}"
    found = [
        (native, ("native", "", f"all {full.layer} layers")),
        (has_table, ("static", "", "the table look-up")),
        (native and query_layer is not None, ("router", size, "fewer layers for queries")),
    ]
    return [export for possible, export in found if possible] or [("onnx", "", "for onnxruntime")]


def source_layers(checkpoint: Checkpoint, depth: int) -> list[int]:
    """The layers of the source that a depth runs, counted from 1, also where the checkpoint is a size."""
    own = (getattr(checkpoint.config, "elastic", None) or {}).get("source_layers")
    layers = checkpoint.depths.layers_of(depth)
    return [own[layer - 1] for layer in layers] if own else layers


def exit_table(checkpoint: Checkpoint) -> str:
    """One row per fitted exit: penalty, held-out R^2, and mean cosine to the target. The map that a native export has
    in place of an exit that reads the static table has a row of its own."""
    fit, rows = checkpoint.depths.fit or {}, []
    for depth in map(str, checkpoint.depths.exits):
        for name, fits in ((depth, fit["layers"]), (f"{depth}, native export", fit.get("state_only", {}))):
            if (one := fits.get(depth)) is not None:  # the basis of the last layer is no fit
                rows.append([name, f"{one['penalty']:.2g}", f"{one['r_squared']:.3f}", f"{one['cosine']:.3f}"])
    return markdown(["depth", "penalty", "held-out R\u00b2", "mean cosine"], rows)


def in_words(values: Sequence[int]) -> str:
    """Ascending numbers in words: `0 to 6`, `2 and 4`, `0, 2 and 4`."""
    if len(values) > 2 and [*values] == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
