"""The pages for users, and the code in them."""

import re
from pathlib import Path
from typing import NamedTuple


ROOT = Path(__file__).parent.parent
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


def pages() -> list[str]:
    """The README and all pages of the documentation, as paths from the root of the project."""
    return ["README.md", *sorted(file.relative_to(ROOT).as_posix() for file in (ROOT / "docs").rglob("*.md"))]


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")
