"""Checks of a dataset before training starts."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

from transformers import TrainingArguments


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
        raise ValueError(f"The dataset lacks the column(s) {', '.join(missing)}; it has {', '.join(found)}.{hint}")


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
