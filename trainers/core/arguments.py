"""Training arguments that all trainers share."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import TrainingArguments

from .device import has_accelerator
from .granularity import Grid
from .help_texts import described
from .objective import Objective
from .parallel.fsdp import require_accelerator


@described
@dataclass
class NestedTrainingArguments(TrainingArguments):
    """
    [`~transformers.TrainingArguments`] with the grid to train. A subclass names its objective in `objective_class`.
    Fields with the name of an argument of that objective are passed to it.

    Args:
        grid (`str`, *optional*): Granularities to train, as layers x dims (`4,8,12x32,64,768`) or as a list
            (`2x16,12x768`). Default: `matryoshka_layers` x `matryoshka_dims` of the model's config.
        projector_learning_rate (`float`, *optional*): Learning rate of the projection and of the objective's own
            parameters (projectors, a learned temperature), which start untrained, unlike the backbone. Default:
            `learning_rate`.
        projector_warmup_steps (`float`, *optional*): Warm-up of the projection and of the objective's own parameters:
            a number of steps, or a share of all steps if below 1. Default: `warmup_steps`.
        shuffle_buffer_size (`int`, *optional*, defaults to 10000): For streams: number of rows that are read ahead and
            shuffled. The order of the shards is shuffled, too. 0 reads shards and rows in their order.
        report_throughput (`bool`, *optional*, defaults to `False`): Log `tokens_per_second` of all devices together,
            without padding, and `mfu`, the share of the devices' peak that the model uses, in half precision on
            devices whose peak is known. The time is that since the last log.

    Raises:
        ValueError: if the grid cannot be parsed, a value is out of range, or `fsdp` is set on a CPU.
    """

    objective_class: ClassVar[type[Objective]]
    # Whether the default grid is the model's full size, rather than the grid in the model's config.
    full_size_by_default: ClassVar[bool] = False

    grid: str | None = None
    projector_learning_rate: float | None = None
    projector_warmup_steps: float | None = None
    shuffle_buffer_size: int = 10_000
    report_throughput: bool = False

    def __post_init__(self) -> None:
        switches: dict[Any, Any] = {"true": True, "false": None}  # as the other switches of the command line
        self.fsdp: Any = switches.get(self.fsdp, self.fsdp)
        super().__post_init__()
        require_accelerator(self)
        if not has_accelerator():
            self.dataloader_pin_memory = False  # there is nothing to pin memory for, and torch would warn
        if self.grid is not None:
            Grid.parse(self.grid)
        for name in ("projector_learning_rate", "projector_warmup_steps", "shuffle_buffer_size"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} must not be negative.")

    @property
    def has_projector_schedule(self) -> bool:
        """Whether the objective's parameters have their own learning rate or warm-up."""
        return self.projector_learning_rate is not None or self.projector_warmup_steps is not None

    def projector_warmup_steps_of(self, num_training_steps: int) -> int:
        """`projector_warmup_steps` as a number of steps."""
        steps = self.projector_warmup_steps or 0
        return int(steps) if steps >= 1 else math.ceil(num_training_steps * steps)

    def grid_for(self, config: Any) -> Grid:
        """
        The grid to train on a model of this config.

        Raises:
            ValueError: if neither the arguments nor the model's config name a grid, or the grid is outside the model.
        """
        if self.grid is not None:
            return Grid.parse(self.grid).validate(config)
        if self.full_size_by_default:
            return Grid.full_size(config)
        values = config.to_dict()
        layers, dims = values.get("matryoshka_layers"), values.get("matryoshka_dims")
        if not layers or not dims:
            raise ValueError(
                "The model's config names no matryoshka_layers and matryoshka_dims: pass grid, such as "
                "'4,8,12x32,64,768'."
            )
        return Grid.product(layers, dims).validate(config)

    def objective_arguments(self, objective_class: type[Objective]) -> dict[str, Any]:
        """The fields of this config that are arguments of the objective, with their values."""
        names = {field.name for field in dataclasses.fields(self)}
        return {name: getattr(self, name) for name in objective_class.argument_names() if name in names}

    def build_objective(self, grid: Grid) -> Objective:
        """
        Build the objective that this config describes.

        Args:
            grid ([`Grid`]): The granularities to train, from [`~NestedTrainingArguments.grid_for`].

        Returns:
            [`Objective`]

        Raises:
            ValueError: if an argument of the objective is out of range.
        """
        return self.objective_class.for_grid(grid, **self.objective_arguments(self.objective_class))
