"""Lazy package interfaces: each public name is imported from its module on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """
    `__getattr__`, `__dir__` and `__all__` of a package whose submodules are imported on first use. `exports` maps each
    module to its public names, with spaces between them. Type checkers see the imports of an `if TYPE_CHECKING:`
    block, which must be the same.
    """
    modules = {name: module for module, names in exports.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name], package), name)

    names = sorted(modules)
    return get, lambda: names, names
