"""Lazy package interfaces: each public name is imported from its module on first use."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def face(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    Make `__getattr__`, `__dir__` and `__all__` of a package whose submodules are imported on first use. The public
    names are those imported in the `if TYPE_CHECKING:` block of its `__init__.py`, so that type checkers and users
    see the same names.

    Args:
        package (`str`): `__name__` of the package.
        file (`str`): `__file__` of the package.

    Returns:
        `tuple`: the functions `__getattr__` and `__dir__`, and the list `__all__`.
    """
    exports: dict[str, str] = {}
    for statement in ast.parse(Path(file).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.If):
            for line in statement.body:
                if isinstance(line, ast.ImportFrom):
                    module = f"{'.' * line.level}{line.module or ''}"
                    exports |= {alias.asname or alias.name: module for alias in line.names}

    def get(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(exports[name], package), name)

    names = sorted(exports)
    return get, lambda: names, names
