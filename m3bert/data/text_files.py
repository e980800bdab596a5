"""Files of unlabelled texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..utils.columns import fields_of
from .formats import file_name


class TextFiles:
    """
    Files of texts, each a source: .txt, .jsonl, .csv, .tsv or .parquet files, also gzipped, patterns of paths, or
    URLs. `title+text` joins two columns. ValueError if a file cannot be read or lacks a column, OSError if it does not
    exist.
    """

    def __init__(self, files: Sequence[str], column: str = "text") -> None:
        from .dataset_checks import require_columns  # which imports much
        from .files import load_files

        self.column, self.streams = column, {file: load_files([file], streaming=True) for file in files}
        for file, stream in self.streams.items():
            require_columns(stream, fields_of(column), file)

    def sources(self, tokenizer: Any) -> dict[str, Iterator[str]]:
        """Name of each file, or its path if two have one name -> its texts, as an encoder with this tokenizer reads
        them."""
        from .collators import joined_texts, separator_for

        separator = separator_for([self.column], tokenizer)
        sources: dict[str, Iterator[str]] = {}
        for file, stream in self.streams.items():
            name = file_name(file)
            rows = ({name: value or "" for name, value in row.items()} for row in stream)
            sources[file if name in sources else name] = joined_texts(rows, self.column, separator)
        return sources
