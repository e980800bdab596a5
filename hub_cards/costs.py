"""What each granularity of an encoder costs: parameters, operations, bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

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
        parameters (`int`): Parameters of the encoder up to its layer, embeddings and the exit of this layer included.
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
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = layers
    elastic = config.model_type == "m3bert"
    if elastic:
        shallow.num_hidden_layers, shallow.output_layer = config.num_hidden_layers, layers
        # Any granularity can be counted, trained or not.
        shallow.matryoshka_layers, shallow.matryoshka_dims, shallow.output_dim = [], [], None
    tokens = tokens_counted(config)
    with torch.device("meta"):
        # Eager attention consists of matrix products, which the counter knows on every device.
        model = AutoModel.from_config(shallow, attn_implementation="eager").eval()
        ids = torch.ones(1, tokens, dtype=torch.long)
    tables = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Embedding))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    found = {}
    for dim in dims:
        with FlopCounterMode(display=False) as counter:
            # A projection may have more dims than the states that it reads.
            model(input_ids=ids, **({"output_dim": min(dim, config.hidden_size)} if elastic else {}))
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
