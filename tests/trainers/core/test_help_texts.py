"""Config fields are described once, in the docstring of their class."""

from __future__ import annotations

import dataclasses
import inspect
import re
from dataclasses import dataclass, field

import pytest
from transformers import TrainingArguments

from m3bert import trainers
from m3bert.encode.help_texts import described


CONFIGS = [getattr(trainers, name) for name in trainers.__all__ if name.endswith("Config")]
CONFIGS.append(trainers.NestedTrainingArguments)
THEIRS = {field.name for field in dataclasses.fields(TrainingArguments)}


def described_in(cls: type) -> dict[str, str]:
    """Name -> description of the arguments in a docstring, without its markup, read line by line."""
    found: dict[str, list[str]] = {}
    name = None
    for line in inspect.getdoc(cls).splitlines():
        indent = len(line) - len(line.lstrip())
        if indent == 4 and (start := re.match(r" {4}(\w+) \(.*?`\)?.*?\): (.*)", line)):
            name, text = start.groups()
            found[name] = [text]
        elif name is not None and indent > 4:
            found[name].append(line.strip())
        else:
            name = None
    plain = {}
    for name, lines in found.items():
        text = re.sub(r"\[([^\]`]+)\]\([^\s)]+\)", r"\1", " ".join(lines))
        plain[name] = re.sub(r"\[`~?(.+?)`\]", r"\1", text).replace("`", "")
    return plain


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_the_help_of_every_field_is_the_text_of_its_docstring(cls):
    own = [field for field in dataclasses.fields(cls) if field.name in cls.__annotations__]
    texts = described_in(cls)
    assert set(texts) <= {field.name for field in own}, "described and not a field"
    for one in own:
        expected = texts.get(one.name)
        if expected is None:  # a default of a base class that is changed
            expected = next(f.metadata["help"] for f in dataclasses.fields(cls.__mro__[1]) if f.name == one.name)
            assert one.metadata["help"] == expected
        else:
            assert one.metadata["help"].replace("%%", "%") == expected


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_every_field_has_help_on_one_line_that_argparse_takes(cls):
    for one in dataclasses.fields(cls):
        if one.name not in THEIRS:
            text = one.metadata["help"]
            assert text and "\n" not in text and "`" not in text
            assert text % {} == text.replace("%%", "%"), "argparse formats it"


def test_a_field_without_a_description_is_a_type_error():
    with pytest.raises(TypeError, match="Forgotten.second is not described in the Args of the docstring"):

        @described
        @dataclass
        class Forgotten:
            """
            A config.

            Args:
                first (`int`): Described.
            """

            first: int = 1
            second: int = 2


def test_links_and_markup_are_left_out_and_other_metadata_stays():
    @described
    @dataclass
    class Base:
        """
        A config.

        Args:
            share (`float`, *optional*, defaults to 0.5): Of `all` texts, 50% ([Paper](https://example.org)); see
                [`~trainers.Grid`] and [`Term`].
            other (`dict[str, int]`, *optional*): One line.
        """

        share: float = field(default=0.5, metadata={"unit": "texts"})
        other: dict | None = None

    @described
    @dataclass
    class Derived(Base):
        """A config with another default."""

        share: float = 0.7

    share, other = dataclasses.fields(Base)
    assert share.metadata == {"unit": "texts", "help": "Of all texts, 50%% (Paper); see trainers.Grid and Term."}
    assert other.metadata == {"help": "One line."}
    assert dataclasses.fields(Derived)[0].metadata["help"] == share.metadata["help"]
