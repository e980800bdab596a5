"""Matryoshka contrastive training with regularisers in any mixture: what MIPIC and MIC have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from . import papers
from .composition import Composition
from .contrastive import Contrastive, ContrastiveConfig
from .embedding import EmbeddingTrainer
from .granularity import Granularity, Grid
from .nested import Pooling
from .objective import Objective
from .regularizers import PIC, SCR, SIA, SIR


PARTS = ("mrl", "sia", "pic", "scr", "sir")


@dataclass
class RegularizedConfig(ContrastiveConfig):
    """
    Configuration of [`RegularizedTrainer`]: that of [`ContrastiveConfig`], and

    Args:
        weights (`dict[str, float]`, *optional*): Part of the loss -> weight: `"mrl"` (the contrastive loss over the
            grid), `"sia"`, `"pic"`, `"scr"`, `"sir"`. A part named here counts that much in place of what the method
            gives it; 0 leaves it out. `{"sir": 0.3}` adds SIR to MIPIC, `{"sia": 0}` is its ablation without SIA.
        sia_layers (`list[int]`, *optional*): Layers of SIA. Default: evenly spaced, one for each dim of the grid, the
            last layer among them.
        sia_temperature (`float`, *optional*, defaults to 0.05): See [`SIA`], as for all that follow.
        sia_attention_weight (`float`, *optional*, defaults to 1.0): Of its attention terms.
        sia_cka_weight (`float`, *optional*, defaults to 1.0): Of its CKA terms.
        sia_token_shares (`list[float]`, *optional*): gamma of each dim below the full width. Default: 0.2 to 0.7.
        sia_smallest_token_count (`int`, *optional*, defaults to 8): The fewest tokens aligned.
        pic_checkpoints (`str`, *optional*): The chain, a grid such as `"2x16,4x32,12x768"`; see [`PIC`]. Default: the
            dims of the grid at evenly spaced layers.
        pic_temperature (`float`, *optional*, defaults to 0.05): tau of the chain.
        pic_pooling (`str`, *optional*, defaults to `"anchor"`): What is chained, `"anchor"` or `"mean"`.
        pic_detach_target (`bool`, *optional*, defaults to `False`): Whether the deeper end of a link is a teacher.
        isotropy_layers (`list[int]`, *optional*): Layers of SCR and SIR. Default: at two thirds and five sixths of the
            depth (MIC, appendix D: 8 and 10 of 12).
        scr_threshold (`float`, *optional*, defaults to 0.1): See [`SCR`].
        scr_variance_weight (`float`, *optional*, defaults to 0.1): See [`SCR`].
        sir_scale (`float`, *optional*, defaults to 2.0): See [`SIR`].
        sir_pooling (`str`, *optional*, defaults to `"mean"`): See [`SIR`].
        sir_variation_weight (`float`, *optional*, defaults to 1.0): Of its coefficient of variation.
        sir_uniformity_weight (`float`, *optional*, defaults to 1.0): Of its uniformity.

    `grid` is the last layer at 16, 32, 64, ... dims and the full width by default, and always has the full size.

    Raises:
        ValueError: if a part is unknown or a value is out of range.
    """

    weights: dict | str | None = field(
        default=None,
        metadata={"help": 'Part of the loss -> weight, as JSON or a YAML mapping: {"sir": 0.3}; 0 leaves it out.'},
    )
    sia_layers: list[int] | None = field(default=None, metadata={"help": "Layers of SIA. Default: evenly spaced."})
    sia_temperature: float = field(default=0.05, metadata={"help": "Of SIA's attention."})
    sia_attention_weight: float = field(default=1.0, metadata={"help": "Of SIA's attention terms."})
    sia_cka_weight: float = field(default=1.0, metadata={"help": "Of SIA's CKA terms."})
    sia_token_shares: list[float] | None = field(
        default=None, metadata={"help": "Share of tokens for each dim below the full width. Default: 0.2 to 0.7."}
    )
    sia_smallest_token_count: int = field(default=8, metadata={"help": "The fewest tokens that SIA aligns."})
    pic_checkpoints: str | None = field(
        default=None, metadata={"help": "Chain of PIC, e.g. '2x16,4x32,12x768'. Default: evenly spaced layers."}
    )
    pic_temperature: float = field(default=0.05, metadata={"help": "PIC divides cosines by it."})
    pic_pooling: Pooling = field(default="anchor", metadata={"help": "What PIC chains: 'anchor' or 'mean'."})
    pic_detach_target: bool = field(default=False, metadata={"help": "No gradient to the deeper end of a link."})
    isotropy_layers: list[int] | None = field(
        default=None, metadata={"help": "Layers of SCR and SIR. Default: two thirds and five sixths of the depth."}
    )
    scr_threshold: float = field(default=0.1, metadata={"help": "Correlation that SCR tolerates."})
    scr_variance_weight: float = field(default=0.1, metadata={"help": "Of SCR's variance floor."})
    sir_scale: float = field(default=2.0, metadata={"help": "t of SIR's uniformity."})
    sir_pooling: Pooling = field(default="mean", metadata={"help": "What SIR spreads: 'mean' or 'anchor'."})
    sir_variation_weight: float = field(default=1.0, metadata={"help": "Of SIR's coefficient of variation."})
    sir_uniformity_weight: float = field(default=1.0, metadata={"help": "Of SIR's uniformity."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.weights, str):
            self.weights = yaml.safe_load(self.weights)
        unknown = [str(name) for name in self.own_weights() if name not in PARTS]
        if unknown:
            raise ValueError(f"weights names unknown parts: {', '.join(unknown)}; legal values: {', '.join(PARTS)}.")

    def own_weights(self) -> dict[str, float]:
        """
        What was given in `weights`.

        Raises:
            ValueError: if that is no mapping.
        """
        if not isinstance(self.weights, dict | None):
            raise ValueError(f'weights={self.weights!r} must map parts to numbers: {{"sir": 0.3}}.')
        return self.weights or {}

    def method_weights(self) -> dict[str, float]:
        """What the method itself gives to each part."""
        return {"mrl": 1.0}

    def grid_for(self, config: Any) -> Grid:
        if self.grid is not None:
            return super().grid_for(config)
        return Grid.product([config.num_hidden_layers], Grid.of(config).dims)

    def parts(self, grid: Grid) -> dict[str, tuple[float, Objective]]:
        """The parts that count, by name, with their weights."""
        weights = self.method_weights() | self.own_weights()
        depth, dims = grid.full.layer, grid.dims_of(grid.full.layer)
        sia_layers = self.sia_layers or evenly_spaced(range(1, depth + 1), len(dims))
        isotropy = Grid.product(self.isotropy_layers or sorted({-(-2 * depth // 3), -(-5 * depth // 6)}), dims)
        makers = {
            "mrl": lambda: Contrastive(grid, reduction=self.reduction, **self.embedding_arguments()),
            "sia": lambda: SIA(
                Grid.product(sia_layers, dims),
                temperature=self.sia_temperature,
                attention_weight=self.sia_attention_weight,
                cka_weight=self.sia_cka_weight,
                token_shares=self.sia_token_shares,
                smallest_token_count=self.sia_smallest_token_count,
            ),
            "pic": lambda: PIC(
                Grid.parse(self.pic_checkpoints) if self.pic_checkpoints else chain(depth, dims),
                temperature=self.pic_temperature,
                pooling=self.pic_pooling,
                detach_target=self.pic_detach_target,
                mask_duplicates=self.mask_duplicates,
            ),
            "scr": lambda: SCR(isotropy, threshold=self.scr_threshold, variance_weight=self.scr_variance_weight),
            "sir": lambda: SIR(
                isotropy,
                scale=self.sir_scale,
                pooling=self.sir_pooling,
                variation_weight=self.sir_variation_weight,
                uniformity_weight=self.sir_uniformity_weight,
            ),
        }
        return {name: (weights[name], makers[name]()) for name in PARTS if weights.get(name, 0.0) != 0.0}


def evenly_spaced(values: Sequence[int], count: int) -> list[int]:
    """At most `count` of the values, evenly spaced, the last among them."""
    count = min(count, len(values))
    return [values[(step + 1) * len(values) // count - 1] for step in range(count)]


def chain(depth: int, dims: Sequence[int]) -> Grid:
    """As many checkpoints as there are layers or dims: dims from the first to the last, at evenly spaced layers."""
    count = min(depth, len(dims))
    layers = evenly_spaced(range(1, depth + 1), count)
    chosen = [dims[round(step * (len(dims) - 1) / max(1, count - 1))] for step in range(count)]
    return Grid(tuple(map(Granularity, layers, chosen)))


class RegularizedTrainer(EmbeddingTrainer):
    """
    Trains an encoder with a contrastive loss over a grid, [`Contrastive`], and any mixture of [`SIA`], [`PIC`],
    [`SCR`] and [`SIR`].

    Args:
        args ([`RegularizedConfig`]): How to train.
        kwargs: As for [`EmbeddingTrainer`].
    """

    _name = "Regularised Matryoshka"
    _tag_names: tuple[str, ...] = ("matryoshka", "sentence-similarity")
    _paper = papers.MRL
    _equation: str = "Eq. 1: a contrastive loss at every granularity, with regularisers of MIPIC and MIC"

    def build_objective(self, args: RegularizedConfig, grid: Grid) -> Composition:
        return Composition(args.parts(grid))
