"""
The text of a card, split into sections: a card can be rendered again without losing what a person wrote into it.

A generated section stands between two comments; the first has a digest of the section's text:

    <!-- section: usage 0123456789ab -->
    ...
    <!-- end of section -->

Once a person edits the text, the digest no longer matches, and the section is never overwritten again. Text outside of
sections always belongs to a person.
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
        text (`str`): Its Markdown.
        name (`str`, *optional*): Name of a generated section; `None` for text that a person put between sections.
        digest (`str`, *optional*): Digest of the text as it was generated.
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
    """A digest of a section's text, without the white space at its ends."""
    return blake2b(text.strip().encode(), digest_size=6).hexdigest()


def generated(template: str, render: Callable[[str], str]) -> list[Section]:
    """
    The sections of a template, rendered. Each starts with its comment and ends where the next one starts. A section
    without text is left out.

    Args:
        template (`str`): The template.
        render (`Callable`): Renders the text of one section.
    """
    _, *parts = TEMPLATE_START.split(template)
    names, texts = parts[::2], [f"{render(part).strip()}\n" for part in parts[1::2]]
    return [Section(text, name, digest_of(text)) for name, text in zip(names, texts, strict=True) if text.strip()]


def parse(text: str) -> list[Section]:
    """The sections of a card and the text between them, in order."""
    text = text.replace("\r\n", "\n")  # some editors save cards this way
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
    Merge a new card into an old one. What a person wrote or edited stays where it is; the rest is replaced. A section
    that the old card lacks is put after its predecessor in the new card.

    Args:
        new (`list[Section]`): The generated sections of the new card.
        old (`list[Section]`): The sections of the old card.

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
    """The text of a card with these sections."""
    return "\n".join(map(str, sections))
