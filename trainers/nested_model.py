"""What a trainer trains: a backbone and an objective as one module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .gradient_caching import cached_states
from .nested import NestedStates, PooledStates, ProjectedStates, TextStates, nested_states
from .objective import NestedBatch, Objective
from .projection import Projection


NOT_INPUTS = ("text_ids", "teacher")  # what a text column has that is not for the encoder


class NestedModel(nn.Module):
    """
    Backbone and objective as one module, so that whatever wraps it (DDP, FSDP, torch.compile) sees every parameter,
    and the backbone's forward runs inside of the wrapper's.

    Args:
        backbone ([`~transformers.PreTrainedModel`] or peft model): Encoder, with or without a head.
        objective ([`Objective`]): What to minimise.
        mini_batch_size (`int`, *optional*): Texts to encode at a time, with their gradients cached
            ([`cached_states`]); by default all at once.
        projection ([`Projection`], *optional*): Of the last layer's pooled embedding, which is then what the objective
            reads.

    Raises:
        ValueError: if gradients are to be cached for an objective that reads token states.
    """

    def __init__(
        self,
        backbone: nn.Module,
        objective: Objective,
        mini_batch_size: int | None = None,
        projection: Projection | None = None,
    ):
        super().__init__()
        if mini_batch_size is not None and mini_batch_size < 1:
            raise ValueError(f"mini_batch_size={mini_batch_size} must be 1 or more.")
        if mini_batch_size is not None and objective.pooling is None:
            raise ValueError(f"{type(objective).__name__} reads token states: its gradients cannot be cached.")
        self.backbone = backbone
        self.objective = objective
        self.mini_batch_size = mini_batch_size
        self.projection = projection

    @property
    def config(self) -> Any:
        return self.backbone.config

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Read by the Trainer: whether the loss is divided by `num_items_in_batch` in here."""
        return self.objective.normalizes_by_num_items

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        self.backbone.activation_checkpointing_enable(**kwargs)

    def forward(
        self,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **inputs: Any,
    ) -> dict[str, Any]:
        """
        Args:
            labels (`torch.Tensor`, *optional*): Passed to the objective.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Passed to the objective.
            inputs: One text a row (`input_ids`, `attention_mask`, ...), or several named text columns, each a mapping
                of those, with `text_ids` where the objective is to know equal texts, and `teacher` where it has one.

        Returns:
            `dict`: `loss`, a scalar, and `terms`, the objective's named terms.
        """
        columns = inputs if all(isinstance(value, Mapping) for value in inputs.values()) else {"text": inputs}
        batch = NestedBatch(
            texts={name: self.encode(column) for name, column in columns.items()},
            text_ids=of_all(columns, "text_ids"),
            teacher=of_all(columns, "teacher"),
            labels=labels,
            output_embeddings=self.backbone.get_output_embeddings(),
            num_items_in_batch=num_items_in_batch,
        )
        terms = self.objective(batch)
        return {"loss": self.objective.total(terms), "terms": terms}

    def encode(self, column: Mapping[str, torch.Tensor]) -> TextStates:
        """The states of one text column that the objective reads."""
        inputs = {name: value for name, value in column.items() if name not in NOT_INPUTS}
        layers, pooling = self.objective.layers, self.objective.pooling
        states: NestedStates | PooledStates
        if self.mini_batch_size is None or pooling is None:
            states = nested_states(self.backbone, inputs, layers)
        else:
            states = cached_states(self.backbone, inputs, layers, pooling, self.mini_batch_size)
        if self.projection is None:
            return states
        return ProjectedStates(states, self.projection, self.config.num_hidden_layers)


def of_all(columns: Mapping[str, Mapping[str, torch.Tensor]], name: str) -> dict[str, torch.Tensor] | None:
    """What every column has beside its inputs under this name; None unless all have it."""
    found = {column: values[name] for column, values in columns.items() if name in values}
    return found if len(found) == len(columns) else None
