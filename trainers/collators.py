"""Collators: rows of a dataset in, batches for [`NestedModel`] out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

from .teacher import TeacherEmbeddings


def fields_of(column: str) -> list[str]:
    """The dataset columns behind a text column: `"title+text"` is the fields `title` and `text`, joined."""
    return column.split("+")


def separator_for(columns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str:
    """
    What stands between joined fields: the tokenizer's separator token (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), appendix B, stage 3).

    Raises:
        ValueError: if fields are to be joined and the tokenizer has none.
    """
    joined = [column for column in columns if len(fields_of(column)) > 1]
    if joined and tokenizer.sep_token is None:
        raise ValueError(f"{joined[0]!r} needs a separator, and the tokenizer has none: pass one.")
    return tokenizer.sep_token or ""


def joined_text(row: Mapping[str, Any], column: str, separator: str) -> str:
    """
    The text of a row in a column, its fields joined; one that is empty or `None` is left out.

    Raises:
        ValueError: if the row lacks a field, or has something other than text in it.
    """
    fields = fields_of(column)
    for field in fields:
        value = row.get(field)
        if not (isinstance(value, str) or (value is None and field in row and len(fields) > 1)):
            raise ValueError(f"Column {field!r} of a row is not text: {value!r}; the row has {', '.join(row)}.")
    return f" {separator} ".join(row[field] for field in fields if row[field])


class TextColumnsCollator:
    """
    Tokenises text columns: each becomes its own batch of token ids under the column's name, with `text_ids`, a number
    a text that is the same for equal token ids (on every rank, in every run).

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the backbone.
        columns (`Sequence[str]`): Columns with text, in the order in which the objective takes them. `"title+text"`
            joins two fields with the separator; a field that is empty or `None` is left out.
        max_length (`int`): Longest text in tokens; longer ones are cut.
        separator (`str`, *optional*): Between fields; by default the tokenizer's separator token ([`separator_for`]).
        teacher ([`TeacherEmbeddings`], *optional*): Adds to each column `teacher`, its embeddings of the texts.
        views (`int`, *optional*, defaults to 1): How often each column is given, under names of their own: two dropout
            views of one text are two columns.

    Raises:
        ValueError: if fields are to be joined and the tokenizer has no separator; on a call, if a row lacks a field,
            or has something other than text in it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: Sequence[str],
        max_length: int,
        separator: str | None = None,
        views: int = 1,
        teacher: TeacherEmbeddings | None = None,
    ):
        self.tokenizer = tokenizer
        self.columns = tuple(columns)
        self.max_length = max_length
        self.separator = separator_for(self.columns, tokenizer) if separator is None else separator
        self.views, self.teacher = views, teacher

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, BatchEncoding]:
        batch = {}
        for column in self.columns:
            texts = [joined_text(row, column, self.separator) for row in rows]
            encoded = self.tokenizer(
                texts,
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_token_type_ids=False,
                return_tensors="pt",
            )
            encoded["text_ids"] = _text_ids(encoded["input_ids"], encoded["attention_mask"])
            if self.teacher is not None:
                encoded["teacher"] = self.teacher.of(texts)
            for view in range(self.views):
                batch[column if view == 0 else f"{column} (view {view + 1})"] = encoded
        return batch


def _text_ids(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """A hash of 63 bits for each text's real tokens."""
    digests = [
        blake2b(ids[mask.bool()].numpy().tobytes(), digest_size=8).digest()
        for ids, mask in zip(input_ids, attention_mask, strict=True)
    ]
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests], dtype=torch.long)
