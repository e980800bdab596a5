"""
Elastic encoders, 1 of 5: the sizes of a model.

A *depth* runs a list of the source's layers: the first ones (a prefix), or a *path* that skips some. Its *exit* maps
the hidden state to the embedding space of the whole model. Depth 0 is a look-up in a *static table*. A *size* is a
depth and a number of dims. The config lists the depths under `elastic`.

`files_elastic.py` finds, reads and writes the files of a repository; `parts_elastic.py` has the modules that a native
model lacks; `loading_elastic.py` loads and saves; `modeling_elastic.py` runs a model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PretrainedConfig


SIZE = ("output_layer", "output_dim")
# Lists of a config with one entry per layer.
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "indexer_types", "source_layers")


def entries(config: PretrainedConfig) -> dict[str, Any]:
    """What a config has under `elastic`: nothing, if it is not elastic."""
    return getattr(config, "elastic", None) or {}


@dataclass(frozen=True)
class Elasticity:
    """
    The depths of a model, as its config has them under `elastic`.

    Args:
        depths (`dict[int, list[int]]`): Depth -> the source's layers that run, counted from 1. A depth that is not
            listed runs the first layers.
        exits (`list[int]`): Depths with an exit to the space of the whole model, ascending. A path needs none.
        table (`list[int]`): Depths among `exits` that read the static table.
        ignored_ids (`list[int]`): Token ids that the static vector of a text leaves out.
        fit (`dict`, *optional*): Record of the fit.
        refitted (`list[int]`, *optional*): Depths with refitted matrices. Old repositories do not say.
    """

    depths: Mapping[int, list[int]] = field(default_factory=dict)
    exits: Sequence[int] = ()
    table: Sequence[int] = ()
    ignored_ids: Sequence[int] = ()
    fit: Mapping[str, Any] | None = None
    refitted: Sequence[int] | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> Elasticity:
        """The depths of a model with this config; none if it is not elastic."""
        values = entries(config)
        depths = {int(depth): list(layers) for depth, layers in values.get("depths", {}).items()}
        exits, table, ignored = (list(values.get(name, ())) for name in ("exits", "table", "ignored_ids"))
        return cls(depths, exits, table, ignored, values.get("fit"), values.get("refitted"))

    def declare(self, config: PretrainedConfig, **others: Any) -> None:
        """Write the depths into a config. Its other entries under `elastic` stay, also `fit` and `refitted` where
        these are `None`. Without an exit at depth 0, `matryoshka_layers` loses 0."""
        values = {
            "depths": {str(depth): list(self.depths[depth]) for depth in sorted(self.depths)},
            "exits": sorted(self.exits),
            "table": sorted(self.table),
            "ignored_ids": sorted(self.ignored_ids) if self.table else [],
            **({} if self.fit is None else {"fit": dict(self.fit)}),
            **({} if self.refitted is None else {"refitted": sorted(self.refitted)}),
        }
        config.elastic = {**entries(config), **values, **others}
        if 0 not in self.exits and getattr(config, "matryoshka_layers", None):
            config.matryoshka_layers = [depth for depth in config.matryoshka_layers if depth > 0]

    def layers_of(self, depth: int) -> list[int]:
        """The layers that a depth runs, counted from 1, in their order."""
        return list(self.depths.get(depth, range(1, depth + 1)))

    def of_depths(self, depths: Iterable[int]) -> Elasticity:
        """Only these depths."""
        chosen = {*depths}
        layers = {depth: numbers for depth, numbers in self.depths.items() if depth in chosen}
        exits, table = ([depth for depth in listed if depth in chosen] for listed in (self.exits, self.table))
        refitted = None if self.refitted is None else [depth for depth in self.refitted if depth in chosen]
        return replace(self, depths=layers, exits=exits, table=table, refitted=refitted)

    def is_path(self, depth: int) -> bool:
        """Whether a depth skips layers."""
        return self.layers_of(depth) != [*range(1, depth + 1)]

    @property
    def aligned(self) -> list[int]:
        """The depths that embed into the space of the whole model: those with an exit, and paths."""
        return sorted({*self.exits, *filter(self.is_path, self.depths)})

    @property
    def has_tensors(self) -> bool:
        """Whether the depths have tensors beside the source's weights."""
        refitted = [*filter(self.is_path, self.depths)] if self.refitted is None else self.refitted
        return bool(self.exits or refitted)

    def owns(self, name: str) -> bool:
        """Whether these depths read a tensor of this name in the file of exits, refitted matrices and table."""
        kind, _, rest = name.partition(".")
        if kind == "table":
            return bool(self.table)
        return kind in ("exits", "paths") and rest.partition(".")[0] in map(str, {*self.exits, *self.depths})

    def shared_prefix(self, depth: int) -> int:
        """Number of layers at the start of a depth that run as in the whole model, with the same output."""
        layers = self.layers_of(depth)
        gap = next((place for place, layer in enumerate(layers) if layer != place + 1), None)
        return depth if gap is None else max(0, gap - 1)  # the layer before a gap is refitted

    def validate(self, config: PretrainedConfig) -> None:
        """Raise a ValueError if the depths do not fit a model of this config."""
        last = config.num_hidden_layers
        for depth, layers in self.depths.items():
            if len(layers) != depth or layers != sorted(set(layers)) or not {*layers} <= {*range(1, last + 1)}:
                raise ValueError(f"Depth {depth} must run {depth} of the layers 1..{last}, ascending, not {layers}.")
            if self.is_path(depth) and layers[-1] != last:
                raise ValueError(f"Depth {depth} runs the layers {layers}: a path must end in the last layer, {last}.")
        exits, table = {*self.exits}, {*self.table}
        if not exits <= {*range(last + 1)} or not table <= exits or 0 in exits - table or (last == 0 and not table):
            raise ValueError(
                f"exits={list(self.exits)} must be within 0..{last}, and table={list(self.table)} among them; depth 0 "
                "is the table."
            )


