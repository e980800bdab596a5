"""Fixtures of the tests of models."""

from __future__ import annotations

import pytest
from transformers import core_model_loading


@pytest.fixture
def bytes_read(monkeypatch) -> list[int]:
    """Sizes of the tensors that are read from files from here on."""
    read: list[int] = []
    materialize = core_model_loading._materialize_copy
    monkeypatch.setattr(
        core_model_loading,
        "_materialize_copy",
        lambda tensor, *args, **kwargs: read.append(tensor[...].nbytes) or materialize(tensor, *args, **kwargs),
    )
    return read
