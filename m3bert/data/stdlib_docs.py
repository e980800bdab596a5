"""Text pairs from the documentation of Python's standard library, which is on every machine."""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple


SKIPPED = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
SHORTEST_SUMMARY = 3  # words
SHORTEST_BODY, SHORTEST_TEST_BODY, LONGEST_BODY = 40, 150, 1000  # characters


class Pair(NamedTuple):
    """Summary line and text below it, from the docstring of the object `name`. A pair is clean, good enough for
    testing, if it has a full sentence, a public object, and a body that distinguishes it from 800 others."""

    module: str
    name: str
    summary: str
    body: str
    is_clean: bool


def docstring_pairs(module: str, name: str, docstring: str | None) -> Iterator[Pair]:
    """The pair of a docstring; none if the summary line or the text below it is too short."""
    text = inspect.cleandoc(docstring or "")
    # Docstrings of C functions start with a signature: `dict(mapping) -> ...`.
    text = re.sub(r"\A(.*->.*\n+)+", "", text)
    first, _, rest = text.partition("\n")
    summary, body = first.strip(), " ".join(rest.split())
    if SHORTEST_SUMMARY <= len(summary.split()) and len(body) >= SHORTEST_BODY:
        stands_alone = summary.endswith((".", "?", "!")) or rest.startswith("\n")
        is_public = not re.search(r"(^|\.)_(?!_)", name)
        is_clean = stands_alone and is_public and len(body) >= SHORTEST_TEST_BODY
        yield Pair(module, name, summary, body[:LONGEST_BODY], is_clean)


@cache  # parsing the library takes seconds
def module_pairs() -> tuple[Pair, ...]:
    """Pairs from the docstrings of modules, classes and functions, read from the source without importing it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    pairs: list[Pair] = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED & set(parts) or parts[0].startswith("config-"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some old modules have invalid escape sequences
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
        module = ".".join(part for part in parts if part != "__init__")
        pairs += tree_pairs(module, module, tree)
    return tuple(pairs)


def tree_pairs(module: str, name: str, node: ast.AST) -> Iterator[Pair]:
    """Pairs from the docstrings of a syntax tree and of the classes and functions in it."""
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, (ast.Module, *documented)):
        yield from docstring_pairs(module, name, ast.get_docstring(node))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, documented):
            yield from tree_pairs(module, f"{name}.{child.name}", child)


def builtin_pairs() -> Iterator[Pair]:
    """Pairs from the docstrings of built-in functions, classes and their methods."""
    for name, thing in sorted(vars(builtins).items()):
        members = vars(thing).items() if inspect.isclass(thing) else ()
        for full_name, documented in [(name, thing), *((f"{name}.{key}", value) for key, value in members)]:
            if isinstance(docstring := getattr(documented, "__doc__", None), str):
                yield from docstring_pairs(f"builtins.{name}", full_name, docstring)


def topic_pairs() -> Iterator[Pair]:
    """Pairs from the language reference of `help()`: sections with headings, and paragraphs with first sentences."""
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        module, name = f"topics.{topic}", f"help({topic!r})"
        # A heading is a line above an underline of `*`, `=`, `-` or `~`.
        parts = re.split(r"^(.+)\n[*=~-]{3,}$", text, flags=re.MULTILINE)[1:]
        for heading, section in zip(parts[::2], parts[1::2], strict=True):
            yield from docstring_pairs(module, name, f"{heading}\n\n{section}")
        for paragraph in re.split(r"\n\s*\n", text):
            sentence, stop, rest = " ".join(paragraph.split()).partition(". ")
            if stop:
                for pair in docstring_pairs(module, name, f"{sentence}.\n{rest}"):
                    yield pair._replace(is_clean=False)


def stdlib_pairs() -> list[Pair]:
    """All pairs in a fixed order, without duplicate summaries or bodies."""
    summaries, bodies, pairs = set(), set(), []
    for pair in [*module_pairs(), *builtin_pairs(), *topic_pairs()]:
        if pair.summary not in summaries and pair.body not in bodies:
            summaries.add(pair.summary)
            bodies.add(pair.body)
            pairs.append(pair)
    return pairs


def split_by_module(pairs: list[Pair], num_test: int = 800) -> tuple[list[Pair], list[Pair]]:
    """
    Split pairs into training and test pairs by module, in an order that depends only on the names of the modules. The
    first modules give their clean pairs to the test set, until it has `num_test` pairs; all others are for training.
    """
    by_module: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_module.setdefault(pair.module, []).append(pair)
    train: list[Pair] = []
    test: list[Pair] = []
    for module in sorted(by_module, key=lambda name: zlib.crc32(name.encode())):
        if len(test) < num_test:
            test += [pair for pair in by_module[module] if pair.is_clean]
        else:
            train += by_module[module]
    return train, test
