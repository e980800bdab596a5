"""Read data files and tokenise their texts."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase

from ...encode.columns import fields_of
from ..core.dataset_checks import require_columns
from .formats import FORMATS, columns_of, require_one_format, suffix_of


# What reading broken data raises: datasets (StopIteration for an empty file), pyarrow (a ValueError), gzip and zlib.
UNREADABLE = (DatasetsError, StopIteration, ValueError, EOFError, gzip.BadGzipFile, zlib.error)


def load_files(files: Sequence[str], *, streaming: bool = False) -> Any:
    """
    Read data files of one format: text (one row per line, column `text`), JSON Lines, CSV, TSV or Parquet. All but
    Parquet may be gzipped. In CSV and TSV files, an empty cell is `None`.

    Args:
        files (`Sequence[str]`): Paths or URLs.
        streaming (`bool`, *optional*, defaults to `False`): Whether to read rows during training, not before it.

    Returns:
        [`~datasets.Dataset`], or [`~datasets.IterableDataset`] if `streaming`

    Raises:
        ValueError: if a file cannot be read, or the formats are unknown or differ. The message names the files.
        OSError: if a file does not exist.
    """
    builder, options = require_one_format(files)
    if streaming:
        return IterableDataset.from_generator(_streamed, gen_kwargs={"files": list(files)})
    with reading(", ".join(files), files):
        return load_dataset(builder, data_files=list(files), split="train", **options)


def _streamed(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of files, which are shards of a stream; an error names the file."""
    for file in files:
        builder, options = FORMATS[suffix_of(file)]
        with reading(file, [file]):
            rows = load_dataset(builder, data_files=file, split="train", streaming=True, **options)
            # `iter` gives all rows: in a worker process, the dataset itself would only give those of that worker.
            for columns in rows.iter(batch_size=1000):
                for values in zip(*columns.values(), strict=True):
                    yield dict(zip(columns, values, strict=True))


@contextmanager
def reading(what: str, files: Sequence[str] = ()) -> Iterator[None]:
    """Raise what libraries make of broken data as a ValueError that names `what`, and the line of a broken data file.
    A missing file stays an OSError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        for file in filter(os.path.isfile, files):
            columns_of(file, rows=None)
        reason = " ".join(str(error.__cause__ or error).split()) or "it is empty"
        raise ValueError(f"{what} cannot be read: {reason}") from error


def require_texts(dataset: Any, columns: Sequence[str]) -> None:
    """
    Check that every row of a dataset has a text in every text column, before any work is done. A stream is checked
    while it is read.

    Args:
        dataset ([`~datasets.Dataset`] or stream): The data.
        columns (`Sequence[str]`): Text columns; `"title+text"` needs a text in one of the fields.

    Raises:
        ValueError: as [`require_columns`], or if a text is missing or empty.
    """
    fields = list(dict.fromkeys(field for column in columns for field in fields_of(column)))
    require_columns(dataset, fields)
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return
    start = 0
    for table in dataset.select_columns(fields).with_format("arrow").iter(batch_size=100_000):
        letters = {name: pc.utf8_length(pc.utf8_trim_whitespace(table[name].cast("string"))) for name in fields}
        for column in columns:
            longest = pc.fill_null(pc.max_element_wise(*(letters[name] for name in fields_of(column))), 0)
            if (row := pc.index(longest, 0).as_py()) >= 0:
                raise ValueError(f"Row {start + row + 1} of the dataset: column {column!r} has no text.")
        start += len(table)


def tokenize_texts(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    column: str = "text",
    max_length: int = 512,
) -> Any:
    """
    Tokenise a text column: one row per text, with longer texts truncated. A stream is tokenised during training.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): Dataset with the texts.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer.
        column (`str`, *optional*, defaults to `"text"`): Column to read.
        max_length (`int`, *optional*, defaults to 512): Maximum length of a text in tokens.

    Returns:
        The same kind of dataset, with the columns `input_ids`, `attention_mask`, `special_tokens_mask`.

    Raises:
        ValueError: if the dataset is empty or lacks the column.
    """
    require_columns(dataset, [column])

    def tokenized(texts: Sequence[str]) -> Any:
        options = {"return_special_tokens_mask": True, "return_token_type_ids": False}
        return tokenizer(list(texts), truncation=True, max_length=max_length, **options)

    shown = {"desc": "Tokenizing"} if isinstance(dataset, Dataset) else {}
    names = dataset.column_names or list(next(iter(dataset)))
    return dataset.map(tokenized, input_columns=[column], batched=True, remove_columns=names, **shown)
