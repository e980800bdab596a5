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
from hashlib import blake2b
from typing import NamedTuple


END = "<!-- end of section -->"
SECTION = re.compile(rf"<!-- section: ([\w-]+) (\w+) -->\n(.*?){END}\n?", re.DOTALL)
START = re.compile(r"^<!-- section: ([\w-]+) -->\n", re.MULTILINE)


class Section(NamedTuple):
    """A part of a card in Markdown, with the digest of its generated text. Without a name, a person wrote it."""

    text: str
    name: str | None = None
    digest: str | None = None

    @property
    def edited(self) -> bool:
        """Whether a person wrote or changed it."""
        return self.digest != digest_of(self.text)

    def __str__(self) -> str:
        if self.name is None:
            return self.text
        return f"<!-- section: {self.name} {self.digest} -->\n{self.text}{END}\n"


def digest_of(text: str) -> str:
    """A digest of a section's text, without the white space at its ends."""
    return blake2b(text.strip().encode(), digest_size=6).hexdigest()


def generated(rendered: str) -> list[Section]:
    """The sections of a rendered template. Each begins with `<!-- section: name -->`. Empty ones are left out."""
    _, *parts = START.split(rendered)
    texts = [f"{text.strip()}\n" for text in parts[1::2]]
    return [Section(text, name, digest_of(text)) for name, text in zip(parts[::2], texts, strict=True) if text.strip()]


def parse(text: str) -> list[Section]:
    """The sections of a card and the text between them, in order."""
    between, *rest = SECTION.split(text.replace("\r\n", "\n"))  # some editors save cards this way
    sections = [Section(between)]
    for name, digest, inner, after in zip(rest[::4], rest[1::4], rest[2::4], rest[3::4], strict=True):
        sections += [Section(inner, name, digest), Section(after)]
    return [s if s.name else Section(f"{s.text.strip()}\n") for s in sections if s.name or s.text.strip()]


def merge(new: list[Section], old: list[Section]) -> list[Section]:
    """Merge a new card into an old one. What a person wrote or edited stays where it is; the rest is replaced. A
    section that the old card lacks is put after its predecessor in the new card."""
    fresh = {section.name: section for section in new}
    merged = [s if s.edited else fresh[s.name] for s in old if s.edited or s.name in fresh]
    place = 0  # after the section that precedes in the new card
    for section in new:
        names = [member.name for member in merged]
        if section.name in names:
            place = names.index(section.name) + 1
        else:
            merged.insert(place, section)
            place += 1
    return merged


def join(sections: list[Section]) -> str:
    """The text of a card with these sections."""
    return "\n".join(map(str, sections))
