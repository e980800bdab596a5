"""A projection that belongs to a student: it is trained with it and published with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.utils.hub import cached_file

from .granularity import Grid
from .losses._blocks import no_autocast, precise
from .nested import Pooling
from .objective import Objective
from .teacher import require_sentence_transformers


POOLING_FOLDER, PROJECTION_FOLDER = "1_Pooling", "2_Dense"


class Projection(nn.Linear):
    """
    `S' = W S`, from the last layer's pooled embedding to fewer dims (IBKD,
    [2311.05472](https://huggingface.co/papers/2311.05472), Eq. 11). Starts as orthonormal rows, which keep angles as
    well as any fixed projection can.

    Args:
        hidden_size (`int`): Width of the student.
        dim (`int`): Dims of the embedding, at most `hidden_size`.
        pooling (`str`, *optional*, defaults to `"mean"`): How the embedding is pooled, `"mean"` or `"anchor"`.

    Raises:
        ValueError: if `dim` is out of range.
    """

    def __init__(self, hidden_size: int, dim: int, pooling: Pooling = "mean"):
        if not 0 < dim <= hidden_size:
            raise ValueError(f"projection_dim={dim} must be within 1..{hidden_size}, the model's width.")
        super().__init__(hidden_size, dim, bias=False)
        nn.init.orthogonal_(self.weight)
        self.pooling = pooling

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """`(..., hidden_size)` to `(..., dim)`, in float32 at least: the result is compared by cosine."""
        with no_autocast(vectors):
            return nn.functional.linear(precise(vectors), self.weight)

    def save(self, folder: str | Path, causal: bool = False) -> None:
        """
        Write pooling and projection beside an encoder, as modules of sentence-transformers:
        `SentenceTransformer(folder)` gives the projected embedding, `AutoModel` the encoder.

        Args:
            folder (`Path`): Where the encoder is.
            causal (`bool`, *optional*, defaults to `False`): Whether the anchor is the last token.
        """
        modules = require_sentence_transformers("A projection").sentence_transformer.modules
        folder = Path(folder)
        mode = "mean" if self.pooling == "mean" else "lasttoken" if causal else "cls"
        dense = modules.Dense(
            self.in_features, self.out_features, bias=False, activation_function=nn.Identity(), init_weight=self.weight
        )
        parts = {
            "": modules.Transformer,
            POOLING_FOLDER: modules.Pooling(self.in_features, pooling_mode=mode),
            PROJECTION_FOLDER: dense,
        }
        for name, part in parts.items():
            if name:
                (folder / name).mkdir(exist_ok=True)
                part.save(str(folder / name))
        kinds = [part if isinstance(part, type) else type(part) for part in parts.values()]
        listed = [
            {"idx": index, "name": str(index), "path": name, "type": f"{kind.__module__}.{kind.__qualname__}"}
            for index, (name, kind) in enumerate(zip(parts, kinds, strict=True))
        ]
        (folder / "modules.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")

    def validate(self, objective: Objective, config: Any) -> None:
        """
        Check that an objective reads nothing that the projection does not give.

        Raises:
            ValueError: if it reads token states, another layer than the last, or more dims.
        """
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
        """
        file = cached_file(
            name_or_path,
            f"{PROJECTION_FOLDER}/model.safetensors",
            _raise_exceptions_for_missing_entries=False,
            **options,
        )
        if file is None:
            return None
        weight = load_file(file)["linear.weight"]
        file = cached_file(name_or_path, f"{POOLING_FOLDER}/config.json", **options)
        mean = json.loads(Path(file).read_text(encoding="utf-8"))["pooling_mode"] == "mean"
        projection = cls(weight.shape[1], weight.shape[0], "mean" if mean else "anchor")
        projection.load_state_dict({"weight": weight})
        return projection