def legal_layers(config: PretrainedConfig) -> list[int]:
    """The depths at which a model of this config can be read: those of `elastic`, those it was trained at, and all of
    its layers. If it was trained at none (`matryoshka_layers=[]`), every prefix."""
    last, spec = config.num_hidden_layers, Elasticity.of(config)
    trained = getattr(config, "matryoshka_layers", None)
    every = range(1, last + 1) if trained == [] else trained or ()
    return sorted({*every, *spec.depths, *spec.exits, last})


def legal_dims(config: PretrainedConfig) -> list[int]:
    """The numbers of dims at which a model of this config can be read."""
    trained = getattr(config, "matryoshka_dims", None)
    if entries(config).get("reads_all_dims"):
        return [config.hidden_size]
    return sorted({*trained, config.hidden_size}) if trained else list(range(1, config.hidden_size + 1))


def resolve_size(
    config: PretrainedConfig, output_layer: int | None = None, output_dim: int | None = None
) -> tuple[int, int]:
    """The depth and the number of dims to output: the arguments, else the config's own values, else the full size.
    Raises a ValueError that names the legal values."""
    chosen = []
    for name, value, full, legal_values in (
        ("output_layer", output_layer, config.num_hidden_layers, legal_layers),
        ("output_dim", output_dim, config.hidden_size, legal_dims),
    ):
        value = getattr(config, name, None) if value is None else value
        value = full if value is None else value
        if value != full and value not in (legal := legal_values(config)):
            whole = legal == [*range(1, legal[-1] + 1)] and len(legal) > 1
            spelled = f"1..{legal[-1]}" if whole else ", ".join(map(str, legal))
            raise ValueError(f"{name}={value!r} is not available here; legal values: {spelled}.")
        chosen.append(value)
    return chosen[0], chosen[1]


@dataclass(frozen=True)
class Size:
    """
    A size of a model, resolved once: what loading, running, saving and export read.

    Args:
        depth (`int`): Number of layers that run. 0 is the static table.
        dim (`int`): Number of dims that are returned.
        layers (`list[int]`): The layers that run, counted from 1.
        source_layers (`list[int]`): The same layers, by their numbers in the source.
        reads_table (`bool`): Whether the depth reads the static table.
        is_whole (`bool`): Whether all layers run.
        is_native (`bool`): Whether the native model of the layers gives the same vectors: they are the source's first,
            and there is no exit and no truncation.
    """

    depth: int
    dim: int
    layers: list[int]
    source_layers: list[int]
    reads_table: bool
    is_whole: bool
    is_native: bool

    @classmethod
    def of(cls, config: PretrainedConfig, output_layer: int | None = None, output_dim: int | None = None) -> Size:
        """The size of a config and of arguments, as in [`resolve_size`]."""
        (depth, dim), spec = resolve_size(config, output_layer, output_dim), Elasticity.of(config)
        layers, first = spec.layers_of(depth), [*range(1, depth + 1)]
        numbers = entries(config).get("source_layers", ())  # of a model that is reduced to a size
        source = [numbers[layer - 1] for layer in layers] if len(numbers) == config.num_hidden_layers else layers
        is_native = source == first and depth not in spec.exits and dim == config.hidden_size
        return cls(depth, dim, layers, source, depth in spec.table, depth == config.num_hidden_layers > 0, is_native)


def set_layers(config: PretrainedConfig, layers: Sequence[int]) -> None:
    """Reduce a config to some layers, counted from 1."""
    depth = config.num_hidden_layers
    for name in PER_LAYER:
        values = getattr(config, name, None)
        if isinstance(values, list) and len(values) == depth:
            setattr(config, name, [values[layer - 1] for layer in layers])
    config.num_hidden_layers = len(layers)


def cut_config(config: PretrainedConfig, depth: int) -> None:
    """Reduce a config to the layers of one depth, with the exit of this depth alone. Prefixes without an exit stay
    legal."""
    spec = Elasticity.of(config)
    layers, trained = spec.layers_of(depth), getattr(config, "matryoshka_layers", None)
    if trained is not None:
        lost, shared = {*spec.exits, *spec.depths} - {depth}, spec.shared_prefix(depth)
        below = [other for other in legal_layers(config) if other not in lost and other <= shared]
        config.matryoshka_layers = sorted({*below, depth}) if trained or lost or spec.is_path(depth) else []
    set_layers(config, layers)
    if entries(config):
        replace(spec.of_depths([depth]), depths={}, refitted=()).declare(config, source_layers=layers)


def for_new_weights(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a model with new weights: a copy with the layers of its `output_layer`, and without exits."""
    depth, _ = resolve_size(config)
    if depth == config.num_hidden_layers and not entries(config):
        return config
    if depth == 0:
        raise ValueError("Layer 0 is a static table, which is loaded (from_pretrained) or fitted, not new.")
    config = copy.deepcopy(config)
    Elasticity().declare(config)  # takes depth 0 out of `matryoshka_layers`
    config.elastic = None
    cut_config(config, depth)
    return config
