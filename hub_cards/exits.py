"""What a card says about exits: how they were fitted, how good they are, and search with fewer layers for queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modeling_m3bert.native_m3bert import without_native

from .checkpoint import Checkpoint, sha256_of
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
    spec = checkpoint.depths
    if not spec.exits:
        return None
    fit, depth, below = spec.fit, query_layer(checkpoint), checkpoint.query_layers
    fitted = bool(fit and fit.get("layers"))  # else it says no more than where the exits are from
    joint = [one for one in spec.table if one > 0]
    return {
        "below": depths_in_words(below) if below else None,
        "static": 0 in below,
        "router": not checkpoint.is_m3bert or without_native(checkpoint.config) is None,
        "joint": depths_in_words(joint) if joint else None,
        "paths": [path_in_words(checkpoint, one) for one in spec.exits if is_path(checkpoint, one)],
        "query_layer": depth,
        "query_words": "the static table only" if depth == 0 else f"{depth} of {checkpoint.full.layer} layers",
        "fit": fit if fitted else None,
        "target": target_in_words(fit) if fit and fitted else None,
        "basis": BASES[fit["basis"]] if fit and fitted else None,
        "sources": sources_in_words(fit["sources"]) if fit and fitted else None,
        "table": exit_table(checkpoint) if fitted else None,
        "index_stays_valid": index_stays_valid(checkpoint),
        "weights": weights_in_words(checkpoint),
    }


def source_layers(checkpoint: Checkpoint, depth: int) -> list[int]:
    """The layers of the source that a depth runs, counted from 1, also where the checkpoint is a size."""
    own = (getattr(checkpoint.config, "elastic", None) or {}).get("source_layers")
    layers = checkpoint.depths.layers_of(depth)
    return [own[layer - 1] for layer in layers] if own else layers


def is_path(checkpoint: Checkpoint, depth: int) -> bool:
    """Whether a depth skips layers of the source."""
    return source_layers(checkpoint, depth) != [*range(1, depth + 1)]


def path_in_words(checkpoint: Checkpoint, depth: int) -> str:
    """Which layers the path of a depth runs."""
    return f"Depth {depth} is a path: it runs the layers {in_words(source_layers(checkpoint, depth))}."


def weights_in_words(checkpoint: Checkpoint) -> str | None:
    """Whose weights the file of weights has; `None` if the fit does not say."""
    file = checkpoint.folder / "model.safetensors"
    if checkpoint.is_m3bert or not file.is_file() or "source_sha256" not in (checkpoint.depths.fit or {}):
        return None
    link = f"[{checkpoint.source}](https://huggingface.co/{checkpoint.source})" if checkpoint.source else "its source"
    if checkpoint.has_weights_of_source:
        whose = f"the file of {link}, byte for byte. Without `trust_remote_code`, this repository is that encoder"
    else:
        whose = f"not the file of {link}: its weights were changed"
    return f"`model.safetensors` is {whose}. SHA-256: `{sha256_of(file)}`."


def exit_table(checkpoint: Checkpoint) -> str:
    """One row per fitted exit of the checkpoint: penalty, held-out R^2, and mean cosine to the target. The map that a
    native export has in place of an exit that reads the static table has a row of its own."""
    fit = checkpoint.depths.fit or {}
    fits = {"": fit["layers"], ", native export": fit.get("state_only", {})}
    return markdown(
        ["depth", "penalty", "held-out R\u00b2", "mean cosine"],
        (
            [f"{depth}{kind}", f"{its['penalty']:.2g}", f"{its['r_squared']:.3f}", f"{its['cosine']:.3f}"]
            for depth in checkpoint.depths.exits
            for kind, its_fits in fits.items()
            if (its := its_fits.get(str(depth))) is not None  # the basis of the last layer is no fit
        ),
    )


def query_layer(checkpoint: Checkpoint) -> int | None:
    """The depth for the queries of the examples: the one nearest to a third of all layers; `None` without a choice."""
    third = checkpoint.full.layer / 3
    return min(checkpoint.query_layers, key=lambda layer: (abs(layer - third), layer), default=None)


def target_in_words(fit: Mapping[str, Any]) -> str:
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
    """Whether the vectors at full size are still those of the encoder that the checkpoint was made of."""
    fit = checkpoint.depths.fit or {}
    unchanged = checkpoint.fitted and bool(checkpoint.query_layers) and checkpoint.source is not None
    return unchanged and (fit.get("target"), fit.get("basis")) == ("last layer", "last_layer")


def depths_in_words(depths: Sequence[int]) -> str:
    """`depth 2`, or `depths 0 to 4`."""
    return f"depth{'s' if len(depths) > 1 else ''} {in_words(depths)}"


def in_words(values: Sequence[int]) -> str:
    """Ascending numbers in words: `0 to 6`, `2 and 4`, `0, 2 and 4`."""
    if len(values) > 2 and [*values] == list(range(values[0], values[-1] + 1)):
        return f"{values[0]} to {values[-1]}"
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
