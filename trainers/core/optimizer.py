"""The groups of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def set_learning_rate(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], lr: float) -> None:
    """Move parameters of a new optimizer into groups with this learning rate, which keep all other options."""
    moved = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        apart = [parameter for parameter in group["params"] if id(parameter) in moved]
        if apart:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
            options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
            optimizer.add_param_group({**options, "params": apart, "lr": lr})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
