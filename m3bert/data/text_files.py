"""Files of unlabelled texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..utils.columns import fields_of
from .formats import check_files, file_name


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextFiles:
    """
    Files of texts, each a source.

    Args:
        files (`Sequence[str]`): .txt, .jsonl, .csv, .tsv or .parquet files, also gzipped, patterns of paths, or URLs.
        column (`str`, *optional*, defaults to `"text"`): Column with the texts; `title+text` joins two columns.

    Attributes:
        streams (`dict[str, IterableDataset]`): File -> its rows.

    Raises:
        ValueError: if a file cannot be read, or lacks a column.
        OSError: if a file does not exist.
    """

    def __init__(self, files: Sequence[str], column: str = "text") -> None:
        self.column, fields = column, fields_of(column)
        for file in files:
            check_files([file], fields)
        from .dataset_checks import require_columns  # after the files, which are refused at once
        from .files import load_files

        self.streams: dict[str, Any] = {file: load_files([file], streaming=True) for file in files}
        for file, stream in self.streams.items():
            require_columns(stream, fields, file)

    def sources(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Iterator[str]]:
        """Name of each file -> its texts, as an encoder with this tokenizer reads them; a missing text is empty. Files
        of the same name have their path as a name."""
        from .collators import joined_texts, separator_for

        separator = separator_for([self.column], tokenizer)
        sources: dict[str, Iterator[str]] = {}
        for file, stream in self.streams.items():
            name = file_name(file)
            rows = ({name: value or "" for name, value in row.items()} for row in stream)
            sources[file if name in sources else name] = joined_texts(rows, self.column, separator)
        return sources
