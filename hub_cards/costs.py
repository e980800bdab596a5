"""What each granularity of an encoder costs: parameters, operations, bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from trainers.core.granularity import Granularity
from trainers.core.states import max_positions


TOKENS = 128  # length of the text whose operations are counted, where the model reads that many tokens
BYTES_PER_NUMBER = {"float32": 4.0, "int8": 1.0, "1 bit": 1 / 8}


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
        dim (`int`): Numbers per vector.
    """

    parameters: int
    layer_parameters: int
    flops_per_token: int
    dim: int

    def vector_bytes(self, kind: str) -> float:
        """Bytes per vector, for a kind in [`BYTES_PER_NUMBER`]."""
        return BYTES_PER_NUMBER[kind] * self.dim


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
