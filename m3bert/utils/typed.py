"""Content of JSON files as the dataclasses that describe it, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


def read_json(file: str | Path, kind: type = dict) -> Any:
    """The content of a JSON file. ValueError if it is not JSON, or not of this kind (`dict` or `list`)."""
    return json_of(Path(file).read_bytes(), file, kind)


def json_of(text: bytes, file: str | Path, kind: type = dict) -> Any:
    """As [`read_json`], of the bytes of a file."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(content, kind):
        raise ValueError(f"{file} is not a JSON {'object' if kind is dict else 'array'}.")
    return content


def typed(kind: Any, content: Any, name: str = "") -> Any:
    """
    The object that JSON content stands for: a dataclass, or the type of one of its fields, `int`, `float`, `str`,
    `bool`, `Any`, a list, tuple or mapping of these, or `X | None`, the only union. ValueError, which calls the
    content `name`, for a field that is missing, unknown, or of another type.
    """
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if kind is Any or (content is None and NoneType in inner):
        return content
    if outer in (Union, UnionType):
        return typed(next(one for one in inner if one is not NoneType), content, name)
    if is_dataclass(kind) and isinstance(content, Mapping):
        hints = get_type_hints(kind)
        if unknown := sorted(content.keys() - hints.keys()):
            raise ValueError(f"{name or 'it'} has the unknown field {unknown[0]!r}.")
        values = {key: typed(hints[key], value, f"{key} of {name}" if name else key) for key, value in content.items()}
        try:
            return outer(**values)
        except TypeError as error:  # a missing field
            raise ValueError(f"{name or 'it'} lacks a field: {error}.") from error
    if outer in (list, tuple) and isinstance(content, list | tuple):
        return outer(typed(inner[0], member, f"a member of {name}") for member in content)
    if outer in (dict, Mapping) and isinstance(content, Mapping):
        return {key: typed(inner[1], value, f"{name}[{key!r}]") for key, value in content.items()}
    expected = (int, float) if outer is float else outer
    if inner or not isinstance(content, expected) or (isinstance(content, bool) and outer is not bool):
        raise ValueError(
            f"{name or 'it'} must be of type {getattr(outer, '__name__', outer)}, and is {repr(content)[:40]}."
        )
    return content
