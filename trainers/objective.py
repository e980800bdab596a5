"""What a trainer minimises: nested states of a batch in, named scalar terms out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .granularity import Granularity, Grid
from .nested import Pooling, TextStates


@dataclass(frozen=True)
class NestedBatch:
    """
    What an objective sees of a batch.

    Args:
        texts (`Mapping[str, NestedStates]`): The states of each text column, in the order of the columns;
            [`PooledStates`] where gradients are cached, [`ProjectedStates`] where the model has a projection.
        text_ids (`Mapping[str, torch.Tensor]`, *optional*): For each text column, a number a text, the same for equal
            texts, `(batch,)`.
        teacher (`Mapping[str, torch.Tensor]`, *optional*): For each text column, a teacher's embeddings of the texts,
            `(batch, teacher_dim)`.
        labels (`torch.Tensor`, *optional*): Labels, as the collator made them.
        output_embeddings (`nn.Module`, *optional*): The vocabulary projection of a backbone with a language-model
            head.
        num_items_in_batch (`torch.Tensor` or `int`, *optional*): Labelled tokens of the whole optimizer step, across
            accumulated batches and devices.
    """

    texts: Mapping[str, TextStates]
    text_ids: Mapping[str, torch.Tensor] | None = None
    teacher: Mapping[str, torch.Tensor] | None = None
    labels: torch.Tensor | None = None
    output_embeddings: nn.Module | None = None
    num_items_in_batch: torch.Tensor | int | None = None


class Objective(nn.Module):
    """
    Base of all objectives. An objective owns its auxiliary parameters (projectors): they train with the backbone, are
    kept in training checkpoints, and are left out of what is published.

    Args:
        grid ([`Grid`]): The granularities to train.

    Class attributes:
        normalizes_by_num_items (`bool`): `True` for a sum over tokens that is divided by `num_items_in_batch` when it
            is given; `False` for a mean over the batch, which the trainer then divides by the accumulation steps.
        needs_full_size (`bool`): `True` where the full depth at full width is a teacher and must be in the grid.
        pooling (`str`, *optional*): How texts are pooled where pooled embeddings are all that the objective reads, so
            that its gradients can be cached; `None` where it reads token states.
    """

    name: str
    normalizes_by_num_items = False
    needs_full_size = False
    pooling: Pooling | None = None

    def __init__(self, grid: Grid):
        super().__init__()
        self.grid = grid

    @property
    def layers(self) -> list[int]:
        """Layers whose states [`forward`] needs."""
        return self.grid.layers

    @property
    def reads_token_states(self) -> bool:
        """Whether it reads more of a text than pooled embeddings, of one kind or several."""
        return self.pooling is None

    def validate(self, config: Any) -> None:
        """
        Check that a backbone of this config has what the objective reads.

        Raises:
            ValueError: names the granularities outside of the model, or the full size where it is missing.
        """
        self.grid.validate(config)
        if self.needs_full_size:
            self.grid.require_full_size(config)

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        """Named scalar terms, unweighted."""
        raise NotImplementedError(f"{type(self).__name__} must define forward.")

    def total(self, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss that these terms make: their sum, unless an objective says otherwise."""
        return torch.stack(list(terms.values())).sum()

    def term(self, granularity: Granularity) -> str:
        """Name of this objective's term at a granularity, as it is logged."""
        return f"{self.name}_{granularity}"
