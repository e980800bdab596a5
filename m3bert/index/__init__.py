"""Indexes of documents in vector stores that people run, built from the plan of `m3bert choose`."""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_exports


if TYPE_CHECKING:
    from .corpus import Corpus as Corpus
    from .engine import ENGINES as ENGINES, Hit as Hit
    from .index import Index as Index, read_manifest as read_manifest
    from .plan import Plan as Plan

# Module -> its public names, as type checkers see them above.
EXPORTS = {".corpus": "Corpus", ".engine": "ENGINES Hit", ".index": "Index read_manifest", ".plan": "Plan"}
__getattr__, __dir__, __all__ = lazy_exports(__name__, EXPORTS)
