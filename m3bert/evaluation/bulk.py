"""Embed collections of any size with a framework that maps a function over batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ..data.collators import joined_texts, separator_for
from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity
from ..utils.columns import Role


@dataclass(eq=False)
class GridEmbedder:
    """
    Adds embeddings to batches of rows. It is sent to worker processes without its encoder, which each of them loads at
    its first batch.

    - datasets: `rows.map(GridEmbedder(load), batched=True)`
    - Ray Data: `rows.map_batches(GridEmbedder, fn_constructor_kwargs={"load": load}, ...)`

    Args:
        load (`Callable[[], GridEncoder]`): Loads the encoder. It must be possible to pickle it.
        text_column (`str`, *optional*, defaults to `"text"`): Column with the text; `"title+text"` joins two with the
            separator token.
        role (`str`, *optional*, defaults to `"document"`): Role of the texts, which selects their prompt and their
            maximum length.
        normalize (`bool`, *optional*, defaults to `False`): Whether to L2-normalise the embeddings.
    """

    load: Callable[[], GridEncoder]
    text_column: str = "text"
    role: Role = "document"
    normalize: bool = False

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "encoder"}

    @cached_property
    def encoder(self) -> GridEncoder:
        """The encoder of this process."""
        return self.load()

    def __call__(self, batch: Mapping[str, Sequence[object]]) -> dict[str, object]:
        """The same columns, and `layer_{l}` per layer: arrays `(rows, widest dim)`. There may be no rows. ValueError
        if a text column of a row is missing or not text."""
        grid, dtype = self.encoder.grid, self.encoder.dtype
        widest = {f"layer_{layer}": Granularity(layer, grid.dims_of(layer)[-1]) for layer in grid.layers}
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        if not rows:  # the part of an engine's data that is empty
            return {**batch, **{name: torch.empty((0, g.dim), dtype=dtype).numpy() for name, g in widest.items()}}
        separator = separator_for([self.text_column], self.encoder.tokenizer)
        embeddings = self.encoder.encode([*joined_texts(rows, self.text_column, separator)], role=self.role)
        vectors = {name: embeddings.at(g, normalize=self.normalize).to(dtype) for name, g in widest.items()}
        return {**batch, **{name: tensor.numpy() for name, tensor in vectors.items()}}
