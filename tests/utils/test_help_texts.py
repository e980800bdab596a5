"""Config fields are described once, in the docstring of their class."""

import dataclasses
import inspect
from dataclasses import dataclass, field

import pytest
from transformers import TrainingArguments

from m3bert import trainers
from m3bert.utils.help_texts import ARGUMENT, DEFAULT, declared_fields, described


CONFIGS = [getattr(trainers, name) for name in trainers.__all__ if name.endswith("Config")]
CONFIGS.append(trainers.NestedTrainingArguments)
THEIRS = {field.name for field in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_every_field_has_help_on_one_line_that_argparse_takes(cls):
    """Of whole sentences: a line of the docstring with another indent would be cut off."""
    for one in dataclasses.fields(cls):
        if one.name not in THEIRS:
            text = one.metadata["help"].removesuffix(DEFAULT)
            assert text.endswith(".") and "\n" not in text and "`" not in text
            assert text % {} == text.replace("%%", "%"), "argparse formats it"
    names = {match["name"] for match in ARGUMENT.finditer(inspect.getdoc(cls))}
    assert names <= {field.name for field in declared_fields(cls)}, "described and not a field"


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
    assert share.metadata == {
        "unit": "texts",
        "help": f"Of all texts, 50%% (Paper); see trainers.Grid and Term.{DEFAULT}",
    }
    assert other.metadata == {"help": "One line."}
    assert dataclasses.fields(Derived)[0].metadata["help"] == share.metadata["help"]
