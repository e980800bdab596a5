"""Tokenise texts, and form batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.data.data_collator import pad_without_fast_tokenizer_warning

from .batch import PassCost, chunked


# Tokens of one of the texts that a batch size counts.
TOKENS_PER_TEXT = 128


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
