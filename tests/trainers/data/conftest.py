"""Fixtures of the tests of data."""

from __future__ import annotations

import pytest

from trainers.data import teacher


@pytest.fixture
def small_batches(monkeypatch) -> None:
    """A teacher's cache has checksums of eight texts each."""
    monkeypatch.setattr(teacher, "ROWS_OF_A_BATCH", 8)


@pytest.fixture
def encoded(monkeypatch) -> list[str]:
    """Collects the texts that any teacher is asked to embed."""
    from sentence_transformers import SentenceTransformer

    seen: list[str] = []
    encode = SentenceTransformer.encode

    def counting(self, texts, **options):
        seen.extend(texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(SentenceTransformer, "encode", counting)
    return seen
