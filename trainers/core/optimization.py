"""Separate learning rates, and for the parameters of an objective a separate warm-up, in one optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import TrainingArguments, get_scheduler


# Key that marks a parameter group as one of an objective's parameters.
OWN_GROUP = "of_objective"


def set_apart(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.nn.Parameter], lr: float, **marks: bool
) -> None:
    """
    Move parameters of a new optimizer into separate groups, which keep all options but the learning rate.

    Args:
        optimizer ([`~torch.optim.Optimizer`]): An optimizer before its first step.
        parameters (`Iterable[torch.nn.Parameter]`): The parameters to move.
        lr (`float`): Learning rate of these parameters.
        marks (`bool`): Further entries of these groups, such as [`OWN_GROUP`].
    """
    moved = {id(parameter) for parameter in parameters}
    for group in list(optimizer.param_groups):
        own = [parameter for parameter in group["params"] if id(parameter) in moved]
        if own:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in moved]
            options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
            optimizer.add_param_group({**options, "params": own, "lr": lr, **marks})
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]


def reshape_loaded_state(optimizer: torch.optim.Optimizer) -> None:
    """
    Give the loaded state of parameters with one element their shape: in old checkpoints, a learned temperature had no
    dims. A hook of `load_state_dict`.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if name != "step" and isinstance(value, torch.Tensor) and value.ndim == 0 and parameter.ndim:
                state[name] = value.reshape(parameter.shape)


def warm_up_apart(
    scheduler: LRScheduler, args: TrainingArguments, num_warmup_steps: int, num_training_steps: int
) -> None:
    """
    Give the groups made by [`set_apart`] the same schedule with a different warm-up.

    Args:
        scheduler ([`~torch.optim.lr_scheduler.LRScheduler`]): A scheduler before its first step.
        args ([`~transformers.TrainingArguments`]): Arguments that define the schedule.
        num_warmup_steps (`int`): Warm-up steps of these groups.
        num_training_steps (`int`): Steps of the whole run.

    Raises:
        ValueError: if the schedule depends on more than the step.
    """
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            "projector_warmup_steps needs a schedule that depends on the step alone; "
            f"lr_scheduler_type={args.lr_scheduler_type} does not."
        )
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
