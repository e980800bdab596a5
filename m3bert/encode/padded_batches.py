"""Batches of texts of similar length, so that little of the work is done on padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.data.data_collator import pad_without_fast_tokenizer_warning


# Tokens of one of the texts that a batch size counts.
TOKENS_PER_TEXT = 128


@dataclass(frozen=True)
class PassCost:
    """
    Cost of a forward pass, in units of the cost of one token. The `overhead` is its cost in addition to its tokens:
    calls of small operations and, in training, adding to the gradient of every parameter. A pass has `most_tokens` at
    most, padding included; a longer text has a separate pass.
    """

    overhead: int
    most_tokens: int | None = None

    @classmethod
    def on(cls, device: torch.device) -> PassCost:
        """
        The cost on a device. On a CPU, a training step takes as long for 64 tokens as for a pass without tokens, and
        a pass over more than 4,096 tokens takes longer per token, because its activations do not fit in the cache
        (measured with 6 layers of 384 dims on two cores). The value for other devices is an estimate.
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
    Divide texts of these numbers of tokens into chunks, each for one pass over texts padded to the longest of the
    chunk, such that all passes together cost least. Returns the texts of each chunk, longest first; a single chunk
    keeps the order of the texts.
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
    """The chunks of [`chunked`] as at most `count` chunks: neighbours with the fewest texts are put together."""
    parts = [list(chunk) for chunk in chunks]
    while len(parts) > count:
        at = min(range(len(parts) - 1), key=lambda index: len(parts[index]) + len(parts[index + 1]))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def in_row_order(values: Sequence[torch.Tensor], chunks: Sequence[Sequence[int]]) -> torch.Tensor:
    """Put the tensors of all chunks, `(rows of the chunk, ...)` each, back into the order of the texts."""
    if len(chunks) == 1:
        return values[0]
    order = torch.tensor([row for chunk in chunks for row in chunk])
    return torch.cat(list(values)).index_select(0, order.argsort().to(values[0].device))


def tokenized_chunks(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_length: int, cost: PassCost
) -> Iterator[tuple[list[int], BatchEncoding]]:
    """Tokenise at least one text, truncated to `max_length` tokens, and yield batches that cost least ([`chunked`]):
    the indices of their texts, and `input_ids` and `attention_mask`, padded to the longest of the batch."""
    options = {"return_token_type_ids": False, "return_attention_mask": False}
    ids = tokenizer(list(texts), truncation=True, max_length=max_length, **options)["input_ids"]
    yield from padded_chunks(tokenizer, ids, cost)


def padded_chunks(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[list[int]], cost: PassCost
) -> Iterator[tuple[list[int], BatchEncoding]]:
    """As [`tokenized_chunks`], for texts that are tokenised: `ids` are their token ids."""
    for chunk in chunked([len(each) for each in ids], cost):
        batch = [ids[row] for row in chunk]
        if len(chunk) == 1 and batch[0]:  # one query is not padded, which would take as long as a look-up
            row = torch.tensor(batch)
            yield chunk, BatchEncoding({"input_ids": row, "attention_mask": torch.ones_like(row)})
            continue
        longest = max(1, *map(len, batch))  # a batch of empty texts has one column of padding
        yield (
            chunk,
            pad_without_fast_tokenizer_warning(
                tokenizer, {"input_ids": batch}, padding="max_length", max_length=longest, return_tensors="pt"
            ),
        )
