"""Embeddings of the tests' texts by sentence-transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.reproduction.study import computed_once


FOLDER = Path("runs/exits")  # of what is computed once
MAX_LENGTH = 128  # tokens per text


def embed(folder: Path, side: str, texts: Sequence[str], depth: int | None = None) -> torch.Tensor:
    """Normalised embeddings of a folder by sentence-transformers; with remote code at a `depth`, without if there is
    none."""
    from sentence_transformers import SentenceTransformer

    elastic: Any = {} if depth is None else {"trust_remote_code": True, "model_kwargs": {"output_layer": depth}}
    model = SentenceTransformer(str(folder), device="cpu", **elastic)
    model.max_seq_length = MAX_LENGTH
    encode = model.encode_query if side == "queries" else model.encode_document
    return encode(list(texts), convert_to_tensor=True, normalize_embeddings=True).float()


def documents_of(name: str, folder: Path, tests: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Test -> embeddings of its documents by an encoder, which are computed once."""
    return {
        test: computed_once(
            FOLDER / f"paths-{name}-{test}.pt", partial(embed, folder, "documents", evaluator.texts["documents"])
        )
        for test, evaluator in tests.items()
    }
