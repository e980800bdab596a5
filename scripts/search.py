"""
Search an index of `m3bert index`:

    m3bert search runs/index "How do I remove a folder?"
    m3bert search runs/index "How do I remove a folder?" --top_k 3 --where module=shutil
    m3bert search runs/index "How do I remove a folder?" --hybrid
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers.index import Hit, Index

from .command import parse_options, run_command
from .encoder import EncoderArguments
from .index import encoder_of


WIDTH = 110  # characters of a text that are printed


@dataclass
class SearchArguments:
    """What to find."""

    top_k: int = field(default=10, metadata={"help": "Number of documents to find."})
    hybrid: bool = field(
        default=False,
        metadata={"help": "Also search by words (BM25), and fuse both. The index must be built with --hybrid."},
    )
    where: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Only documents with this metadata: column=value. The same column twice means either value."
        },
    )


def filters(texts: list[str], columns: dict[str, str]) -> dict[str, list[Any]]:
    """
    Read filters.

    Args:
        texts (`list[str]`): Filters as `column=value`.
        columns (`dict[str, str]`): Metadata column -> type.

    Returns:
        `dict[str, list]`: column -> values.

    Raises:
        ValueError: if a filter has another form, or its value is not of the type of its column.
    """
    found: dict[str, list[Any]] = {}
    for text in texts:
        column, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--where {text}: write column=value.")
        found.setdefault(column, []).append(_typed(value, columns.get(column, "text"), text))
    return found


def _typed(value: str, kind: str, text: str) -> Any:
    try:
        if kind == "integer":
            return int(value)
        if kind == "number":
            return float(value)
        if kind == "boolean":
            return {"true": True, "false": False}[value.lower()]
    except (ValueError, KeyError) as error:
        raise ValueError(f"--where {text}: the column has the type {kind}.") from error
    return value


def shown(number: int, hit: Hit) -> str:
    """A document in a few lines."""
    text = " ".join((hit.text or "").split())
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
    if encoding.grid:
        raise ValueError("--grid: an index has the granularity of its plan.")
    with Index.open(words.folder, encoder_of(words.folder, encoding)) as index:
        where = filters(options.where, dict(index.layout.columns))
        hits = index.search([words.question], options.top_k, where, hybrid=options.hybrid)[0]
    print("\n".join(shown(number, hit) for number, hit in enumerate(hits, start=1)) or "Nothing found.")


if __name__ == "__main__":
    run_command(main)
