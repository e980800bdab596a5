"""Indexes of documents in vector stores that people run, built from the plan of `m3bert choose`."""

from .corpus import Corpus
from .engine import ENGINES, Hit
from .index import Index, read_manifest
from .plan import Plan


__all__ = ["ENGINES", "Corpus", "Hit", "Index", "Plan", "read_manifest"]
