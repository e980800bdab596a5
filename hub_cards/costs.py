"""What each granularity of an encoder costs: parameters, operations, bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from modeling_m3bert.modeling_elastic import Elasticity, Exit, cut_config, static_vectors
from trainers.core.codes import CODES, FLOAT, bytes_per_vector
from trainers.core.granularity import Granularity, Grid
from trainers.core.states import max_positions
from trainers.evaluation.results import GridResults

from .checkpoint import Checkpoint
from .tables import markdown


TOKENS = 128  # length of the text whose operations are counted, where the model reads that many tokens
CODES_SHOWN = (FLOAT, "int8", "binary")  # whose bytes every card lists, measured or not


@dataclass(frozen=True)
class Cost:
    """
    What one granularity costs.

    Args:
        parameters (`int`): Parameters of the encoder at its depth, with embeddings, its exit, and the static table
            where it is read.
        layer_parameters (`int`): The same without the token and position tables.
        flops_per_token (`int`): Operations of matrix products per token of a text of [`tokens_counted`] tokens; a
            multiplication and an addition count as two. Attention costs more per token in longer texts. Of an exit,
            only the rows of `dim` are computed.
        dim (`int`): Dimensions.
    """

    parameters: int
    layer_parameters: int
    flops_per_token: int
    dim: int

    def vector_bytes(self, code: str) -> int:
        """Bytes per vector in a precision."""
        return bytes_per_vector(code, self.dim)


def tokens_counted(config: Any) -> int:
    """Length in tokens of the text whose operations are counted."""
    return min(TOKENS, max_positions(config))


def costs(config: Any, granularities: Iterable[Granularity]) -> dict[Granularity, Cost]:
    """
    The cost of each granularity. It is counted on the architecture alone; no weights are needed.

    Args:
        config ([`~transformers.PreTrainedConfig`]): Config of the whole encoder.
        granularities (`Iterable[Granularity]`): The granularities.

    Returns:
        `dict[Granularity, Cost]`
    """
    granularities = list(granularities)
    by_layer = {
        layer: _counts(config, layer, {g.dim for g in granularities if g.layer == layer})
        for layer in sorted({g.layer for g in granularities})
    }
    return {g: by_layer[g.layer][g.dim] for g in granularities}


@torch.no_grad()
def _counts(config: Any, layers: int, dims: Iterable[int]) -> dict[int, Cost]:
    """Dim -> cost at one layer."""
    spec, width, tokens = Elasticity.of(config), config.hidden_size, tokens_counted(config)
    shallow, own_code = copy.deepcopy(config), (getattr(config, "elastic", None) or {}).get("source_auto_map")
    cut_config(shallow, layers)
    shallow.elastic = None
    if own_code:
        shallow.auto_map = own_code
    for name in ("output_layer", "output_dim"):  # any granularity can be counted, trained or not
        if hasattr(shallow, name):
            setattr(shallow, name, None)
    with torch.device("meta"):
        # Eager attention consists of matrix products, which the counter knows on every device.
        loading = {"attn_implementation": "eager", "trust_remote_code": bool(own_code)}
        model = AutoModel.from_config(shallow, **loading).eval() if layers else nn.Module()
        ids, table, exit_ = torch.ones(1, tokens, dtype=torch.long), nn.Module(), nn.Module()
        if layers in spec.table:
            table = nn.Embedding(config.vocab_size, width)
        if layers and layers in spec.exits:
            joint = (torch.empty(width, 2 * width), torch.empty(width)) if layers in spec.table else None
            exit_ = Exit(torch.empty(width, width), torch.empty(width), joint)
        state = torch.empty(1, tokens, width)
    parts = nn.ModuleList([model, table, exit_])
    tables = sum(module.weight.numel() for module in parts.modules() if isinstance(module, nn.Embedding))
    parameters = sum(parameter.numel() for parameter in parts.parameters())
    found = {}
    for dim in dims:
        # A projection may have more dims than the states that it reads.
        read, static = min(dim, width), None
        with FlopCounterMode(display=False) as counter:
            if layers:
                model(input_ids=ids)
            if isinstance(table, nn.Embedding):
                static = static_vectors(table.weight[:, : width if layers else read], (), ids)
            if isinstance(exit_, Exit):
                exit_(state, read, static)
        found[dim] = Cost(parameters, parameters - tables, counter.get_total_flops() // tokens, dim)
    return found


def codes_shown(results: GridResults | None) -> list[str]:
    """The codes whose bytes the table of costs lists, most bits first: [`CODES_SHOWN`], and those that were measured.
    Codes of a quantizer are left out: not every size has them."""
    measured = results.granularities.codes if results else []
    return [name for name, code in CODES.items() if name in CODES_SHOWN or (name in measured and not code.learned)]


def cost_table(checkpoint: Checkpoint, results: GridResults | None) -> str:
    """One row per size: parameters, operations per token, milliseconds if measured, bytes per vector."""
    scored = results.granularities.sizes if results else ()
    grid = Grid(tuple(dict.fromkeys([*checkpoint.grid, *scored])))
    latency, codes = results.latency if results else None, codes_shown(results)
    header = ["granularity", "parameters", "without embeddings", "million operations per token"]
    header += ["ms to encode", "ms to search"] if latency else []
    header += [f"bytes per vector, {code}" for code in codes]
    rows = []
    for g, cost in costs(checkpoint.config, grid).items():
        row = [str(g), f"{cost.parameters:,}", f"{cost.layer_parameters:,}", f"{cost.flops_per_token / 1e6:.1f}"]
        if latency:
            times = latency.encode_ms.get(str(g.layer)), latency.search_ms.get(str(g.dim))
            row += ["" if time is None else f"{time:.1f}" for time in times]
        rows.append([*row, *(str(cost.vector_bytes(code)) for code in codes)])
    return markdown(header, rows)
