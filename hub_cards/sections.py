"""
The text of a card as sections, so that a card can be rendered again without losing what a person wrote into it.

A generated section stands between two comments, the first with a digest of its text:

    <!-- section: usage 0123456789ab -->
    ...
    <!-- end of section -->

Whoever edits the text changes what the digest would be, and the section is theirs from then on. What stands outside of
sections is always a person's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b


END = "<!-- end of section -->"
SECTION = re.compile(rf"<!-- section: (?P<name>[\w-]+) (?P<digest>\w+) -->\n(?P<text>.*?){END}\n?", re.DOTALL)
TEMPLATE_START = re.compile(r"^<!-- section: (?P<name>[\w-]+) -->\n", re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """
    A part of a card.

    Args:
        text (`str`): Markdown.
        name (`str`, *optional*): Of a generated section; `None` for what a person put between them.
        digest (`str`, *optional*): Of the text as it was generated.
    """

    text: str
    name: str | None = None
    digest: str | None = None

    @property
    def edited(self) -> bool:
        """Whether a person changed it."""
        return self.digest != digest_of(self.text)

    def __str__(self) -> str:
        if self.name is None:
            return self.text
        return f"<!-- section: {self.name} {self.digest} -->\n{self.text}{END}\n"


def digest_of(text: str) -> str:
    """A digest of a section's text; spaces at its ends do not count."""
    return blake2b(text.strip().encode(), digest_size=6).hexdigest()


def generated(template: str, render: Callable[[str], str]) -> list[Section]:
    """
    Sections of a template, in which each starts with its comment and ends where the next one starts.

    Args:
        template (`str`): The template.
        render (`Callable`): Fills in one section's text.
    """
    _, *parts = TEMPLATE_START.split(template)
    names, texts = parts[::2], [f"{render(part).strip()}\n" for part in parts[1::2]]
    return [Section(text, name, digest_of(text)) for name, text in zip(names, texts, strict=True)]


def parse(text: str) -> list[Section]:
    """Sections of a card, and what a person put between them, in order."""
    text = text.replace("\r\n", "\n")  # as some editors save it
    found, position = [], 0
    for match in SECTION.finditer(text):
        found += _between(text[position : match.start()])
        found.append(Section(match["text"], match["name"], match["digest"]))
        position = match.end()
    return [*found, *_between(text[position:])]


def _between(text: str) -> list[Section]:
    return [Section(f"{text.strip()}\n")] if text.strip() else []


def merge(new: list[Section], old: list[Section]) -> list[Section]:
    """
    A new card in the place of an old one: what a person wrote or edited stays, in its place; the rest is new. A
    section that the old card does not have comes after the one it follows in the new card.

    Args:
        new (`list[Section]`): Generated sections.
        old (`list[Section]`): Of the old card.

    Returns:
        `list[Section]`
    """
    fresh = {section.name: section for section in new}
    merged = []
    for section in old:
        if section.name is None or section.edited:
            merged.append(section)
        elif section.name in fresh:
            merged.append(fresh[section.name])
    for index, section in enumerate(new):
        names = [member.name for member in merged]
        if section.name not in names:
            before = next((s.name for s in reversed(new[:index]) if s.name in names), None)
            merged.insert(names.index(before) + 1 if before is not None else 0, section)
    return merged


def join(sections: list[Section]) -> str:
    """The text of a card."""
    return "\n".join(map(str, sections))
