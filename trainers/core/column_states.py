"""
The hidden states of all text columns of a training batch, encoded together: texts of similar length share a forward
pass, so that little of the work is done on padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ...encode.packed_rows import DOCUMENTS, Flattened, check_packable, token_tensors
from ...encode.padded_batches import PassCost, chunked, in_row_order, merged
from ...encode.ranks import smallest_on_all_ranks
from ...encode.states import (
    NestedStates,
    PooledStates,
    Pooling,
    StateKey,
    TextStates,
    nested_states,
    readable,
    reads_table,
    unwrap_encoder,
)
from ...models.anatomy import anatomy_of
from .gradient_caching import cached_vectors


Rows = dict[str, torch.Tensor]
Columns = Mapping[str, Mapping[str, torch.Tensor]]


def column_states(
    model: PreTrainedModel,
    columns: Columns,
    layers: Iterable[StateKey],
    pooling: Pooling | None = None,
    mini_batch_size: int | None = None,
    same_passes: bool = False,
) -> dict[str, TextStates]:
    """
    Encode the texts of all columns (outputs of the tokenizer) together, in chunks of similar length ([`chunked`]).
    Values and gradients are those of [`nested_states`] of each column. Every text is in one chunk, so that its dropout
    masks are drawn once. A compiled step without cached gradients encodes each column as it is, because every new
    shape would be compiled.

    With a `pooling`, only embeddings are returned ([`PooledStates`], else [`NestedStates`]), and with a
    `mini_batch_size` gradients are cached ([`cached_vectors`]), with at most as many tokens at a time as this number
    of the longest texts has. With `same_passes`, every rank makes as many passes, which a sharded model needs.

    Raises:
        ValueError: as [`nested_states`] and [`cached_vectors`], or if gradients are to be cached for rows that hold
            several texts, or for columns with different kinds of tensors.
    """
    layers = readable(unwrap_encoder(model).config, layers)
    compiled = torch.compiler.is_compiling() and mini_batch_size is None
    texts = None if compiled else TextRows.of(columns.values())
    if texts is None and mini_batch_size is not None:
        raise ValueError("Gradients can be cached for one text per row, and with the same tensors in all columns.")
    if texts is None:
        return {name: states_of_rows(model, inputs, layers) for name, inputs in columns.items()}
    cost = PassCost.on(texts.inputs["attention_mask"].device)
    if mini_batch_size is not None:
        cost = cost.limited(mini_batch_size * max(texts.lengths))
    chunks = chunked(texts.lengths, cost)
    if same_passes:
        chunks = merged(chunks, smallest_on_all_ranks(len(chunks), texts.inputs["attention_mask"].device))
    rows = [texts.take(chunk) for chunk in chunks]
    if mini_batch_size is not None and pooling is not None:
        cached = cached_vectors(model, rows, layers, pooling)
        return pooled_columns(columns, texts, chunks, {layer: [value] for layer, value in cached.items()}, pooling)

    if len(rows) > 1 and not texts.padded_left and "input_ids" in texts.inputs:
        encoder = unwrap_encoder(model)
        rows = with_shared_embeddings(encoder, rows, static=reads_table(encoder.config, layers))
    states = [nested_states(model, inputs, layers) for inputs in rows]
    if pooling is not None:
        vectors = {layer: [each.pooled(layer, pooling) for each in states] for layer in layers}
        return pooled_columns(columns, texts, chunks, vectors, pooling)
    return token_columns(columns, texts, chunks, states)


def states_of_rows(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], layers: Sequence[StateKey]
) -> NestedStates:
    """The hidden states of a column, row by row; documents of packed rows may be encoded in chunks."""
    encoder = unwrap_encoder(model)
    if DOCUMENTS not in inputs or not encodes_own_rows(encoder):
        return nested_states(model, inputs, layers)
    check_packable(encoder.config)
    row, padding = Flattened.of(inputs, 0), encoder.config.pad_token_id or 0
    texts = {name: row.separate(row.inputs[name], padding) for name in token_tensors(inputs)}
    texts["attention_mask"] = row.separate(torch.ones_like(row.inputs["position_ids"]), 0)
    states = column_states(model, {"text": texts}, layers)["text"]
    real = texts["attention_mask"].bool()
    packed = {layer: row.padded(state[real].unsqueeze(0)) for layer, state in states.layers.items()}
    return NestedStates(packed, row.real.long(), anatomy_of(encoder).causal, packed=True)


def encodes_own_rows(encoder: PreTrainedModel) -> bool:
    """
    Whether the documents of packed rows are encoded faster one per row. On two cores, with 6 layers of 384 dims and
    rows of 512 tokens of short documents, a step took 0.4 of the time that it takes with a mask.
    """
    masked = encoder.config._attn_implementation in ("eager", "sdpa")
    return masked and encoder.device.type == "cpu" and not torch.compiler.is_compiling()


@dataclass(frozen=True)
class TextRows:
    """
    The texts of several columns as rows of the same tensors `(texts, tokens, ...)`, padded on the right to the longest
    column: the numbers of texts and tokens of each column (`shapes`), the tokens of each text ([`text_lengths`]), and
    whether a text has padding on the left.
    """

    inputs: Rows
    shapes: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    padded_left: bool

    @classmethod
    def of(cls, columns: Iterable[Mapping[str, torch.Tensor]]) -> TextRows | None:
        """Join columns; `None` if a column is not one text per row, or if they have different kinds of tensors."""
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
        counts = text_lengths(joined["attention_mask"])
        padded_left = (joined["attention_mask"].sum(dim=1) != counts).any()
        *lengths, padded = torch.cat([counts, padded_left[None]]).tolist()  # a device is waited for once
        return cls(joined, tuple(shapes), tuple(lengths), bool(padded))

    def take(self, chunk: Sequence[int]) -> Rows:
        """The rows of a chunk, without the columns on the right that are padding in all of them."""
        longest = max(self.lengths[row] for row in chunk)
        if len(chunk) == len(self.lengths):  # a single chunk keeps the order
            return {name: value[:, :longest] for name, value in self.inputs.items()}
        index = torch.tensor(chunk, device=self.inputs["attention_mask"].device)
        return {name: value[:, :longest].index_select(0, index) for name, value in self.inputs.items()}

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Divide rows `(texts, ...)` by column."""
        return list(values.split([texts for texts, _ in self.shapes]))


