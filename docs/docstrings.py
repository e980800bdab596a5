"""
Docstrings for mkdocstrings. Ours are written as in transformers: "name (`type`, *optional*, defaults to `x`): text".
The page has a column for types and one for defaults, so types lose their marks here; names in brackets become links.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe


ARGUMENT = re.compile(
    r"^(?P<name> +\w+) \((?P<type>(?:`[^`]+`|[^()`])+?)(?:, \*optional\*(?:, defaults to (?:`[^`]+`|[^()`]+))?)?\): ",
    re.MULTILINE,
)
ONLY_OPTIONAL = re.compile(r"^(?P<name> +\w+) \(\*optional\*\): ", re.MULTILINE)
RESULT = re.compile(r"^(?P<title>(?:Returns|Yields):\n)(?P<type> +[`\[][^:\n]+)(?=:|$)", re.MULTILINE)
REFERENCE = re.compile(r"\[`~?(?P<path>[\w.]+)`\](?![\[(])")
GROUP = re.compile(r"^ +> Parameters .*\n\n?", re.MULTILINE)  # headings of groups, for `--help`
DOCUMENTED = re.compile(r"^::: (?P<path>[\w.]+)$", re.MULTILINE)


def documented() -> dict[str, str]:
    """Short name -> identifier of everything on the pages of the reference."""
    pages = (Path(__file__).parent / "reference").glob("*.md")
    paths = [path for page in pages for path in DOCUMENTED.findall(page.read_text(encoding="utf-8"))]
    return {path.rpartition(".")[2]: path for path in paths}


def without_marks(text: str) -> str:
    """A type as plain text: `[`Grid`]` and `` `str` `` are `Grid` and `str`."""
    return REFERENCE.sub(lambda match: match["path"].rpartition(".")[2], text).replace("`", "")


def linked(text: str, names: dict[str, str]) -> str:
    """The text with its references as links where there is a page, and as code where there is none."""

    def link(match: re.Match[str]) -> str:
        first = match["path"].partition(".")[0]
        if first not in names:
            return f"`{match['path'].rpartition('.')[2]}`"
        return f"[`{match['path']}`][{names[first]}]"

    return REFERENCE.sub(link, text)


class HuggingFaceDocstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def __init__(self) -> None:
        super().__init__()
        self.names = documented()

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """A config of transformers becomes a dataclass without saying so: its fields are what it is called with."""
        if any(str(base) == "PreTrainedConfig" for base in cls.bases):
            fields = (member for member in cls.attributes.values() if member.annotation is not None)
            keyword = griffe.ParameterKind.keyword_only
            given = (griffe.Parameter(f.name, annotation=f.annotation, kind=keyword, default=f.value) for f in fields)
            cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*given)))

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value.replace("Class attributes:\n", "Attributes:\n")
        text = GROUP.sub("", text)
        text = ARGUMENT.sub(lambda match: f"{match['name']} ({without_marks(match['type'])}): ", text)
        text = ONLY_OPTIONAL.sub(lambda match: f"{match['name']}: ", text)
        text = RESULT.sub(lambda match: match["title"] + without_marks(match["type"]), text)
        obj.docstring.value = linked(text, self.names)
