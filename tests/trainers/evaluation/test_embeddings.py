"""Embeddings of a grid."""

from __future__ import annotations

import pytest
import torch

from trainers import Grid
from trainers.evaluation import GridEmbeddings


def test_numbers_that_are_not_finite_name_their_granularities():
    vectors = torch.zeros(3, 32)
    vectors[1, 20] = torch.nan
    embeddings = GridEmbeddings(Grid.parse("2,6x8,32"), {2: torch.zeros(3, 32), 6: vectors})
    with pytest.raises(ValueError, match="Embeddings at 6x32 are not finite, for example of text 1"):
        embeddings.require_finite()
    vectors[2, 3] = torch.inf
    with pytest.raises(ValueError, match="Embeddings at 6x8, 6x32 are not finite, for example of text 2"):
        embeddings.require_finite()
    vectors[:] = torch.nan
    with pytest.raises(ValueError, match="Embeddings at 6x8, 6x32 are not finite, for example of text 0"):
        embeddings.require_finite()
