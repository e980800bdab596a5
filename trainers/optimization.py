"""A learning rate and a warm-up of their own for an objective's parameters, inside the Trainer's one optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainingArguments, get_scheduler


# Key of a parameter group that holds an objective's parameters.
OWN_GROUP = "of_objective"


def set_apart(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], lr: float) -> None:
    """
    Move parameters of a fresh optimizer into groups of their own, which keep their other options.

    Args:
        optimizer ([`~torch.optim.Optimizer`]): One that has made no step.
        parameters (`Iterable[torch.nn.Parameter]`): Those to move.
        lr (`float`): Their learning rate.
    """
    moved = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in moved]
        if own:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
            options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
            optimizer.add_param_group({**options, "params": own, "lr": lr, OWN_GROUP: True})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def warm_up_apart(
    scheduler: LRScheduler, args: TrainingArguments, num_warmup_steps: int, num_training_steps: int
) -> None:
    """
    Give the groups that [`set_apart`] made the same schedule with another warm-up.

    Args:
        scheduler ([`~torch.optim.lr_scheduler.LRScheduler`]): One that has made no step.
        args ([`~transformers.TrainingArguments`]): What the schedule is.
        num_warmup_steps (`int`): Their warm-up.
        num_training_steps (`int`): Of the whole run.

    Raises:
        ValueError: if the schedule is not a function of the step alone.
    """
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(f"projector_warmup_steps needs a schedule of the step; {args.lr_scheduler_type} is none.")
    like: Any = get_scheduler(
        args.lr_scheduler_type,
        optimizer=torch.optim.SGD([torch.zeros(1)]),
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_training_steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    for index, group in enumerate(scheduler.optimizer.param_groups):
        if OWN_GROUP in group:
            scheduler.lr_lambdas[index] = like.lr_lambdas[0]
            group["lr"] = group["initial_lr"] * like.lr_lambdas[0](0)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
