"""Imports of optional dependencies, with an error that names the extra to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def how_to_install(extra: str) -> str:
    """The command that installs an extra, as the end of an error message."""
    return f"pip install 'm3bert[{extra}]', in a checkout pip install -e '.[{extra}]'"


def require_extra(module: str, extra: str | None, purpose: str) -> Any:
    """
    A module of an optional dependency, such as `"sklearn.metrics"`. If it is not installed, a ValueError says that the
    `purpose` (`"Classification"`) needs it, and which extra of m3bert installs it, if one does.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        install = f"pip install {package}" if extra is None else how_to_install(extra)
        raise ValueError(f"{purpose} needs the package {package}: {install}.") from error


def require_sentence_transformers(purpose: str) -> Any:
    """As [`require_extra`], for sentence-transformers with its modules, which the package does not import itself."""
    library = require_extra("sentence_transformers", "sentence-transformers", purpose)
    import_module("sentence_transformers.sentence_transformer.modules")
    return library
