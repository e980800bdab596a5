"""What a person says about a checkpoint, and what stays of the metadata of an existing card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


GENERATED = ("model-index", "tags", "pipeline_tag", "library_name")  # keys whose old values are dropped
# Generated tags. Stale ones are removed; all other tags of an old card stay.
OWN_TAGS = (
    "matryoshka",
    "onnx",
    "sentence-transformers",
    "feature-extraction",
    "generated_from_trainer",
    "text-embeddings-inference",
)


@dataclass(frozen=True)
class Statements:
    """
    What only a person knows about a checkpoint. Anything left out here stays as it is on the existing card.

    Args:
        license (`str`, *optional*): License identifier on the Hub.
        languages (`tuple[str, ...]`, *optional*): Language codes.
        datasets (`tuple[str, ...]`, *optional*): Hub ids of training data, in addition to those on record.
        base_model (`str`, *optional*): Hub id of the base model, in place of the one on record.
        tags (`tuple[str, ...]`, *optional*): Additional tags.
    """

    license: str | None = None
    languages: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    base_model: str | None = None
    tags: tuple[str, ...] = ()


def with_edits(metadata: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """New metadata, with what a person added to the old: keys without a new value, and tags."""
    theirs = {key: value for key, value in old.items() if key not in GENERATED}
    their_tags = [tag for tag in old.get("tags") or [] if tag not in OWN_TAGS]
    return {**theirs, **metadata, "tags": list(dict.fromkeys([*metadata.get("tags", []), *their_tags]))}
