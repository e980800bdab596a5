"""Help texts of options, of config fields from the docstring of their class; and the name that was perhaps meant."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, TypeVar


Config = TypeVar("Config", bound=type)
# "name (`type`, *optional*): text"; its continuation lines are indented further.
ARGUMENT = re.compile(r"^    (?P<name>\w+) \((?:`[^`]+`|[^()])*\): (?P<text>.+(?:\n {5,}.+)*)", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
REFERENCE = re.compile(r"\[`~?([^`]+)`\]")
DEFAULT = " (default: %(default)s)"  # which argparse fills in


def described(cls: Config) -> Config:
    """
    Class decorator for a config dataclass: copies the description of each field from the `Args` section of the
    docstring to the field's `metadata["help"]`, which the command line prints. A field without a description that
    overrides one of a base class keeps the help of the base class.

    Raises:
        TypeError: if a field has no description.
    """
    if cls.__doc__ is None:  # python -OO
        return cls
    texts = {}
    for match in ARGUMENT.finditer(inspect.cleandoc(cls.__doc__)):
        plain = REFERENCE.sub(r"\1", LINK.sub(r"\1", " ".join(match["text"].split())))
        texts[match["name"]] = plain.replace("`", "").replace("%", "%%")  # for argparse
    bases = reversed(cls.__mro__[1:])
    inherited = {field.name: field.metadata.get("help") for base in bases for field in declared_fields(base)}
    for field in declared_fields(cls):
        text = texts.get(field.name) or (inherited.get(field.name) or "").removesuffix(DEFAULT)
        if not text:
            raise TypeError(f"{cls.__name__}.{field.name} is not described in the Args of the docstring.")
        field.metadata = MappingProxyType({**field.metadata, "help": with_default(text, field.default)})
    return cls


def with_default(text: str, default: object) -> str:
    """A help text with the default of its option, if that says something."""
    says_nothing = default is None or default is False or default is MISSING or default in ("", [])
    return text if says_nothing else text + DEFAULT


def option(default: Any, text: str, **metadata: Any) -> Any:
    """A field of a dataclass of options, with its help; a list is copied. `MISSING` makes it required."""
    metadata["help"] = with_default(text, default)
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_fields(cls: type) -> list[Field]:
    """Fields that a dataclass declares, without inherited ones; none for a class that is not a dataclass."""
    names = inspect.get_annotations(cls)
    return [field for field in fields(cls) if field.name in names] if is_dataclass(cls) else []


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What follows an unknown name in an error: ` (did you mean evaluate?)`, or nothing if no known name is close."""
    close = get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""
