"""Read data files and tokenise their texts."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from ..core.dataset_checks import require_columns


FORMATS = {
    ".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip
# Only an empty cell is a missing value: pandas would also drop the texts "NA", "None" and "null".
TABLE = {"keep_default_na": False, "na_values": [""]}
# Format -> builder of the library datasets, with its options. Other formats are builders without options.
BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {"csv": ("csv", TABLE), "tsv": ("csv", {**TABLE, "sep": "\t"})}


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
        ValueError: if a file does not exist, is empty or malformed, or the formats are unknown or differ.
    """
    kinds = set()
    for file in files:
        suffix = suffix_of(file)
        if suffix not in FORMATS:
            raise ValueError(f"{file} has an unknown format; legal suffixes: {', '.join(FORMATS)}, also with .gz.")
        if "://" not in file:
            if not Path(file).is_file():
                raise ValueError(f"{file} does not exist.")
            with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as opened:
                empty = not opened.read(1)
            if empty:
                raise ValueError(f"The dataset is empty: {file} has no content.")
        kinds.add(FORMATS[suffix])
    if len(kinds) != 1:
        raise ValueError(f"The files must have one format; got {', '.join(sorted(kinds)) or 'no files'}.")
    (kind,) = kinds
    builder, options = BUILDERS.get(kind, (kind, {}))
    try:
        return load_dataset(builder, data_files=list(files), split="train", streaming=streaming, **options)
    except DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"Cannot read {', '.join(files)}: {reason}") from error
    except ValueError as error:
        if "corresponds to no data" not in str(error):
            raise
        raise ValueError(f"The dataset is empty: {', '.join(files)} has no rows.") from error


def suffix_of(file: str) -> str:
    """The suffix of a file that says its format: that of `rows.csv.gz` is `.csv`."""
    return Path(file.removesuffix(".gz")).suffix


def tokenize_texts(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, column: str = "text", max_length: int = 512
) -> Dataset:
    """
    Tokenise a text column: one row per text, with longer texts truncated.

    Args:
        dataset ([`~datasets.Dataset`]): Dataset with the texts.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer.
        column (`str`, *optional*, defaults to `"text"`): Column to read.
        max_length (`int`, *optional*, defaults to 512): Maximum length of a text in tokens.

    Returns:
        [`~datasets.Dataset`]: columns `input_ids`, `attention_mask`, `special_tokens_mask`.

    Raises:
        ValueError: if the dataset is empty or lacks the column.
    """
    require_columns(dataset, [column])

    def tokenize(rows: dict[str, list[str]]) -> Any:
        return tokenizer(
            rows[column],
            truncation=True,
            max_length=max_length,
            return_special_tokens_mask=True,
            return_token_type_ids=False,
        )

    return dataset.map(tokenize, batched=True, remove_columns=dataset.column_names, desc="Tokenizing")
