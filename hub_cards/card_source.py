"""Everything that the card of a checkpoint is generated from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..encode.granularity import Granularity, Grid
from ..evaluation.results import GridResults, Latency
from .checkpoint import Checkpoint
from .choices import Headline
from .metadata import Statements
from .onnx_graphs import GraphReport


@dataclass(frozen=True)
class CardSource:
    """
    Everything a card is generated from.

    Args:
        repo_id (`str`): The repository, `user/model`.
        checkpoint ([`Checkpoint`]): The checkpoint in its published form.
        results ([`GridResults`], *optional*): Its evaluation.
        statements ([`Statements`], *optional*): What only a person knows.
        figures (`dict[str, str]`): Path of a figure in the repository -> its title.
        onnx ([`GraphReport`], *optional*): The ONNX graphs in the repository.
        cut (`str`, *optional*): For a model taken from a larger checkpoint: `"4x64 of 12x768"`.
        branches (`Sequence[str]`): Branches of the repository that hold one size each.
    """

    repo_id: str
    checkpoint: Checkpoint
    results: GridResults | None = None
    statements: Statements = field(default_factory=Statements)
    figures: Mapping[str, str] = field(default_factory=dict)
    onnx: GraphReport | None = None
    cut: str | None = None
    branches: Sequence[str] = ()

    @property
    def base_model(self) -> str | None:
        """Hub id of the base model; `None` if unknown."""
        record = self.checkpoint.record
        recorded = record.base_model if record else None
        exported = (self.checkpoint.exported_from or {}).get("converted_from")
        return self.statements.base_model or recorded or self.checkpoint.source or exported

    @property
    def embeds(self) -> bool:
        """Whether the model embeds texts: it has no other head."""
        return self.checkpoint.head == "AutoModel"

    @property
    def small(self) -> Granularity | None:
        """A granularity well below the full one; `None` if there is no other."""
        grid, full = self.checkpoint.grid, self.checkpoint.full
        layer = grid.layers[len(grid.layers) // 2] if len(grid.layers) > 2 else grid.layers[0]
        dims = grid.dims_of(layer)
        small = Granularity(layer, dims[(len(dims) - 1) // 2])
        return small if small != full else None

    @property
    def shown(self) -> Grid:
        """The granularities whose costs are shown."""
        return Grid(tuple({*self.checkpoint.grid, *(self.results.granularities.sizes if self.results else ())}))

    @property
    def latency(self) -> Latency | None:
        return self.results.latency if self.results else None

    @cached_property
    def headline(self) -> Headline | None:
        return Headline.of(self.results)

    @property
    def query_layer(self) -> int | None:
        """The depth of the queries in the examples: the advised one, or else the one nearest to a third of all layers;
        `None` without an exit below the last layer."""
        below, headline = self.checkpoint.query_layers, self.headline
        advised = headline.advised if headline is not None and headline.asymmetric else None
        if advised is not None and advised.granularity.layer in below:
            return advised.granularity.layer
        third = self.checkpoint.full.layer / 3
        return min(below, key=lambda depth: (abs(depth - third), depth), default=None)
