"""A linear projection of the pooled embedding, trained and published with the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..utils.numerics import no_autocast, precise
from .granularity import EncoderConfig, Grid
from .states import shared_layers, width_of


# What to do where an objective reads what a published projection does not give.
FIT_EXITS = "A projection is of the last layer only: fit exits first (m3bert fit)."


class Projection(nn.Linear):
    """
    `S' = W S`, from the last layer's pooled embedding to fewer dims (IBKD,
    [2311.05472](https://huggingface.co/papers/2311.05472), Eq. 11). The rows of W are initialised orthonormal.
    Published as a Dense module of sentence-transformers.

    Args:
        hidden_size (`int`): Hidden size of the model.
        dim (`int`): Dims of the projected embedding, at most `hidden_size`.
        bias (`bool`, *optional*, defaults to `False`): Whether the map has a bias, as the exit of a native export has.
    """

    def __init__(self, hidden_size: int, dim: int, *, bias: bool = False):
        super().__init__(hidden_size, dim, bias=bias)
        nn.init.orthogonal_(self.weight)

    @classmethod
    def of(cls, linear: nn.Linear | None) -> Projection | None:
        """The projection with the weights of a published linear map; `None` if there is none."""
        if linear is None:
            return None
        projection = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        projection.load_state_dict(linear.state_dict())
        return projection

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Map `(..., hidden_size)` to `(..., dim)`, in float32 or wider, because the result is compared by cosine."""
        bias = None if self.bias is None else precise(self.bias)
        with no_autocast(vectors):
            return nn.functional.linear(precise(vectors), precise(self.weight), bias)

    def validate(self, objective: Any, config: EncoderConfig) -> None:
        """Raise a ValueError if the objective reads token hidden states, another layer than the last, or more dims
        than the projection has; or if the model's config has an `output_dim`: the projection reads all dims."""
        if width_of(config) != self.in_features:
            raise ValueError(
                f"A projection reads all dims: unset output_dim={width_of(config)} in the model's config."
            )
        if objective.reads_token_states:
            raise ValueError(f"{type(objective).__name__} reads token hidden states. {FIT_EXITS}")
        self.validate_grid(objective.grid, config, [config.num_hidden_layers])

    def validate_grid(self, grid: Grid, config: EncoderConfig, layers: Sequence[int] | None = None) -> None:
        """Raise a ValueError that names the granularities with more dims, or of other layers than these: by default,
        those with an exit into the projection's space."""
        layers = shared_layers(config) if layers is None else layers
        outside = [str(g) for g in grid if g.layer not in layers or g.dim > self.out_features]
        if outside:
            raise ValueError(
                f"The model projects layer {', '.join(map(str, layers))} to {self.out_features} dims; outside of it: "
                f"{', '.join(outside)}. {FIT_EXITS}"
            )
