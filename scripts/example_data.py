"""
Write three small files to try the commands with, made from the documentation of Python's standard library:

    m3bert example_data              # into this folder
    m3bert example_data examples     # into another one

    pairs.jsonl    {"anchor": summary line, "positive": text below it}
    corpus.jsonl   {"title": name, "text": text below the summary line}
    text.txt       one summary line per line

None of these texts is in the task `stdlib` of `m3bert evaluate`. Nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path

from trainers.data.stdlib_docs import split_by_module, stdlib_pairs

from .command import argument_parser, run_command


def example_files() -> dict[str, str]:
    """Name of each example file -> its content."""
    pairs, _ = split_by_module(stdlib_pairs())
    rows = {
        "pairs.jsonl": [{"anchor": pair.summary, "positive": pair.body} for pair in pairs],
        "corpus.jsonl": [{"title": pair.name, "text": pair.body} for pair in pairs],
    }
    contents = {name: "".join(json.dumps(row) + "\n" for row in found) for name, found in rows.items()}
    return contents | {"text.txt": "".join(f"{pair.summary}\n" for pair in pairs)}


def write_examples(folder: Path) -> list[Path]:
    """
    Write the example files into a folder.

    Raises:
        ValueError: if a file of this name with another content is there; nothing is written then.
    """
    files = {folder / name: content for name, content in example_files().items()}
    for file, content in files.items():
        if file.exists() and file.read_text(encoding="utf-8") != content:
            raise ValueError(f"{file} exists and is no example file: name another folder, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        file.write_text(content, encoding="utf-8")
    return list(files)


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("."), help="folder for the files")
    for file in write_examples(parser.parse_args(arguments).folder):
        lines = file.read_text(encoding="utf-8").count("\n")
        print(f"{file}: {lines:,} lines")


if __name__ == "__main__":
    run_command(main)
