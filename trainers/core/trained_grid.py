"""The trained grid in a model's config, and the exits that training makes stale."""

from __future__ import annotations

import logging
from typing import Any

from transformers import PreTrainedModel

from .granularity import Grid


logger = logging.getLogger(__name__)


def declare_grid(config: Any, grid: Grid) -> None:
    """
    Write the trained grid into a model's config, under the names that m3BERT and serving engines read.

    Raises:
        ValueError: if the config's default granularity is not in the grid.
    """
    config.matryoshka_layers, config.matryoshka_dims = grid.layers, grid.dims
    if config.model_type == "m3bert":
        config.resolve_granularity()
    else:  # m3BERT derives these two
        config.is_matryoshka, config.matryoshka_dimensions = True, grid.dims


def drop_stale_exits(encoder: PreTrainedModel, grid: Grid) -> None:
    """Remove the exits of layers outside the grid: training moves the states that they were fitted to."""
    stale = sorted({*getattr(encoder.config, "exit_layers", ())} - {*grid.layers})
    if stale:
        logger.warning(
            f"The exits of layers {', '.join(map(str, stale))} are dropped: the grid {grid} does not train them. "
            "To fit them again after training, use `m3bert fit_exits`."
        )
        encoder.drop_exits(stale)
