"""What a trainer prepares: the grid of a model, the groups of an optimizer, the batches of an evaluation."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ...encode.granularity import Grid
from ...encode.projection import Projection
from ...encode.ranks import rank, world_size
from ...encode.states import check_pooling
from ...modeling.configuration_elastic import Elasticity, resolve_size
from .objective import Objective


logger = logging.getLogger(__name__)


def even_batches(rows: int, size: int) -> list[list[int]]:
    """The rows of this rank in each batch of an evaluation: all rows once, in batches of all ranks that differ by one
    row at most, so that no last batch has a single row, which a contrastive loss has nothing to compare with. A rank
    has at most `size` rows, or two where one each would leave some rank without."""
    batches = min(math.ceil(rows / (size * world_size())), rows // world_size())
    if not batches:
        raise ValueError(f"The evaluation data has {rows} rows, too few for {world_size()} process(es).")
    parts = np.array_split(np.arange(rows), batches)
    return [np.array_split(part, world_size())[rank()].tolist() for part in parts]


def check_objective(objective: Objective, config: Any, projection: Projection | None) -> None:
    """Check before training that a model has what the objective reads, and that it could be saved with the grid."""
    if projection is not None:
        projection.validate(objective, config)
    objective.validate(config)
    if objective.pooling is not None:
        check_pooling(objective.pooling, config)
    if projection is None and objective.layers:
        declare_grid(copy.deepcopy(config), objective.grid)


def set_apart(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Move parameters of a new optimizer into groups with this learning rate, which keep all other options."""
    moved = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        apart = [parameter for parameter in group["params"] if id(parameter) in moved]
        if apart:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
            options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
            optimizer.add_param_group({**options, "params": apart, "lr": lr})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def declare_grid(config: Any, grid: Grid) -> None:
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
