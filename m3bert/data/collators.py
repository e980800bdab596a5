"""Collators: turn rows of a dataset into batches for [`NestedModel`]."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, tee
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from ..encode.packed_rows import DOCUMENTS
from ..utils.columns import fields_of
from ..utils.hashing import hash_of
from .formats import number_of
from .packing import DOCUMENT_LENGTHS, Frame
from .teacher import TeacherEmbeddings


Row = Mapping[str, Any]


def _numbers(value: str | float | list[float], column: str) -> float | list[float]:
    """A number or a list of numbers, parsed if a file gave it as text. ValueError if it is neither."""
    if not isinstance(value, str):
        return value
    try:
        number = json.loads(value) if value.startswith("[") else number_of(value)
    except ValueError as error:
        raise ValueError(f"Column {column!r} of a row: {error}.") from error
    return math.nan if number is None else number


def separator_for(columns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str:
    """Default separator of joined fields: the tokenizer's separator token (m3BERT,
    [2605.19568](https://huggingface.co/papers/2605.19568), appendix B, stage 3). ValueError if it has none."""
    joined = [column for column in columns if "+" in column]
    if joined and tokenizer.sep_token is None:
        raise ValueError(f"{joined[0]!r} needs a separator, and the tokenizer has none: pass one.")
    return tokenizer.sep_token if joined else ""


def joined_texts(
    rows: Iterable[Row], column: str, separator: str, place: Callable[[int], str] = lambda number: ""
) -> Iterator[str]:
    """
    The texts of rows in a text column. `"title+text"` joins two fields, with the `separator` between them; fields that
    are empty or `None` are left out. A ValueError says that a row lacks a field, or that the field is not text;
    `place` says where a row is, by its number from 0.
    """
    fields = fields_of(column)
    glue, alone = f" {separator} ", len(fields) == 1
    for number, row in enumerate(rows):
        for field in fields:
            value = row.get(field)
            if not (isinstance(value, str) or (value is None and field in row and not alone)):
                raise ValueError(
                    f"{place(number)}Column {field!r} of a row is not text: {value!r}; the row has {', '.join(row)}."
                )
        yield glue.join(row[field] for field in fields if row[field])


class TextColumnsCollator:
    """
    Tokenises text columns. Each column becomes a batch of token ids under its name, with `text_ids`: one number
    per text, which is the same for equal token ids without the prompt, on every rank and in every run.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the backbone.
        columns (`Sequence[str]`): Text columns, in the order that the objective expects; see [`joined_texts`].
        max_length (`int`): Maximum length of a text in tokens; longer texts are truncated.
        separator (`str`, *optional*): Text between joined fields. Default: the tokenizer's separator token.
        views (`int`, *optional*, defaults to 1): Number of copies of each column, for as many dropout views.
        teacher ([`TeacherEmbeddings`], *optional*): Embeddings of the texts without prompts, added to each column as
            `teacher`.
        prompts (`dict[str, str]`, *optional*): Column -> prompt before its texts.
        max_lengths (`dict[str, int]`, *optional*): Column -> `max_length` of its texts, with the prompt.
        label (`str`, *optional*): Column with numbers, or lists of as many numbers, which become `labels`.

    Raises:
        ValueError: if a column joins fields and there is no separator; on a call, if a row lacks a field, or the field
            is not text or is empty, or if a label is not finite.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        columns: Sequence[str],
        max_length: int,
        separator: str | None = None,
        views: int = 1,
        teacher: TeacherEmbeddings | None = None,
        prompts: Mapping[str, str] = {},
        max_lengths: Mapping[str, int] = {},
        label: str | None = None,
    ):
        self.tokenizer = tokenizer
        self.columns = tuple(columns)
        self.max_length = max_length
        self.separator = separator_for(self.columns, tokenizer) if separator is None else separator
        self.views, self.teacher, self.label = views, teacher, label
        self.prompts, self.max_lengths = dict(prompts), dict(max_lengths)

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns of a dataset that are read."""
        fields = [field for column in self.columns for field in fields_of(column)]
        return tuple(dict.fromkeys([*fields, *([self.label] if self.label else [])]))

    def texts(self, dataset: Iterable[Row]) -> Iterator[str]:
        """All texts of a dataset, without prompts. A stream is read once, from its start to its end."""
        readers = zip(tee(dataset, len(self.columns)), self.columns, strict=True)
        texts = (joined_texts(rows, column, self.separator) for rows, column in readers)
        return chain.from_iterable(zip(*texts, strict=True))

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for column in self.columns:
            texts = [*joined_texts(rows, column, self.separator)]
            if not all(map(str.strip, texts)):
                raise ValueError(f"Column {column!r} of a row has no text.")
            prompt, length = self.prompts.get(column, ""), self.max_lengths.get(column, self.max_length)
            encode = partial(self.tokenizer, padding=True, truncation=True, max_length=length, return_tensors="pt")
            encoded = encode([prompt + text for text in texts], return_token_type_ids=False)
            bare = encode(texts) if prompt else encoded
            real = zip(bare["input_ids"], bare["attention_mask"].bool(), strict=True)
            encoded["text_ids"] = torch.tensor([hash_of(ids[mask].numpy().tobytes()) for ids, mask in real])
            if self.teacher is not None:
                encoded["teacher"] = self.teacher.of(texts)
            for view in range(self.views):
                batch[column if view == 0 else f"{column} (view {view + 1})"] = encoded
        if self.label is not None:
            # (rows,), or (rows, numbers) for lists
            values = [_numbers(row[self.label], self.label) for row in rows]
            labels = batch["labels"] = torch.tensor(values, dtype=torch.float32)
            if not torch.isfinite(labels).all():
                raise ValueError(f"Column {self.label!r} of a row is not a finite number.")
        return batch


class ColumnsCollator:
    """The collators of datasets whose columns may differ, as one. The rows of a batch are of one dataset."""

    def __init__(self, collators: Sequence[TextColumnsCollator]):
        self.collators = tuple(collators)

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns that any of the collators reads."""
        return tuple(dict.fromkeys(field for each in self.collators for field in each.fields))

    @property
    def shared_fields(self) -> tuple[str, ...]:
        """The columns that all of them read, and so every dataset has."""
        return tuple(field for field in self.fields if all(field in each.fields for each in self.collators))

    def of(self, columns: Iterable[str]) -> TextColumnsCollator:
        """The collator for rows with these columns: the one that reads the most of them, and no others."""
        fitting = [each for each in self.collators if set(each.fields) <= set(columns)]
        return max(fitting or self.collators, key=lambda each: len(each.fields))

    def texts(self, datasets: Iterable[Any]) -> Iterator[str]:
        """All texts of datasets, as [`TextColumnsCollator.texts`]."""
        for dataset in datasets:
            yield from self.of(dataset.column_names or ()).texts(dataset)

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        return self.of(rows[0])(rows)


@dataclass
class MaskedLMCollator(DataCollatorForLanguageModeling):
    """
    [`~transformers.DataCollatorForLanguageModeling`] for rows with one document and for packed rows. A row with a
    column `document_lengths` is packed: its batch has `document_ids` `(rows, tokens)`, 1, 2, ... for the documents of
    a row and 0 for padding, in place of a mask. Special tokens of every document are never predicted.

    Args:
        key (`tuple[int, ...]`, *optional*): Which masks to draw: they depend on it and on the batch alone, so that a
            resumed run draws the same. Default: from torch's generator.
    """

    key: tuple[int, ...] | None = None

    @cached_property
    def frame(self) -> Frame:
        """The special tokens around every document."""
        return Frame.of(self.tokenizer)

    def torch_call(self, rows: Sequence[Row]) -> Row:
        if self.key is None:
            return self._masked(rows)
        drawn_for = [repr(self.key).encode(), *(np.asarray(row["input_ids"], np.int64).tobytes() for row in rows)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(hash_of(b"".join(drawn_for), bits=56))
            return self._masked(rows)

    def _masked(self, rows: Sequence[Row]) -> Row:
        if DOCUMENT_LENGTHS not in rows[0]:
            return super().torch_call(rows)
        lengths = [row[DOCUMENT_LENGTHS] for row in rows]
        tokens = [torch.tensor(row["input_ids"], dtype=torch.long) for row in rows]
        numbers = [torch.arange(1, len(each) + 1).repeat_interleave(torch.tensor(each)) for each in lengths]
        special = [self.frame.special_tokens(each) for each in lengths]
        input_ids, labels = self.torch_mask_tokens(
            pad_sequence(tokens, batch_first=True, padding_value=self.tokenizer.pad_token_id),
            special_tokens_mask=pad_sequence(special, batch_first=True, padding_value=True),
        )
        return {"input_ids": input_ids, "labels": labels, DOCUMENTS: pad_sequence(numbers, batch_first=True)}
