"""One training set or several: their rows, and the collators for their columns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from torch.utils.data import ConcatDataset
from transformers import PreTrainedTokenizerBase

from ..utils.columns import fields_of
from .collators import TextColumnsCollator
from .dataset_checks import require_one_batch
from .files import require_texts


SPLITS = {"train", "validation", "valid", "dev", "test"}  # usual names of the splits of one data set


class NamedDatasets(ConcatDataset):
    """Data sets by name, whose columns may differ, with one numbering of their rows from the first data set on."""

    datasets: list[Any]
    column_names = None  # each data set has its own

    def __init__(self, named: Mapping[str, Dataset]):
        super().__init__(named.values())
        self.named = dict(named)

    @property
    def starts(self) -> list[int]:
        """The number of the first row of each data set."""
        return [0, *self.cumulative_sizes[:-1]]

    def __getitems__(self, rows: Sequence[int]) -> list[Any]:
        """The rows of a batch. They are of one data set, and are read together."""
        number = bisect_right(self.cumulative_sizes, rows[0])
        return self.datasets[number].__getitems__([row - self.starts[number] for row in rows])


def training_data(data: Any, args: Any) -> Any:
    """
    What a trainer trains on: [`NamedDatasets`] for a `dict` of data sets, and for one whose batches are without
    duplicates; any other dataset as it is. ValueError for a `dict` of the splits of one data set, or if one of several
    data sets is smaller than one batch and smaller batches are dropped.
    """
    if data is None or (not isinstance(data, dict) and args.batch_sampler == "batch_sampler"):
        return data
    if isinstance(data, dict) and SPLITS & data.keys():
        raise ValueError(f"These are the splits of one data set, {', '.join(data)}: pass one of them.")
    named = data if isinstance(data, dict) else {"train": data}
    for name, dataset in named.items():
        require_one_batch(dataset, args, f"The data set {name!r}")
    return NamedDatasets(named)


def with_lengths(data: Any, columns: Sequence[str], name: str) -> Any:
    """A data set with the lengths of its texts, for `train_sampling_strategy`; streams and several sets as they
    are."""
    if not isinstance(data, Dataset) or name in data.column_names:
        return data
    texts = [data[field] for column in columns for field in fields_of(column)]
    return data.add_column(name, [sum(len(text or "") for text in row) for row in zip(*texts, strict=True)])


def by_columns(train_dataset: Any, eval_dataset: Any) -> list[list[Any]]:
    """Group the datasets of a run by the columns that are read: one group, or with [`NamedDatasets`] one each."""
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    trained = train_dataset.datasets if isinstance(train_dataset, NamedDatasets) else [train_dataset]
    datasets = [dataset for dataset in (*trained, *evaluated) if dataset is not None]
    return [[dataset] for dataset in datasets] if isinstance(train_dataset, NamedDatasets) else [datasets]


def collator_of(args: Any, datasets: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> TextColumnsCollator:
    """The collator for datasets with the same columns. ValueError if these are not clear, or a text is missing."""
    columns = args.columns_of(*datasets)
    roles = args.roles_of(columns)
    for dataset in datasets:
        require_texts(dataset, columns)
    prompts, lengths = args.of_roles("prompt"), args.of_roles("max_length")
    return TextColumnsCollator(
        tokenizer,
        columns,
        args.max_length or args.default_max_length,
        views=args.views,
        prompts={column: prompts[role] for column, role in roles.items() if role in prompts},
        max_lengths={column: lengths[role] for column, role in roles.items() if role in lengths},
        label=args.label_column_of(*datasets),
    )
