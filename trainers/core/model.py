"""The module that the trainer trains: a backbone and an objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...encode.projection import Projection
from ...encode.ranks import is_sharded
from ...encode.states import TextStates, transformer_layers
from .column_states import column_states
from .objective import NestedBatch, Objective


NOT_INPUTS = ("text_ids", "teacher")  # entries of a text column that the encoder does not read


class NestedModel(nn.Module):
    """
    Backbone and objective as one module. A wrapper (DDP, FSDP, torch.compile) then sees every parameter, and the
    forward pass of the backbone runs inside the wrapper's.

    Args:
        backbone ([`~transformers.PreTrainedModel`] or peft model): Encoder, with or without a head.
        objective ([`Objective`]): The objective to minimise.
        mini_batch_size (`int`, *optional*): Cache gradients: as many tokens as this number of the longest texts has
            are encoded at a time ([`column_states`]). Default: the graph of all texts is kept.
        projection ([`Projection`], *optional*): Projection of the last layer's pooled embedding. The objective reads
            the projected embedding.

    Raises:
        ValueError: if `mini_batch_size` is given for an objective that reads token hidden states.
    """

    def __init__(
        self,
        backbone: Any,
        objective: Objective,
        mini_batch_size: int | None = None,
        projection: Projection | None = None,
    ):
        super().__init__()
        if mini_batch_size is not None and objective.pooling is None:
            raise ValueError(f"{type(objective).__name__} reads token hidden states: its gradients cannot be cached.")
        self.backbone: Any = backbone
        self.objective: Objective = objective
        self.mini_batch_size = mini_batch_size
        self.projection = projection

    @property
    def config(self) -> Any:
        return self.backbone.config

    @property
    def _no_split_modules(self) -> list[str]:
        """Names of the classes that accelerate's FSDP wraps: the transformer layers. Some encoders also name their
        embeddings, which must stay with the head and the objective: a step reads them outside of their module."""
        return sorted({type(layer).__name__ for layer in transformer_layers(self.backbone)})

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Tells [`~transformers.Trainer`] whether the loss is already divided by `num_items_in_batch`."""
        return self.objective.normalizes_by_num_items

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        self.backbone.activation_checkpointing_enable(**kwargs)

    def forward(
        self, labels: torch.Tensor | None = None, num_items_in_batch: torch.Tensor | int | None = None, **inputs: Any
    ) -> dict[str, Any]:
        """
        Args:
            labels (`torch.Tensor`, *optional*): Passed to the objective.
            num_items_in_batch (`torch.Tensor` or `int`, *optional*): Passed to the objective.
            inputs: Either one text per row (`input_ids`, `attention_mask`, ...), or several named text columns, each
                a mapping of these tensors. A column may also have `text_ids`, which mark equal texts, and `teacher`,
                the embeddings of a teacher.

        Returns:
            `dict`: `loss`, a scalar, and `terms`, the terms of the objective, without gradient.
        """
        columns = columns_of(inputs)
        batch = NestedBatch(
            texts=self.encode(columns),
            text_ids=of_all(columns, "text_ids"),
            teacher=of_all(columns, "teacher"),
            labels=labels,
            output_embeddings=self.backbone.get_output_embeddings(),
            num_items_in_batch=num_items_in_batch,
        )
        terms = self.objective(batch)
        return {"loss": self.objective.total(terms), "terms": {term: value.detach() for term, value in terms.items()}}

    def encode(self, columns: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, TextStates]:
        """Text column -> the hidden states that the objective reads; empty if it reads none."""
        if not self.objective.layers:
            return {}
        inputs = {
            name: {entry: value for entry, value in column.items() if entry not in NOT_INPUTS}
            for name, column in columns.items()
        }
        states = column_states(
            self.backbone,
            inputs,
            self.objective.state_keys,
            self.objective.pooling,
            self.mini_batch_size,
            same_passes=is_sharded(self),
        )
        if self.projection is None:
            return states
        depth = self.config.num_hidden_layers
        return {name: text.projected(depth, self.projection) for name, text in states.items()}


def columns_of(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text columns among the inputs of a step: text column -> tensors. One text per row is the column `text`."""
    return {name: value for name, value in inputs.items() if isinstance(value, Mapping)} or {"text": inputs}


def of_all(columns: Mapping[str, Mapping[str, torch.Tensor]], name: str) -> dict[str, torch.Tensor] | None:
    """Column -> its entry of this name; `None` unless every column has one."""
    entries = {column: values[name] for column, values in columns.items() if name in values}
    return entries if len(entries) == len(columns) else None
