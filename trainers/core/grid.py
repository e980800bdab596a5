"""The trained grid: checks against the model, the config that declares it, and exits outside of it."""

from __future__ import annotations

import copy
import logging

from transformers import PreTrainedConfig, PreTrainedModel

from ...encode.granularity import Grid
from ...encode.projection import Projection
from ...encode.states import check_pooling
from ...modeling.configuration_elastic import Elasticity, resolve_size
from .objective import Objective


logger = logging.getLogger(__name__)


def check_objective(objective: Objective, config: PreTrainedConfig, projection: Projection | None) -> None:
    """Check before training that a model has what the objective reads, and that it could be saved with the grid."""
    if projection is not None:
        projection.validate(objective, config)
    objective.validate(config)
    if objective.pooling is not None:
        check_pooling(objective.pooling, config)
    if projection is None and objective.layers:
        declare_grid(copy.deepcopy(config), objective.grid)


def declare_grid(config: PreTrainedConfig, grid: Grid) -> None:
    """Write the trained grid into a model's config, under the names that m3BERT and inference engines read. ValueError
    if the config's default granularity is not in the grid."""
    config.matryoshka_layers, config.matryoshka_dims = grid.layers, grid.dims
    resolve_size(config)
    if config.model_type != "m3bert":  # which derives these two
        config.is_matryoshka, config.matryoshka_dimensions = True, grid.dims


def drop_stale_exits(encoder: PreTrainedModel, grid: Grid) -> None:
    """Remove exits and paths of depths outside the grid: training moves the hidden states that they were fitted to."""
    spec = Elasticity.of(encoder.config)
    stale = sorted({*spec.aligned} - {*grid.layers})
    if stale:
        logger.warning(
            f"The exits of depths {', '.join(map(str, stale))} are dropped: the grid {grid} does not train them. "
            "To fit them again after training, use `m3bert fit`."
        )
        encoder.drop_depths(stale)
