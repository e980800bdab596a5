"""Costs of each granularity of an encoder: parameters, operations, bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from ..encode.granularity import Granularity, Grid
from ..encode.precisions import FLOAT, bytes_per_vector
from ..encode.states import max_positions
from ..evaluation.results import Latency
from ..modeling.configuration_elastic import Elasticity, cut_config
from ..modeling.parts_elastic import Exit, static_vectors
from .tables import markdown, milliseconds


CODES_SHOWN = (FLOAT, "int8", "binary")  # whose bytes a card lists, measured or not


class Cost(NamedTuple):
    """
    The cost of one granularity.

    Args:
        parameters (`int`): Parameters of the encoder at its depth, with embeddings, its exit, and the static table
            where it is read.
        layer_parameters (`int`): The same without the token and position tables.
        flops_per_token (`int`): Operations of matrix products per token of a text of [`tokens_counted`] tokens; a
            multiplication and an addition count as two. Attention costs more per token in longer texts. Of an exit,
            only the rows of `dim` are computed.
    """

    parameters: int
    layer_parameters: int
    flops_per_token: int


def tokens_counted(config: Any) -> int:
    """Length in tokens of the text whose operations are counted: 128, or all that the model reads."""
    return min(128, max_positions(config))


def costs(config: Any, granularities: Iterable[Granularity]) -> dict[Granularity, Cost]:
    """The cost of each granularity of the encoder with this config, counted on the architecture without weights."""
    modules = cache(lambda layer: _modules(config, layer))
    return {g: _cost(config, modules(g.layer), g) for g in granularities}


def depth_table(config: Any, grid: Grid, latency: Latency | None) -> str:
    """One row per depth of a grid, at its most dims: parameters, operations, and ms to encode in each runtime."""
    runtimes, rows = {}, []
    if latency is not None:
        runtimes = {"": latency.encode_ms, **{f", {name}": times for name, times in latency.engine_ms.items()}}
    for size, cost in costs(config, [Granularity(layer, grid.dims_of(layer)[-1]) for layer in grid.layers]).items():
        numbers = f"{cost.parameters:,}", f"{cost.layer_parameters:,}", f"{cost.flops_per_token / 1e6:.1f}"
        times = [milliseconds(encode.get(str(size.layer)), 2) for encode in runtimes.values()]
        rows.append([str(size.layer), *numbers, *times])
    header = ["layers", "parameters", "without embeddings", "million operations per token"]
    return markdown([*header, *(f"ms to encode{name}" for name in runtimes)], rows)


def dim_table(grid: Grid, latency: Latency | None) -> str:
    """One row per number of dims of a grid: ms to search, and bytes per vector in each precision."""
    searches, rows = [latency.search_ms] if latency else [], []
    for dim in grid.dims:
        times = [milliseconds(search.get(str(dim)), 2) for search in searches]
        rows.append([str(dim), *times, *(str(bytes_per_vector(code, dim)) for code in CODES_SHOWN)])
    header = ["dims", *["ms to search"] * len(searches), *(f"bytes per vector, {code}" for code in CODES_SHOWN)]
    return markdown(header, rows)


def _modules(config: Any, layers: int) -> nn.ModuleDict:
    """The encoder up to a layer, its exit, and the static table that it reads, without weights."""
    spec, width, modules = Elasticity.of(config), config.hidden_size, nn.ModuleDict()
    shallow, code = copy.deepcopy(config), (getattr(config, "elastic", None) or {}).get("source_auto_map")
    cut_config(shallow, layers)
    shallow.elastic = None
    if code:
        shallow.auto_map = code
    for name in ("output_layer", "output_dim"):  # any granularity can be counted, trained or not
        if hasattr(shallow, name):
            setattr(shallow, name, None)
    with torch.device("meta"):
        if layers:
            # Eager attention consists of matrix products, which the counter knows on every device.
            loading = {"attn_implementation": "eager", "trust_remote_code": bool(code)}
            modules["model"] = AutoModel.from_config(shallow, **loading).eval()
        if layers in spec.table:
            modules["table"] = nn.Embedding(config.vocab_size, width)
        if layers and layers in spec.exits:
            tensors = {"weight": torch.empty(width, width), "bias": torch.empty(width)}
            if layers in spec.table:
                tensors |= {"joint.weight": torch.empty(width, 2 * width), "joint.bias": torch.empty(width)}
            modules["exit"] = Exit(tensors)
    return modules


@torch.no_grad()
def _cost(config: Any, modules: nn.ModuleDict, g: Granularity) -> Cost:
    """The cost of a granularity that runs these modules."""
    tokens, width, static = tokens_counted(config), config.hidden_size, None
    ids = torch.ones(1, tokens, dtype=torch.long, device="meta")
    read = min(g.dim, width)  # a projection may have more dims than the states that it reads
    with FlopCounterMode(display=False) as counter:
        if "model" in modules:
            modules["model"](input_ids=ids)
        if "table" in modules:
            static = static_vectors(modules["table"].get_parameter("weight")[:, : width if g.layer else read], (), ids)
        if "exit" in modules:
            modules["exit"](torch.empty(1, tokens, width, device="meta"), read, static)
    parameters = sum(parameter.numel() for parameter in modules.parameters())
    tables = sum(module.weight.numel() for module in modules.modules() if isinstance(module, nn.Embedding))
    return Cost(parameters, parameters - tables, counter.get_total_flops() // tokens)
