"""Training arguments that all trainers share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import TrainingArguments

from .granularity import Grid


@dataclass
class NestedTrainingArguments(TrainingArguments):
    """
    [`~transformers.TrainingArguments`] and the grid to train.

    Args:
        grid (`str`, *optional*): Granularities to train; see [`Grid.parse`]. Defaults to `matryoshka_layers` x
            `matryoshka_dims` of the model's config.
        projector_learning_rate (`float`, *optional*): Of a projection and of the objective's own parameters
            (projectors, a learned temperature), which start untrained beside a trained backbone. Default:
            `learning_rate`.
        projector_warmup_steps (`float`, *optional*): Of the same, as `warmup_steps`: a number of steps, or below 1 a
            share of all. Default: `warmup_steps`.

    Raises:
        ValueError: if the grid cannot be parsed, or a value is out of range.
    """

    # Whether the grid is the model's full size where none is given, rather than what its config names.
    full_size_by_default: ClassVar[bool] = False

    grid: str | None = field(
        default=None,
        metadata={
            "help": "Granularities to train, e.g. '4,8,12x32,64,768' or '2x16,12x768'. Default: the model's own."
        },
    )

    projector_learning_rate: float | None = field(
        default=None, metadata={"help": "Of the objective's own parameters. Default: learning_rate."}
    )
    projector_warmup_steps: float | None = field(
        default=None, metadata={"help": "Of the objective's own parameters. Default: warmup_steps."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid is not None:
            Grid.parse(self.grid)
        for name in ("projector_learning_rate", "projector_warmup_steps"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} must not be negative.")

    @property
    def has_projector_schedule(self) -> bool:
        """Whether the objective's parameters have a learning rate or a warm-up of their own."""
        return self.projector_learning_rate is not None or self.projector_warmup_steps is not None

    def projector_warmup_steps_of(self, num_training_steps: int) -> int:
        """`projector_warmup_steps` as a number of steps."""
        steps = self.projector_warmup_steps or 0
        return int(steps) if steps >= 1 else math.ceil(num_training_steps * steps)

    def grid_for(self, config: Any) -> Grid:
        """
        The grid to train on a model of this config.

        Raises:
            ValueError: if no grid was given and the model names none, or the model does not have it.
        """
        if self.grid is not None:
            return Grid.parse(self.grid).validate(config)
        if self.full_size_by_default:
            return Grid.full_size(config)
        values = config.to_dict()
        layers, dims = values.get("matryoshka_layers"), values.get("matryoshka_dims")
        if not layers or not dims:
            raise ValueError("The model's config names no matryoshka_layers and matryoshka_dims: pass grid='...'.")
        return Grid.product(layers, dims).validate(config)
