"""Pack tokenised documents into rows: split what is too long, then put documents together."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedTokenizerBase


DOCUMENT_LENGTHS = "document_lengths"  # column of packed rows: tokens of each document of a row


@dataclass(frozen=True)
class Frame:
    """The token ids of the special tokens that a tokenizer puts before and after a text."""

    begin: tuple[int, ...]
    end: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Self:
        """The frame of a fast tokenizer; a ValueError if it does not put its special tokens around a text."""
        if tokenizer.is_fast:
            ids, text = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
            for first in range(len(ids) - len(text) + 1):
                if text and ids[first : first + len(text)] == text:
                    return cls(tuple(ids[:first]), tuple(ids[first + len(text) :]))
        raise ValueError(f"{type(tokenizer).__name__} is no fast tokenizer with its special tokens around a text.")

    def __len__(self) -> int:
        """The number of special tokens of a text."""
        return len(self.begin) + len(self.end)

    def special_tokens(self, lengths: Sequence[int]) -> torch.Tensor:
        """Where the special tokens are in a packed row of documents of these lengths, `(sum of lengths,)`."""
        mask = torch.zeros(sum(lengths), dtype=torch.bool)
        stop = 0
        for length in lengths:
            start, stop = stop, stop + length
            mask[start : start + len(self.begin)] = True
            mask[stop - len(self.end) : stop] = True
        return mask


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """
    Put documents of 1 to `max_length` tokens into rows of as many at most, greedily: each goes, in their order, into
    the row with the least room that it fits into (best fit), or else into a new row. Returns the documents of each
    row.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # room that is left and number of each row that is not full, ascending
    for document, length in enumerate(lengths):
        place = bisect_left(open_rows, (length, 0))
        if place < len(open_rows):
            room, row = open_rows.pop(place)
            rows[row].append(document)
        else:
            room, row = max_length, len(rows)
            rows.append([document])
        if room > length:
            insort(open_rows, (room - length, row))
    return rows


def packed_rows(
    documents: Sequence[Sequence[int]], frame: Frame, max_length: int
) -> tuple[list[list[int]], list[list[int]]]:
    """
    The token ids of each row, and the lengths of the pieces in it: tokenised documents, which have no special tokens
    yet, are split, framed, and packed into rows of at most `max_length` tokens. Empty documents are left out.
    ValueError if a row has no room for a token between the special tokens.
    """
    room = max_length - len(frame)
    if room < 1:
        raise ValueError(f"max_length={max_length} must be more than the {len(frame)} special tokens of a text.")
    pieces = [
        [*frame.begin, *tokens[start : start + room], *frame.end]
        for tokens in documents
        for start in range(0, len(tokens), room)
    ]
    rows = pack([len(piece) for piece in pieces], max_length)
    tokens = [[token for piece in row for token in pieces[piece]] for row in rows]
    return tokens, [[len(pieces[piece]) for piece in row] for row in rows]
