"""
Words that readers should not meet, and the field's words for them. `make docs` runs this.

It reads the README, these pages, the template of the cards, and every text in the code: help, errors, docstrings.
Code in backticks and blocks is left out: names of options, values and classes are not prose. Variables and arguments
have the name of what they hold: [`VAGUE`] names say nothing of it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).parent.parent
PACKAGES = ("m3bert", "modeling_m3bert", "trainers", "hub_cards", "scripts")

# Pattern of an old word -> what to write instead. A space in a pattern may be the end of a line.
WORDS = {
    # Names: the field has a word of its own.
    r"numbers? per vector": "dimensions",
    r"widths?": "dimensions, or hidden size",
    r"cut(s|ting)?(?! (into|off))": "truncate",
    r"(?<!hidden )(?<!optimizer )(?<!optimizer's )(?<!random )states?(?! dicts?)": "hidden state",
    r"untouched": "base model",
    r"(?<!inference )(?<!search )engines?": "vector store, inference engine or runtime",
    r"kinds(?= of (index|indexes))": "index type",
    r"re-scor\w+|(scored?|scores|scoring|sorted|sorts|sort) (\w+ ){0,3}again": "rescoring",
    r"re-rank\w*": "reranking",
    r"a?symmetric search(es)?": "asymmetric encoders",
    r"(a|another|each|every|one|other|per|any|by|in) codes?(?! of (two|three) letters)": "precision",
    r"codes? of a (granularity|plan|size)|(list|table) of codes|dims? and codes?": "precision",
    # A private English.
    r"go(es)? home|on (its|their) way": "say who sends what to whom",
    r"of its own again|gone on from|(is|are) gone on": "continue",
    r"any moment": "monotonic clock",
    r"(is|are) to (leave|stay|be left)": "say what it does",
    r"(was|is|are|were) (said|asked for)": "name the option that is passed",
    r"(bytes?|bits?|ms|milliseconds|row|column|term) an? (vector|query|granularity|number|dim)": "per",
    r"right angle": "orthogonal",
    r"alike": "equal, or similar",
    r"so many": "give the number, or its name",
    r"as it is said": "leave it out",
}
VAGUE = {"found", "its", "own", "kept", "wanted"}
# Place (file, text around the word) -> why the word may stand there.
ALLOWED = {
    ("hub_cards/embed.md", "states"): "lines of Python on the card",
    ("hub_cards/checkpoint.py", "state of the training run"): "a file of the trainer",
    ("trainers/exit_distillation/trainer.py", "state-only maps"): "the name of `--state_only_weight`",
    ("trainers/exit_distillation/teacher_space.py", "state-only maps"): "the name of `state_only_weight`",
    ("m3bert/encode/states.py", "state-only"): "the map that reads no table",
    ("m3bert/index/index.py", "FROM state"): "a table of SQLite",
    ("m3bert/index/__init__.py", "ENGINES Hit"): "two names",
    ("scripts/quickstart.py", "lines of a given width"): "a question to the documentation of Python",
}


class Hit(NamedTuple):
    """An old word: where it is, the text around it, and what to write instead."""

    file: str
    line: int
    text: str
    better: str


def prose(text: str) -> str:
    """A text with blanks in place of its code, and without indentation. Its lines stay."""
    # Blocks, backticks, addresses of links, braces of templates, `:::` of the reference, names in a list of arguments.
    code = r"^ *```.*?^ *```$|`[^`]*`|\]\([^)]*\)|\{[^{}]*\}|^::: .*?$|^ *\w+ \((?=[`\[])"
    blank = re.sub(code, lambda match: re.sub(r"[^\n]", "_", match[0]), text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\n +", "\n", blank)


def texts(root: Path = ROOT) -> Iterator[tuple[str, int, str]]:
    """Everything that users read: file, first line, text."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    for page in [*pages, *sorted((root / "hub_cards").glob("*.md"))]:
        yield str(page.relative_to(root)), 1, page.read_text(encoding="utf-8")
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        name = str(file.relative_to(root))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
                yield name, node.lineno, node.value


def hits(passages: Iterator[tuple[str, int, str]]) -> Iterator[Hit]:
    """The old words in some texts, those of [`ALLOWED`] places included."""
    patterns = [
        (re.compile(rf"(?<![\w-])({word})(?![\w])".replace(" ", r"\s"), re.IGNORECASE), better)
        for word, better in WORDS.items()
    ]
    for file, first, text in passages:
        plain = prose(text)
        for pattern, better in patterns:
            for match in pattern.finditer(plain):
                around = " ".join(plain[max(0, match.start() - 40) : match.end() + 40].split())
                yield Hit(file, first + plain.count("\n", 0, match.start()), around, better)


def vague_names(root: Path = ROOT) -> Iterator[Hit]:
    """The variables and arguments of the package with a vague name."""
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else None
            if name in VAGUE:
                yield Hit(str(file.relative_to(root)), node.lineno, name, "the name of what it holds")


def allowance(hit: Hit) -> tuple[str, str] | None:
    """The place in [`ALLOWED`] that a hit is at, if it is at one."""
    return next(((file, text) for file, text in ALLOWED if file == hit.file and text in hit.text), None)


if __name__ == "__main__":
    left = [*(hit for hit in hits(texts()) if allowance(hit) is None), *vague_names()]
    for hit in left:
        print(f"{hit.file}:{hit.line}: {hit.text!r}: {hit.better}", file=sys.stderr)
    sys.exit(bool(left))
