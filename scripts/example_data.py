"""
Write small files to try the commands with, made from the documentation of Python's standard library:

    m3bert example_data              # into this folder
    m3bert example_data examples     # into another one

    pairs.jsonl    {"anchor": summary line, "positive": text below it}
    corpus.jsonl   {"title": name, "text": text below the summary line}
    text.txt       one summary line per line

    triplets.csv   anchor, positive, negative: a summary line, the text below it, and another text
    labelled_pairs.csv    sentence1, sentence2, label: whether a text belongs to a summary line
    classes.csv      text, label: where a text is from
    collection/    corpus.jsonl, queries.jsonl and qrels/test.tsv: texts to find by their summary lines

labelled_pairs.csv and collection hold texts that are not in triplets.csv, so they can score what was trained on it.
None of these texts is in the task `stdlib` of `m3bert evaluate`. Nothing is downloaded.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..data.stdlib_docs import Pair, split_by_module, stdlib_pairs
from ..utils.durable import replace_text
from .command import argument_parser


HELD_OUT = 200  # pairs that are not in triplets.csv
# Modules whose texts a reader knows, for examples of a search.
FAMILIAR = ("statistics", "textwrap", "datetime", "collections", "timeit", "glob", "string")


def example_files() -> dict[str, str]:
    pairs, _ = split_by_module(stdlib_pairs())
    pairs.sort(key=lambda pair: pair.module not in FAMILIAR)
    held, rest = pairs[:HELD_OUT], pairs[HELD_OUT:]
    others = {pair: part[row - 1] for part in (held, rest) for row, pair in enumerate(part)}
    rows: dict[str, list[dict[str, object]]] = {
        "pairs.jsonl": [{"anchor": pair.summary, "positive": pair.body} for pair in pairs],
        "corpus.jsonl": [{"title": pair.name, "text": pair.body} for pair in pairs],
        "triplets.csv": [
            {"anchor": pair.summary, "positive": pair.body, "negative": others[pair].body} for pair in rest
        ],
        "labelled_pairs.csv": [
            {"sentence1": pair.summary, "sentence2": text.body, "label": int(text == pair)}
            for pair in held
            for text in (pair, others[pair])
        ],
        "classes.csv": [{"text": pair.body, "label": kind_of(pair)} for pair in pairs[::4]],
        "collection/corpus.jsonl": [
            {"_id": f"d{row}", "title": pair.name, "text": pair.body} for row, pair in enumerate(held)
        ],
        "collection/queries.jsonl": [{"_id": f"q{row}", "text": pair.summary} for row, pair in enumerate(held)],
        "collection/qrels/test.tsv": [
            {"query-id": f"q{row}", "corpus-id": f"d{row}", "score": 1} for row in range(len(held))
        ],
    }
    return {name: written(name, content) for name, content in rows.items()} | {
        "text.txt": "".join(f"{pair.summary}\n" for pair in pairs)
    }


def kind_of(pair: Pair) -> str:
    return {"topics": "language", "builtins": "built-in"}.get(pair.module.partition(".")[0], "library")


def written(name: str, rows: Sequence[Mapping[str, object]]) -> str:
    if name.endswith(".jsonl"):
        return "".join(json.dumps(row) + "\n" for row in rows)
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, rows[0], delimiter="\t" if name.endswith(".tsv") else ",", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path("."), help="folder for the files (default: %(default)s)"
    )
    folder = parser.parse_args(arguments).folder
    files = {folder / name: content for name, content in example_files().items()}
    for file, content in files.items():
        if file.exists() and file.read_text(encoding="utf-8") != content:
            raise ValueError(f"{file} exists and is no example file: name another folder, or remove it.")
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, content)
        lines = content.count("\n")
        print(f"{file}: {lines:,} lines")
