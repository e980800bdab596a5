"""Mixtures of a contrastive loss over a grid and regularisers: the base of MIPIC and MIC."""

from __future__ import annotations

from dataclasses import dataclass

from ..encode.granularity import EncoderConfig, Grid
from ..utils.help_texts import described
from .contrastive.contrastive import Contrastive, ContrastiveConfig
from .core.composition import Composition, mapping_of
from .core.objective import Objective
from .embedding.trainer import EmbeddingTrainer
from .mic.objectives import SCR, SIR
from .mipic.pic import PIC
from .mipic.sia import SIA


REGULARISERS: dict[str, type[Objective]] = {"sia": SIA, "pic": PIC, "scr": SCR, "sir": SIR}
PARTS = ("mrl", *REGULARISERS)


@described
@dataclass
class MixtureConfig(ContrastiveConfig):
    """
    Configuration of [`MixtureTrainer`], in addition to the fields of [`ContrastiveConfig`], which configure the part
    `mrl`.

    Args:
        > Parameters that control the parts of the loss

        weights (`dict[str, float]`, *optional*): Weights of the parts of the loss, as JSON or a YAML mapping. The
            parts are `mrl` (the contrastive loss over the grid), `sia`, `pic`, `scr` and `sir`. A weight replaces the
            default of the method, and 0 leaves the part out: with MIPIC, `{sir: 0.3}` adds SIR and `{sia: 0}` leaves
            out SIA.
        sia (`dict`, *optional*): Arguments of [`SIA`], as JSON or a YAML mapping, such as `{layers: [4, 12]}`.
        pic (`dict`, *optional*): Arguments of [`PIC`], as JSON or a YAML mapping, such as `{pooling: mean}` or
            `{chain: "2x16,4x32,12x768"}`.
        scr (`dict`, *optional*): Arguments of [`SCR`], as JSON or a YAML mapping, such as `{threshold: 0.2}`.
        sir (`dict`, *optional*): Arguments of [`SIR`], as JSON or a YAML mapping, such as `{layers: [8, 10]}`.

    Parts have the `pooling` and the `temperature` of this config unless their own arguments name others. The default
    grid is the last layer at 16, 32, 64, ... dims and the hidden size. The grid must include the full size.

    Raises:
        ValueError: if a part or one of its arguments is unknown, or a value is out of range.
    """

    weights: dict | str | None = None
    sia: dict | str | None = None
    pic: dict | str | None = None
    scr: dict | str | None = None
    sir: dict | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weights = mapping_of("weights", self.weights, PARTS)
        for name, part in REGULARISERS.items():
            setattr(self, name, mapping_of(name, getattr(self, name), part.argument_names()))

    def method_weights(self) -> dict[str, float]:
        """Default weights of the method; parts that are not named have the weight 0."""
        return {"mrl": 1.0}

    def grid_for(self, config: EncoderConfig) -> Grid:
        if self.grid is not None or self.projection_dim is not None:
            return super().grid_for(config)
        return Grid.product([config.num_hidden_layers], Grid.of(config).dims)

    def build_objective(self, grid: Grid) -> Composition:
        weights = self.method_weights() | mapping_of("weights", self.weights)
        arguments = self.objective_arguments()
        parts: dict[str, tuple[float, Objective]] = {"mrl": (weights["mrl"], Contrastive(grid, **arguments))}
        for name, part in REGULARISERS.items():
            if weights.get(name):
                shared = {key: value for key, value in arguments.items() if key in part.argument_names()}
                parts[name] = (weights[name], part.for_grid(grid, **shared | getattr(self, name)))
        return Composition(parts)


class MixtureTrainer(EmbeddingTrainer):
    """
    Any weighted sum of MRL, SIA, PIC, SCR and SIR, with a [`MixtureConfig`]. MIPIC and MIC are two of them.
    """
