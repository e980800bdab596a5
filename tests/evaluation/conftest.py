"""Fixtures of the tests of evaluation."""

from pathlib import Path

import pytest
import torch

from m3bert.evaluation import GridEncoder
from m3bert.trainers import Grid
from tests.evaluation_data import write_data


@pytest.fixture
def data(tmp_path, sentences) -> Path:
    """A folder of small data sets in the local layout."""
    return write_data(tmp_path / "data", sentences)


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    """The tiny model at two layers and two dims."""
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("2,6x8,32"), batch_size=4)


@pytest.fixture
def encoder_with_exits(tiny_model, tiny_tokenizer) -> GridEncoder:
    """The tiny model with a table, which is depth 0, and an exit at layer 2. Layer 4 has no exit."""
    tiny_model.set_depths(exits={2: (torch.randn(32, 32), torch.randn(32))}, table=torch.randn(99, 32))
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("0,2,4,6x8,32"), batch_size=4)
