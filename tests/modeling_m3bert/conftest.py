"""Fixtures of the tests of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import core_model_loading

from m3bert.modeling import loading_elastic


@pytest.fixture
def bytes_read(monkeypatch) -> list[int]:
    """Sizes of the tensors that are read from files from here on: weights, exits, refitted matrices and table."""
    read: list[int] = []
    materialize, read_parts = core_model_loading._materialize_copy, loading_elastic.read_parts

    def counted_weight(tensor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        read.append(tensor[...].nbytes)
        return materialize(tensor, *args, **kwargs)

    def counted_parts(*args: Any) -> dict[str, torch.Tensor]:
        parts = read_parts(*args)
        read.extend(tensor.nbytes for tensor in parts.values())
        return parts

    monkeypatch.setattr(core_model_loading, "_materialize_copy", counted_weight)
    monkeypatch.setattr(loading_elastic, "read_parts", counted_parts)
    return read
