"""What a card says about exits: how they were fitted, how good they are, and search with fewer layers for queries."""

from __future__ import annotations

from typing import Any

from modeling_m3bert.native_m3bert import without_native

from .checkpoint import Checkpoint
from .tables import markdown


BASES = {
    "last_layer": "The basis is that of the target",
    "principal": "The basis is that of the target's principal components, sorted by variance",
}


def exit_values(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """
    The template's variables about exits.

    Args:
        checkpoint ([`Checkpoint`]): The checkpoint in its published form.

    Returns:
        `dict`: values of the template, or `None` if the checkpoint has no exits.
    """
    if not checkpoint.exit_layers:
        return None
    fit, layer = checkpoint.config.exit_fit, query_layer(checkpoint)
    static = checkpoint.config.static_layers
    cheapest = "the static table only" if 0 in static else "the embedding layer only"
    stitches = checkpoint.config.stitches
    joint = [one for one in static if one > 0 and one not in stitches]
    return {
        "below": layers_in_words(checkpoint.query_layers) if checkpoint.query_layers else None,
        "embeddings": 0 in checkpoint.query_layers and 0 not in static,
        "static": 0 in checkpoint.query_layers and 0 in static,
        "router": without_native(checkpoint.config) is None,
        "joint": layers_in_words(joint) if joint else None,
        "stitched": [stitch_in_words(depth, top, depth in static) for depth, top in stitches.items()],
        "query_layer": layer,
        "query_words": cheapest if layer == 0 else f"{layer} of {checkpoint.full.layer} layers",
        "fit": fit,
        "target": target_in_words(fit) if fit else None,
        "basis": BASES[fit["basis"]] if fit else None,
        "sources": sources_in_words(fit["sources"]) if fit else None,
        "table": exit_table(checkpoint) if fit else None,
        "index_stays_valid": index_stays_valid(checkpoint),
    }


def stitch_in_words(depth: int, top: int, reads_table: bool) -> str:
    """Which layers a stitched depth runs."""
    first = f"the first {depth - top}" if depth > top else "none of the first"
    row = " and the token's row of the static table" if reads_table else ""
    return f"Depth {depth} runs {first}, a map of each token's hidden state{row}, and the last {top}."


def exit_table(checkpoint: Checkpoint) -> str:
    """One row per fitted exit of the checkpoint: penalty, held-out R^2, and mean cosine to the target. The map that a
    native export has in place of an exit that reads the static table has a row of its own."""
    fit = checkpoint.config.exit_fit
    fits = {"": fit["layers"], ", native export": fit.get("state_only", {})}
    return markdown(
        ["layer", "penalty", "held-out R\u00b2", "mean cosine"],
        (
            [f"{layer}{kind}", f"{its['penalty']:.2g}", f"{its['r_squared']:.3f}", f"{its['cosine']:.3f}"]
            for layer in checkpoint.exit_layers
            for kind, its_fits in fits.items()
            if (its := its_fits.get(str(layer))) is not None  # the basis of the last layer is no fit
        ),
    )


def query_layer(checkpoint: Checkpoint) -> int | None:
    """The layer for the queries of the examples: the one nearest to a third of the depth; `None` without a choice."""
    third = checkpoint.full.layer / 3
    return min(checkpoint.query_layers, key=lambda layer: (abs(layer - third), layer), default=None)


def target_in_words(fit: dict[str, Any]) -> str:
    """What the exits predict."""
    if fit["target"] == "last layer":
        return "the normalised embedding of the last layer"
    return f"the normalised embedding by `{fit['target']}`"


def sources_in_words(sources: dict[str, int]) -> str | None:
    """The sources of the texts with their sizes; `None` if they have no names."""
    if set(sources) == {"texts"}:
        return None
    return ", ".join(f"`{name}` ({count:,})" for name, count in sources.items())


def index_stays_valid(checkpoint: Checkpoint) -> bool:
    """Whether the vectors at full size are still those of the encoder that the checkpoint was converted from."""
    fit, config = checkpoint.config.exit_fit, checkpoint.config
    unchanged = checkpoint.fitted and bool(checkpoint.query_layers) and config.converted_from is not None
    return unchanged and fit is not None and (fit["target"], fit["basis"]) == ("last layer", "last_layer")


def layers_in_words(layers: list[int]) -> str:
    """`layer 2`, or `layers 0 to 4`."""
    return f"layer{'s' if len(layers) > 1 else ''} {in_words(layers)}"


def in_words(values: list[int]) -> str:
    """Ascending numbers in words: `0 to 6`, `2 and 4`, `0, 2 and 4`."""
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
