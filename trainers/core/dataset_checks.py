"""Checks of a dataset before training starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from transformers import TrainingArguments

from .streams.stream import Stream


@dataclass(frozen=True)
class Origin:
    """
    The files of a dataset.

    Args:
        place_of (`Callable[[int], str]`): Index of a row -> its place, such as `pairs.csv, line 3`.
        header (`str`, *optional*): A file whose first line names the columns.
    """

    place_of: Callable[[int], str]
    header: str | None = None


# Of datasets as they were read; others that are made of them have other rows.
ORIGINS: WeakKeyDictionary[Any, Origin] = WeakKeyDictionary()


def place_of(dataset: Any, row: int) -> str:
    """Where a row of a dataset is, for an error message: its file and line if they are known, or its number."""
    origin = ORIGINS.get(dataset)
    return f"Row {row + 1} of the dataset" if origin is None else origin.place_of(row)


def header_of(dataset: Any) -> str:
    """For the end of an error message: where the names of the columns were read, if it was in a file without types."""
    if isinstance(dataset, Stream):
        header: str | None = dataset.shards[0].name
    else:
        header = ORIGINS[dataset].header if dataset in ORIGINS else None
    if header is None or not header.removesuffix(".gz").endswith((".csv", ".tsv")):
        return ""
    return f" Line 1 of {header} is read as the names of the columns; if it is a row, put a line with names above it."


def on_one_line(columns: Iterable[str]) -> str:
    """Names of columns for an error message. In a broken table, they may have line breaks."""
    return " ".join(", ".join(columns).split())


def require_columns(dataset: Any, columns: Iterable[str]) -> None:
    """
    Check that a dataset has rows and the required columns.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): The data. The length of a stream is not
            checked, nor its columns if it does not know them.
        columns (`Iterable[str]`): Required columns.

    Raises:
        ValueError: if the dataset is empty or lacks a column. The message names the columns found.
    """
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ValueError("The dataset is empty.")
    found = dataset.column_names
    missing = [column for column in columns if found is not None and column not in found]
    if missing:
        hint = " trainers.data.files.tokenize_texts makes input_ids of texts." if "input_ids" in missing else ""
        hint += header_of(dataset)
        raise ValueError(f"The dataset lacks the column(s) {', '.join(missing)}; it has {on_one_line(found)}.{hint}")


def require_one_batch(dataset: Any, args: TrainingArguments, name: str = "The training set") -> None:
    """
    Check that a training set fills one batch, if `dataloader_drop_last` drops smaller batches. `name` is what the
    message calls it.

    Raises:
        ValueError: if the training set is smaller than one batch: an epoch would have no step.
    """
    batch = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and isinstance(dataset, Sized) and len(dataset) < batch:
        raise ValueError(
            f"{name} ({len(dataset)} rows) is smaller than one batch ({batch} rows): lower "
            "per_device_train_batch_size, or pass dataloader_drop_last=False."
        )
