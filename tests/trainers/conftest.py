"""Fixtures of the tests of trainers."""

import pytest
import torch

from tests.trainers.pooled_texts import LAYERS, WIDTH


@pytest.fixture
def leaves() -> dict[int, list[torch.Tensor]]:
    """Embeddings of three columns of five texts, at each of three layers."""
    return {
        layer: [torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)] for layer in LAYERS
    }
