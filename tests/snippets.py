"""Code of a Markdown text, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^ *```$", re.DOTALL | re.MULTILINE)


class Snippet(NamedTuple):
    """A fenced block: its language, its code, and the last heading above it."""

    language: str
    code: str
    heading: str


def snippets(text: str) -> list[Snippet]:
    """All fenced blocks of a text, in order."""
    found = []
    for match in FENCE.finditer(text):
        headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text[: match.start()]), re.MULTILINE)
        found.append(Snippet(match["language"], match["code"], headings[-1] if headings else ""))
    return found


def readme() -> str:
    """The project's README."""
    return (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
