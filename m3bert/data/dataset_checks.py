"""Checks of a dataset before training starts."""

from __future__ import annotations

from collections.abc import Iterable, Sized

from datasets import Dataset, IterableDataset
from torch.utils.data import ConcatDataset
from transformers import TrainingArguments

from ..utils.columns import check_columns
from .streams import column_names_of


def require_columns(dataset: Dataset, columns: Iterable[str], name: str = "The dataset") -> None:
    """[`check_columns`] of a dataset or stream, which the message calls `name`."""
    check_columns(column_names_of(dataset), columns, name)


def require_one_batch(dataset: Dataset, args: TrainingArguments, name: str = "The training set") -> None:
    """Raise a ValueError if a training set, which the message calls `name`, is empty, or smaller than one batch and
    `dataloader_drop_last` drops smaller batches: an epoch would have no step; or if `train_sampling_strategy` cannot
    order its rows."""
    if dataset is None:
        return
    if args.train_sampling_strategy != "random" and isinstance(dataset, IterableDataset | ConcatDataset):
        raise ValueError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} orders the rows of one data set, not a stream "
            "or several data sets, or for batch_sampler='no_duplicates': leave it out."
        )
    batch = args.train_batch_size * args.world_size if args.dataloader_drop_last else 1
    if isinstance(dataset, Sized) and len(dataset) < batch:
        raise ValueError(
            f"{name} ({len(dataset)} rows) is smaller than one batch ({batch} rows): lower "
            "per_device_train_batch_size, or pass dataloader_drop_last=False."
        )
    if not isinstance(dataset, Sized) and next(iter(dataset), None) is None:
        raise ValueError(f"{name} has no rows.")


def require_known_metric(args: TrainingArguments, eval_dataset: Dataset | None, evaluator: bool) -> None:
    """Raise a ValueError if neither the evaluator nor one of several evaluation sets gives `metric_for_best_model`."""
    if args.metric_for_best_model is None or not isinstance(eval_dataset, dict):
        return
    metric = "eval_" + args.metric_for_best_model.removeprefix("eval_")
    of_a_set = any(metric.startswith(f"eval_{name}_") for name in eval_dataset)
    if not of_a_set and (metric == "eval_loss" or not evaluator):
        legal = ", ".join(f"eval_{name}_loss" for name in eval_dataset)
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} is of none of the evaluation sets; legal values: "
            f"{legal}, or another of their metrics."
        )
