"""
Search an index of `m3bert index`:

    m3bert search runs/index "How do I remove a folder?"
    m3bert search runs/index "How do I remove a folder?" --top_k 3 --where module=shutil
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import index as indexes
from ..utils.help_texts import option
from .command import parse_options
from .encoder import EncoderArguments
from .index import encoder_of


WIDTH = 110  # characters of a text that are printed


@dataclass
class SearchArguments:
    """The question."""

    top_k: int = option(10, "Number of documents to find.")
    where: list[str] = option([], "Only documents with this metadata: column=value. Of two values, either.")


def filters(texts: Sequence[str], columns: Mapping[str, str]) -> dict[str, list[Any]]:
    """Filters as `column=value`, as column -> values; those of columns that are not text are read as JSON. ValueError
    if a filter has another form."""
    values: dict[str, list[Any]] = {}
    for text in texts:
        column, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--where {text}: write column=value.")
        parsed: Any = value
        if columns.get(column) != "text":
            with suppress(ValueError):  # the index refuses what is no JSON
                parsed = json.loads(value.lower())
        values.setdefault(column, []).append(parsed)
    return values


def shown(number: int, hit: indexes.Hit) -> str:
    text = " ".join(hit.text.split())
    text = text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}\u2026"
    metadata = ", ".join(f"{name}={value}" for name, value in hit.metadata.items() if value is not None)
    lines = [f"{number:>3}  {hit.score:.4f}  {hit.id}", text, metadata]
    return "\n     ".join(line for line in lines if line)


def main(arguments: list[str]) -> None:
    options, encoding, words = parse_options(
        (SearchArguments, EncoderArguments),
        __doc__,
        arguments,
        folder={"type": Path, "help": "folder of the index"},
        question={"help": "what to search for"},
    )
    encoder = encoder_of(words.folder, encoding)  # first, since it finds out whether the folder holds an index
    with indexes.Index.open(words.folder, encoder) as index:
        hits = index.search([words.question], options.top_k, filters(options.where, index.layout.columns))[0]
    print("\n".join(shown(number, hit) for number, hit in enumerate(hits, start=1)) or "Nothing found.")
