"""A projection that belongs to a student: it is trained with it and published with it."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.utils.hub import cached_file

from .embedding_modules import dense_config, published_modules, read_published, width_of
from .granularity import Grid
from .losses._blocks import no_autocast, precise
from .objective import Objective


class Projection(nn.Linear):
    """
    `S' = W S`, from the last layer's pooled embedding to fewer dims (IBKD,
    [2311.05472](https://huggingface.co/papers/2311.05472), Eq. 11). Starts as orthonormal rows, which keep angles as
    well as any fixed projection can. [`write_modules`] publishes it.

    Args:
        hidden_size (`int`): Width of the student.
        dim (`int`): Dims of the embedding, at most `hidden_size`.

    Raises:
        ValueError: if `dim` is out of range.
    """

    def __init__(self, hidden_size: int, dim: int):
        if not 0 < dim <= hidden_size:
            raise ValueError(f"projection_dim={dim} must be within 1..{hidden_size}, the model's width.")
        super().__init__(hidden_size, dim, bias=False)
        nn.init.orthogonal_(self.weight)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """`(..., hidden_size)` to `(..., dim)`, in float32 at least: the result is compared by cosine."""
        with no_autocast(vectors):
            return nn.functional.linear(precise(vectors), self.weight)

    def validate(self, objective: Objective, config: Any) -> None:
        """
        Check that an objective reads nothing that the projection does not give, and that the model, as it is
        published, gives the projection what it reads.

        Raises:
            ValueError: if it reads token states, another layer than the last, or more dims; or if the model's config
                has an `output_dim`.
        """
        if width_of(config) != self.in_features:
            raise ValueError(f"A projection reads the full width: unset output_dim={config.output_dim} of the config.")
        if objective.reads_token_states:
            raise ValueError(f"{type(objective).__name__} reads token states, which a projection does not give.")
        self.validate_grid(objective.grid, config)

    def validate_grid(self, grid: Grid, config: Any) -> None:
        """
        Check that all granularities are of the last layer, and of no more dims than there are.

        Raises:
            ValueError: names those that are not.
        """
        depth = config.num_hidden_layers
        outside = [str(g) for g in grid if g.layer != depth or g.dim > self.out_features]
        if outside:
            raise ValueError(
                f"The model projects layer {depth} to {self.out_features} dims; outside of it: {', '.join(outside)}."
            )

    @classmethod
    def find(cls, name_or_path: str, **options: Any) -> Projection | None:
        """
        The projection that was published with an encoder, if there is one.

        Args:
            name_or_path (`str`): Folder or Hub id.
            options (*optional*): `revision` and the like.

        Raises:
            ValueError: if there is more than one linear map behind the pooling, or it is more than a matrix.
        """
        folders = published_modules(name_or_path, "Dense", **options)
        if not folders:
            return None
        residual = {"use_residual": False}  # what older files do not say
        config = residual | read_published(name_or_path, f"{folders[0]}/config.json", **options)
        plain = residual | dense_config(config["in_features"], config["out_features"])
        if len(folders) > 1 or any(config.get(name) != value for name, value in plain.items()):
            raise ValueError(
                f"{name_or_path} has more behind its pooling than one matrix ({', '.join(folders)}), which is not "
                "read here."
            )
        projection = cls(config["in_features"], config["out_features"])
        weight = load_file(cached_file(name_or_path, f"{folders[0]}/model.safetensors", **options))["linear.weight"]
        projection.load_state_dict({"weight": weight})
        return projection
