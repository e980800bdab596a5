"""Collators: rows of a dataset in, batches for [`NestedModel`] out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerBase


class TextColumnsCollator:
    """
    Tokenises text columns: each becomes its own batch of token ids under the column's name.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the backbone.
        columns (`Sequence[str]`): Columns with text, in the order in which the objective takes them.
        max_length (`int`): Longest text in tokens; longer ones are cut.

    Raises:
        ValueError: if a row lacks a column, or has something other than text in it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, columns: Sequence[str], max_length: int):
        self.tokenizer = tokenizer
        self.columns = tuple(columns)
        self.max_length = max_length

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, BatchEncoding]:
        for row in rows:
            for column in self.columns:
                if not isinstance(row.get(column), str):
                    raise ValueError(
                        f"Column {column!r} of a row is not text: {row.get(column)!r}; the row has {', '.join(row)}."
                    )
        return {
            column: self.tokenizer(
                [row[column] for row in rows],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_token_type_ids=False,
                return_tensors="pt",
            )
            for column in self.columns
        }
