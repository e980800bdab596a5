"""The files that the exports of this room have in common: JSON, modules of sentence-transformers, and the README."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ..encode.granularity import Granularity
from ..models.settings import SIMILARITY_FILE, EmbeddingSettings
from .checkpoint import Checkpoint
from .files import CARD
from .tables import render


PLACE = '"user/name"'  # what the code in a README loads: arguments of a class of sentence-transformers


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_modules(folder: Path, kind: str, path: str, settings: EmbeddingSettings, dtype: str | None = None) -> None:
    """Write what `SentenceTransformer` reads first: one module that embeds texts (class and folder), normalisation,
    prompts and similarity. `dtype` is the type of the static table, if there is one."""
    paths = {kind: path, **({"Normalize": "1_Normalize"} if settings.normalize else {})}
    listing = settings.listing(paths)
    if dtype == "int8":  # sentence-transformers 6.0 and 6.1 check this, and earlier versions ignore it
        listing[SIMILARITY_FILE]["requirements"] = {"sentence-transformers": ">=6.2"}
    for name, content in listing.items():
        write_json(folder / name, content)


def write_readme(
    checkpoint: Checkpoint, folder: Path, format: str, size: Granularity, tags: Sequence[str], **facts: Any
) -> None:
    """Write the README of an export: the part of `export.md` for its format, filled in with facts."""
    tags = ["sentence-transformers", "feature-extraction", *tags]
    data = ModelCardData(library_name="sentence-transformers", pipeline_tag="sentence-similarity", tags=tags)
    # sentence-transformers normalises in the type of the table, in which an empty text would become NaN.
    cast = ".float()" if facts.get("dtype") == "float16" else ""
    made = f", {'converted from' if checkpoint.is_m3bert else 'made of'} `{checkpoint.source}`"
    name = f"an elastic encoder{made if checkpoint.source else ''}"
    text = render("export.md", checkpoint=checkpoint, name=name, format=format, size=size, cast=cast, **facts)
    (folder / CARD).write_text(f"---\n{data.to_yaml()}\n---\n\n{text.strip()}\n", encoding="utf-8")
