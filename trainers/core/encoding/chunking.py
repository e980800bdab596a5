"""
The only module that decides which texts share a forward pass: texts of similar length, so that little of the work is
done on padding. Training steps, cached gradients and evaluation all use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn


Rows = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PassCost:
    """
    Cost of a forward pass, in units of the cost of one token.

    Args:
        overhead (`int`): Cost of a pass in addition to its tokens: calls of small operations and, in training, adding
            to the gradient of every parameter.
        most_tokens (`int`, *optional*): Largest number of tokens of a pass, padding included. A text that is longer
            has a pass of its own. `None` means no limit.
    """

    overhead: int
    most_tokens: int | None = None

    @classmethod
    def on(cls, device: torch.device) -> PassCost:
        """
        The cost on a device. On a CPU, a training step takes as long for 64 tokens as for a pass without tokens, and
        a pass over more than 4,096 tokens takes longer per token, because its activations do not fit in the cache
        (measured with 6 layers of width 384 on two cores). The value for other devices is an estimate.
        """
        return cls(64, 4096) if device.type == "cpu" else cls(8192)

    def limited(self, most_tokens: int) -> PassCost:
        """The same cost with a limit of at most this many tokens."""
        return replace(self, most_tokens=min(most_tokens, self.most_tokens or most_tokens))

    def rows_of(self, length: int) -> int:
        """Largest number of texts of this length in a pass."""
        return max(1, self.most_tokens // max(1, length)) if self.most_tokens else np.iinfo(np.int32).max


def chunked(lengths: Sequence[int], cost: PassCost) -> list[list[int]]:
    """
    Divide texts into chunks, each for one pass over texts padded to the longest of the chunk, such that all passes
    together cost least.

    Args:
        lengths (`Sequence[int]`): Number of tokens of each text.
        cost ([`PassCost`]): Cost of a pass.

    Returns:
        `list[list[int]]`: the texts of each chunk, longest first. A single chunk keeps the order of the texts.
    """
    if len(lengths) == 1:
        return [[0]]
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    sorted_lengths = np.array([max(1, lengths[row]) for row in order])
    # Texts of one length stay together; `edges` are the positions in `order` at which the length changes.
    edges = np.concatenate([[0], np.flatnonzero(np.diff(sorted_lengths)) + 1, [len(order)]])
    longest = sorted_lengths[edges[:-1]]
    rows_per_pass = np.array([cost.rows_of(int(length)) for length in longest])
    # min_cost[j] = min over i < j of min_cost[i] + cost(texts between edges i and j as one chunk); cut[j] is this i.
    min_cost, cut = np.zeros(len(edges)), np.zeros(len(edges), dtype=int)
    for stop in range(1, len(edges)):
        rows = edges[stop] - edges[:stop]
        passes = -(-rows // rows_per_pass[:stop])
        costs = min_cost[:stop] + rows * longest[:stop] + passes * cost.overhead
        cut[stop] = costs.argmin()
        min_cost[stop] = costs[cut[stop]]
    chunks: list[list[int]] = []
    stop = len(edges) - 1
    while stop > 0:
        begin = cut[stop]
        rows = order[edges[begin] : edges[stop]]
        passes = -(-len(rows) // rows_per_pass[begin])
        chunks = [part.tolist() for part in np.array_split(rows, passes)] + chunks
        stop = begin
    return chunks if len(chunks) > 1 else [list(range(len(lengths)))]


def merged(chunks: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """
    The texts of [`chunked`] in at most `count` chunks: neighbours with the fewest texts are put together.

    Args:
        chunks (`Sequence[Sequence[int]]`): Chunks of similar length each, in the order of their lengths.
        count (`int`): Largest number of chunks, at least 1.
    """
    parts = [list(chunk) for chunk in chunks]
    while len(parts) > count:
        at = min(range(len(parts) - 1), key=lambda index: len(parts[index]) + len(parts[index + 1]))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def text_lengths(attention_mask: torch.Tensor) -> torch.Tensor:
    """
    Number of tokens of each text up to its last real token, at least 1. Padding on the left counts, because it
    determines positions.

    Args:
        attention_mask (`torch.Tensor` of shape `(texts, tokens)`): 1 for real tokens.

    Returns:
        `torch.LongTensor` of shape `(texts,)`
    """
    positions = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    return (attention_mask.bool() * positions).amax(dim=1).clamp(min=1)


def with_shared_embeddings(encoder: Any, chunks: Sequence[Rows], static: bool = False) -> list[Rows]:
    """
    Look up the token embeddings of all chunks at once, so that the gradient of the vocabulary, which is as large as
    the vocabulary itself, is computed once.

    Args:
        encoder ([`~transformers.PreTrainedModel`]): The encoder. Some encoders derive positions from token ids, so the
            texts must not have padding on the left.
        chunks (`Sequence[dict[str, torch.Tensor]]`): Rows of each chunk, with `input_ids` and `attention_mask`.
        static (`bool`, *optional*, defaults to `False`): Also compute the static states of all texts at once.

    Returns:
        `list[dict[str, torch.Tensor]]`: the rows, with `inputs_embeds` in place of `input_ids`, and on request with
        `static_states`. An encoder that is a static table alone keeps the `input_ids`.
    """
    ids = torch.cat([rows["input_ids"].flatten() for rows in chunks])
    if static:
        mask = torch.cat([rows["attention_mask"].flatten() for rows in chunks])
        lengths = torch.cat([torch.full((len(rows["input_ids"]),), rows["input_ids"].shape[1]) for rows in chunks])
        boundaries = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(ids.device)
        means = encoder.static_states(ids[None], mask[None], boundaries)[0, boundaries[:-1]].unsqueeze(1)
        parts = means.split([len(rows["input_ids"]) for rows in chunks])
        chunks = [rows | {"static_states": part} for rows, part in zip(chunks, parts, strict=True)]
    if encoder.config.num_hidden_layers == 0:
        return list(chunks)
    sizes = [rows["input_ids"].numel() for rows in chunks]
    embedded = encoder.get_input_embeddings()(ids).split(sizes)
    return [
        {"inputs_embeds": vectors.unflatten(0, rows["input_ids"].shape)}
        | {name: value for name, value in rows.items() if name != "input_ids"}
        for rows, vectors in zip(chunks, embedded, strict=True)
    ]


def in_row_order(values: Sequence[torch.Tensor], chunks: Sequence[Sequence[int]]) -> torch.Tensor:
    """Put the vectors of all chunks, `(rows of the chunk, width)` each, back into the order of the texts."""
    if len(chunks) == 1:
        return values[0]
    order = torch.tensor([row for chunk in chunks for row in chunk])
    return torch.cat(list(values)).index_select(0, order.argsort().to(values[0].device))


def padded_in_row_order(values: Sequence[torch.Tensor], chunks: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """
    Put the token states of all chunks, `(rows of the chunk, tokens, hidden_size)` each, back into the order of the
    texts.

    Returns:
        `torch.Tensor` of shape `(texts, width, hidden_size)`, with zeros after the tokens of a chunk.
    """
    if len(chunks) == 1:
        missing = width - values[0].shape[1]
        return nn.functional.pad(values[0], (0, 0, 0, missing)) if missing else values[0]  # a pad of 0 would copy
    return _PaddedRows.apply([torch.tensor(chunk, device=values[0].device) for chunk in chunks], width, *values)


class _PaddedRows(torch.autograd.Function):
    """[`padded_in_row_order`]. Assignments that autograd records would copy the whole gradient once per chunk."""

    @staticmethod
    def forward(ctx: Any, chunks: list[torch.Tensor], width: int, *values: torch.Tensor) -> torch.Tensor:
        ctx.chunks, ctx.tokens = chunks, [value.shape[1] for value in values]
        padded = values[0].new_zeros(sum(map(len, chunks)), width, values[0].shape[2])
        for chunk, value in zip(chunks, values, strict=True):
            padded[chunk, : value.shape[1]] = value
        return padded

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = [grad[chunk, :tokens] for chunk, tokens in zip(ctx.chunks, ctx.tokens, strict=True)]
        return None, None, *parts
