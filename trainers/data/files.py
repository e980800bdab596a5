"""Read data files and tokenise their texts."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from ..core.dataset_checks import require_columns
from ..core.streams import DatasetShard, Stream
from .collators import joined_text


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
    kind = format_of(files)
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


def stream_files(files: Sequence[str]) -> Stream:
    """
    A [`Stream`] of data files, which are its shards: see [`load_files`].

    Args:
        files (`Sequence[str]`): Paths or URLs.

    Returns:
        [`Stream`]

    Raises:
        ValueError: as [`load_files`].
    """
    unit = "line" if format_of(files) in ("text", "json") else "row"
    return Stream(
        [
            DatasetShard(
                file,
                load_files([file], streaming=True),
                unit,
                size=None if is_url(file) else Path(file).stat().st_size,
            )
            for file in files
        ]
    )


def format_of(files: Sequence[str]) -> str:
    """
    The format of data files, as the library datasets calls it.

    Raises:
        ValueError: if a file does not exist or is empty, or the formats are unknown or differ.
    """
    kinds = set()
    for file in files:
        suffix = suffix_of(file)
        if suffix not in FORMATS:
            raise ValueError(f"{file} has an unknown format; legal suffixes: {', '.join(FORMATS)}, also with .gz.")
        if not is_url(file):
            if not Path(file).is_file():
                raise ValueError(f"{file} does not exist.")
            with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as opened:
                empty = not opened.read(1)
            if empty:
                raise ValueError(f"The dataset is empty: {file} has no content.")
        kinds.add(FORMATS[suffix])
    if len(kinds) != 1:
        raise ValueError(f"The files must have one format; got {', '.join(sorted(kinds)) or 'no files'}.")
    return kinds.pop()


def is_url(file: str) -> bool:
    """Whether the name of a file is a URL, such as `hf://datasets/...` or `https://...`, and not a local path."""
    return "://" in file


def suffix_of(file: str) -> str:
    """The suffix of a file that says its format: that of `rows.csv.gz` is `.csv`."""
    return Path(file.removesuffix(".gz")).suffix


def tokenize_texts(
    dataset: Dataset | Stream, tokenizer: PreTrainedTokenizerBase, *, column: str = "text", max_length: int = 512
) -> Any:
    """
    Tokenise a text column: one row per text, with longer texts truncated. A stream is tokenised during training.

    Args:
        dataset ([`~datasets.Dataset`] or [`Stream`]): Dataset with the texts.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer.
        column (`str`, *optional*, defaults to `"text"`): Column to read.
        max_length (`int`, *optional*, defaults to 512): Maximum length of a text in tokens.

    Returns:
        [`~datasets.Dataset`] or [`Stream`]: columns `input_ids`, `attention_mask`, `special_tokens_mask`.

    Raises:
        ValueError: if the dataset is empty or lacks the column.
    """
    require_columns(dataset, [column])
    tokenize = Tokenize(tokenizer, column, max_length)
    if isinstance(dataset, Stream):
        return dataset.with_transform(tokenize.rows, TOKENIZED)
    return dataset.map(
        lambda columns: tokenize.texts(columns[column]),
        batched=True,
        remove_columns=dataset.column_names,
        desc="Tokenizing",
    )


TOKENIZED = ("input_ids", "attention_mask", "special_tokens_mask")


@dataclass(frozen=True)
class Tokenize:
    """Tokenises texts. Worker processes can be sent an object of this class."""

    tokenizer: PreTrainedTokenizerBase
    column: str
    max_length: int

    def texts(self, texts: Sequence[str]) -> Any:
        """Columns -> lists, one entry per text."""
        return self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self.max_length,
            return_special_tokens_mask=True,
            return_token_type_ids=False,
        )

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """
        The tokens of the text column of each row.

        Raises:
            ValueError: if the column of a row is not text.
        """
        columns = self.texts([joined_text(row, self.column, "") for row in rows])
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