def _widened(values: torch.Tensor, width: int) -> torch.Tensor:
    """Values `(texts, tokens, ...)` with zeros on the right."""
    missing = width - values.shape[1]
    if not missing:
        return values
    return torch.cat([values, values.new_zeros(len(values), missing, *values.shape[2:])], dim=1)


def token_columns(
    columns: Columns, texts: TextRows, chunks: Sequence[Sequence[int]], states: Sequence[NestedStates]
) -> dict[str, TextStates]:
    """The token hidden states of each column, gathered from the chunks."""
    width = texts.inputs["attention_mask"].shape[1]
    result: dict[str, dict[StateKey, torch.Tensor]] = {name: {} for name in columns}
    for layer in states[0].layers:
        padded = in_row_order([_widened(each.layers[layer], width) for each in states], chunks)
        for name, part, (_, tokens) in zip(columns, texts.split(padded), texts.shapes, strict=True):
            # A slice of all tokens would copy the gradient.
            result[name][layer] = part if part.shape[1] == tokens else part[:, :tokens]
    return {
        name: NestedStates(layers, columns[name]["attention_mask"], states[0].causal)
        for name, layers in result.items()
    }


def pooled_columns(
    columns: Columns,
    texts: TextRows,
    chunks: Sequence[Sequence[int]],
    vectors: Mapping[StateKey, Sequence[torch.Tensor]],
    pooling: Pooling,
) -> dict[str, TextStates]:
    """The embeddings of each column, gathered from the chunks (layer -> one tensor per chunk)."""
    split = {layer: texts.split(in_row_order(parts, chunks)) for layer, parts in vectors.items()}
    return {
        name: PooledStates({layer: parts[index] for layer, parts in split.items()}, pooling)
        for index, name in enumerate(columns)
    }


def text_lengths(attention_mask: torch.Tensor) -> torch.Tensor:
    """Number of tokens of each text up to its last real one, at least 1, `(texts,)`: padding on the left has
    positions."""
    positions = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    return (attention_mask.bool() * positions).amax(dim=1).clamp(min=1)


def with_shared_embeddings(encoder: PreTrainedModel, chunks: Sequence[Rows], static: bool = False) -> list[Rows]:
    """
    Look up the token embeddings of all chunks at once, so that the gradient of the vocabulary is computed once: rows
    get `inputs_embeds` in place of `input_ids`, and on request `static_states`. A static table alone keeps the
    `input_ids`. Some encoders derive positions from token ids, so the texts must not have padding on the left.
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
