"""
The only module that decides which texts share a forward pass: texts of similar length, so that little of the work is
done on padding. Training steps, cached gradients and evaluation all use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class TextRows:
    """
    The texts of several columns as rows of the same tensors, padded on the right to the longest column.

    Args:
        inputs (`dict[str, torch.Tensor]`): Tensors of shape `(texts, tokens, ...)`, among them `attention_mask`.
        shapes (`tuple[tuple[int, int], ...]`): Number of texts and width of each column.
        lengths (`tuple[int, ...]`): Number of tokens of each text ([`text_lengths`]).
        padded_left (`bool`): Whether a text has padding on the left.
    """

    inputs: Rows
    shapes: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    padded_left: bool

    @classmethod
    def of(cls, columns: Iterable[Mapping[str, torch.Tensor]]) -> TextRows | None:
        """
        Join columns. `None` if they cannot be joined: a column is not one text per row, or columns have different
        kinds of tensors.
        """
        columns = list(columns)
        shapes = []
        for column in columns:
            shape = next(iter(column.values())).shape[:2]
            if column.keys() != columns[0].keys() or "attention_mask" not in column or len(shape) < 2:
                return None
            if any(value.shape[:2] != shape for value in column.values()):
                return None
            shapes.append((shape[0], shape[1]))
        width = max(tokens for _, tokens in shapes)
        joined = {
            name: torch.cat([_widened(column[name], width) for column in columns]) if len(columns) > 1 else value
            for name, value in columns[0].items()
        }
        lengths = text_lengths(joined["attention_mask"])
        padded_left = (joined["attention_mask"].sum(dim=1) != lengths).any()
        return cls(joined, tuple(shapes), tuple(lengths.tolist()), bool(padded_left))

    def take(self, chunk: Sequence[int]) -> Rows:
        """The rows of a chunk, without the columns on the right that are padding in all of them."""
        longest = max(self.lengths[row] for row in chunk)
        if len(chunk) == len(self.lengths):  # a single chunk keeps the order
            return {name: value[:, :longest] for name, value in self.inputs.items()}
        index = torch.tensor(chunk, device=self.inputs["attention_mask"].device)
        return {name: value[:, :longest].index_select(0, index) for name, value in self.inputs.items()}

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Divide rows `(texts, ...)` into those of each column."""
        return list(values.split([texts for texts, _ in self.shapes]))


def _widened(values: torch.Tensor, width: int) -> torch.Tensor:
    """Values `(texts, tokens, ...)` with zeros on the right."""
    missing = width - values.shape[1]
    if not missing:
        return values
    return torch.cat([values, values.new_zeros(len(values), missing, *values.shape[2:])], dim=1)


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
        `static_states` (and `static_rows`, for stitched depths that read them). An encoder that is a static table
        alone keeps the `input_ids`.
    """
    ids = torch.cat([rows["input_ids"].flatten() for rows in chunks])
    if static:
        mask = torch.cat([rows["attention_mask"].flatten() for rows in chunks])
        lengths = torch.cat([torch.full((len(rows["input_ids"]),), rows["input_ids"].shape[1]) for rows in chunks])
        boundaries = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(ids.device)
        means = encoder.static_states(ids[None], mask[None], boundaries)[0, boundaries[:-1]].unsqueeze(1)
        parts = means.split([len(rows["input_ids"]) for rows in chunks])
        chunks = [rows | {"static_states": part} for rows, part in zip(chunks, parts, strict=True)]
    if getattr(encoder.config, "is_static", False):
        return list(chunks)
    sizes = [rows["input_ids"].numel() for rows in chunks]
    if static and not {*encoder.config.stitch_layers}.isdisjoint(encoder.config.static_layers):
        looked_up = zip(chunks, encoder.static_table(ids).split(sizes), strict=True)
        chunks = [rows | {"static_rows": part.unflatten(0, rows["input_ids"].shape)} for rows, part in looked_up]
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


@dataclass(frozen=True)
class Flattened:
    """
    Texts in one row without padding, for attention with variable lengths (flash attention).

    Args:
        inputs (`dict[str, Any]`): Arguments of the encoder.
        real (`torch.BoolTensor` of shape `(texts, tokens)`): The tokens that are in the row.
    """

    inputs: dict[str, Any]
    real: torch.Tensor

    @classmethod
    def of(cls, inputs: Mapping[str, torch.Tensor], first_position: int) -> Flattened:
        """
        Flatten a batch of texts.

        Args:
            inputs (`Mapping[str, torch.Tensor]`): Tensors of shape `(texts, tokens, ...)`, among them
                `attention_mask`.
            first_position (`int`): Row of the position embeddings that the first token reads.
        """
        real = inputs["attention_mask"].bool()
        positions = torch.arange(real.shape[1], device=real.device).expand_as(real)[real]
        counts = real.sum(dim=1)
        tokens = {name: value for name, value in inputs.items() if name != "attention_mask"}
        return cls.with_boundaries(
            tokens, real, nn.functional.pad(counts.cumsum(0), (1, 0)), positions + first_position
        )

    @classmethod
    def with_boundaries(
        cls, tokens: Mapping[str, torch.Tensor], real: torch.Tensor, boundaries: torch.Tensor, positions: torch.Tensor
    ) -> Flattened:
        """
        Flatten texts whose places are known.

        Args:
            tokens (`Mapping[str, torch.Tensor]`): Tensors of shape `(rows, tokens, ...)`.
            real (`torch.BoolTensor` of shape `(rows, tokens)`): The tokens to keep.
            boundaries (`torch.LongTensor` of shape `(texts + 1,)`): Cumulative lengths of the texts.
            positions (`torch.LongTensor` of shape `(real tokens,)`): Row of the position embeddings of every token.
        """
        boundaries, longest = boundaries.to(torch.int32), int(boundaries.diff().max())
        flat = {name: value[real].unsqueeze(0) for name, value in tokens.items()}
        return cls(
            {
                "position_ids": positions.unsqueeze(0),
                "cu_seq_lens_q": boundaries,
                "cu_seq_lens_k": boundaries,
                "max_length_q": longest,
                "max_length_k": longest,
                **flat,
            },
            real,
        )

    def padded(self, states: torch.Tensor) -> torch.Tensor:
        """States `(1, real tokens, hidden_size)` as `(texts, tokens, hidden_size)`, with zeros at padding."""
        rows = states.new_zeros(*self.real.shape, states.shape[2])
        return rows.masked_scatter(self.real.unsqueeze(2), states)
