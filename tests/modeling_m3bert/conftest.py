"""Fixtures of the tests of models."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from transformers import core_model_loading

from m3bert.modeling import files_elastic


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

    class CountedFile:
        """A file of exits and table."""

        def __init__(self, *args: object):
            self.file = safe_open(*args)

        def __enter__(self) -> CountedFile:
            self.file.__enter__()
            return self

        def __exit__(self, *args: object) -> None:
            self.file.__exit__(*args)

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor = self.file.get_tensor(name)
            read.append(tensor.nbytes)
            return tensor

    monkeypatch.setattr(files_elastic, "safe_open", CountedFile)
    return read
