"""Read data files and tokenise their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, Features, IterableDataset
from datasets.data_files import DataFilesList
from datasets.exceptions import DatasetGenerationError, DatasetsError
from transformers import PreTrainedTokenizerBase

from ..utils.columns import fields_of
from ..utils.hashing import digest_of_files
from .dataset_checks import require_columns
from .formats import (
    FIRST_ROWS,
    TABLES,
    UNREADABLE,
    Row,
    binary,
    columns_of,
    is_pattern,
    naming_file,
    parquet_columns,
    require_one_format,
    rows_of,
    suffix_of,
    text_of,
)  # fmt: skip
from .streams import column_names_of


TEXT = pa.string()
VERSION = "1"  # of how files are read: the library datasets keeps what an earlier version read apart


def load_files(
    files: Sequence[str], *, text: Iterable[str] | None = None, streaming: bool = False
) -> Dataset | IterableDataset:
    """
    Read data files of one format: text (one row per line, column `text`), JSON Lines, CSV, TSV or Parquet. All but
    Parquet may be gzipped. Files are paths, patterns of paths, or URLs. Missing values, and empty cells of CSV and TSV
    files, are `None`. The columns `text`, by default all, become text ([`text_of`]): no type is guessed. Others keep
    the types of JSON or Parquet; a JSON column whose values have no common type becomes text. A stream
    ([`~datasets.IterableDataset`]) is read during training.

    Raises:
        ValueError: if a file cannot be read, or the formats are unknown or differ. The message names the files.
        OSError: if a file does not exist.
    """
    require_one_format(files)
    columns = None if text is None else tuple(text)
    if streaming:
        return IterableDataset.from_generator(_streamed, gen_kwargs={"files": list(files), "text": columns})
    return load_split(list(files), "train", columns)


def load_split(files: Any, split: str, text: tuple[str, ...] | None = None) -> Dataset:
    """A split, which may be in part, of files by split, as [`load_files`] reads them."""
    every = chain(*files.values()) if isinstance(files, Mapping) else files
    # The library itself knows a file by its size and time of change.
    content = f"{VERSION}-{digest_of_files(map(str, every))}"
    builder = DataFiles(dataset_name="m3bert", hash=content, data_files=files, text=text)
    try:
        builder.download_and_prepare()
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    return builder.as_dataset(split)


@dataclass
class DataFilesConfig(datasets.BuilderConfig):
    """The files, and their columns that are text, as [`load_files`]."""

    text: tuple[str, ...] | None = None


class DataFiles(datasets.ArrowBasedBuilder):
    """The rows of files, which the library datasets keeps in a table on disk."""

    BUILDER_CONFIG_CLASS = DataFilesConfig

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: Any) -> list[Any]:
        splits = {str(split): [str(file) for file in files] for split, files in self.config.data_files.items()}
        types: dict[str, pa.DataType] = {}
        for file in chain(*splits.values()):
            for name, kind in _types(file):
                kind = TEXT if self.config.text is None or name in self.config.text else kind
                types[name] = _common(types.get(name, kind), kind)
        self.info.features = Features.from_arrow_schema(pa.schema(types))
        return [datasets.SplitGenerator(split, gen_kwargs={"files": files}) for split, files in splits.items()]

    def _generate_tables(self, files: Sequence[str]) -> Iterator[tuple[tuple[int, int], pa.Table]]:
        schema = self.info.features.arrow_schema
        for shard, file in enumerate(files):
            for block, columns in enumerate(_blocks(file)):
                rows = len(next(iter(columns.values())))
                arrays = [_array(columns.get(field.name, [None] * rows), field.type) for field in schema]
                yield (shard, block), pa.Table.from_arrays(arrays, schema=schema)


def _blocks(file: str) -> Iterator[Row]:
    """Column -> values, of some rows of a file at a time."""
    if suffix_of(file) == ".parquet":
        with naming_file(file):
            yield from parquet_columns(file)
        return
    rows = rows_of(file)
    while block := list(islice(rows, FIRST_ROWS)):
        yield {name: [row.get(name) for row in block] for name in dict.fromkeys(name for row in block for name in row)}


def _types(file: str) -> Iterator[tuple[str, pa.DataType]]:
    """The columns of a file and the types of their values: for JSON, per block of rows."""
    if suffix_of(file) == ".parquet":
        with naming_file(file), binary(file) as content:
            schema = pq.read_schema(content)
        yield from zip(schema.names, schema.types, strict=True)
    elif suffix_of(file) in (".txt", *TABLES):
        yield from ((name, TEXT) for name in columns_of(file))
    else:
        for block in _blocks(file):
            yield from ((name, _type_of(values)) for name, values in block.items())


def _type_of(values: Sequence[object]) -> pa.DataType:
    try:
        return pa.array(values).type
    except (pa.ArrowException, OverflowError):  # of several types, or beyond 64 bits
        return TEXT


def _common(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type that holds values of both types, which is text if there is no other."""
    try:
        fields = [pa.schema({"": kind}) for kind in (first, second)]
        return pa.unify_schemas(fields, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return TEXT


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    """Values of one type; as text, if that is the type."""
    if isinstance(values, pa.Array):
        if kind != TEXT or values.type == TEXT:
            return values.cast(kind)
        values = values.to_pylist()
    return pa.array(map(text_of, values) if kind == TEXT else values, kind)


def _streamed(files: Sequence[str], text: Sequence[str] | None) -> Iterator[Row]:
    """The rows of files, which are shards of a stream."""
    for pattern in files:
        for file in DataFilesList.from_patterns([pattern]) if is_pattern(pattern) else [pattern]:
            rows, columns = rows_of(file), dict[str, None]()
            while block := list(islice(rows, FIRST_ROWS)):
                columns |= dict.fromkeys(name for row in block for name in row)
                for row in block:
                    values = ((name, row.get(name)) for name in columns)
                    yield {name: text_of(value) if text is None or name in text else value for name, value in values}


@contextmanager
def reading_data(what: str) -> Iterator[None]:
    """Raise what the library datasets makes of broken data as a ValueError; a missing file stays an OSError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (*UNREADABLE, DatasetsError, StopIteration) as error:  # StopIteration for an empty file
        reason = " ".join(str(error.__cause__ or error).split()) or "it is empty"
        raise ValueError(f"{what} cannot be read: {reason}") from error


def require_texts(dataset: Dataset, columns: Sequence[str]) -> None:
    """Check that every row of a dataset has a text in every text column, for `"title+text"` in one of the fields. A
    stream is checked while it is read. Raises as [`require_columns`], or a ValueError if a text is missing."""
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
    Tokenise a text column: one row per text, truncated to `max_length` tokens, with the columns `input_ids`,
    `attention_mask` and `special_tokens_mask`. A stream is tokenised during training. ValueError if the dataset is
    empty or lacks the column.
    """
    require_columns(dataset, [column])

    def tokenized(texts: Sequence[str]) -> Any:
        options = {"return_special_tokens_mask": True, "return_token_type_ids": False}
        return tokenizer(list(texts), truncation=True, max_length=max_length, **options)

    shown = {"desc": "Tokenizing"} if isinstance(dataset, Dataset) else {}
    names = column_names_of(dataset)
    return dataset.map(tokenized, input_columns=[column], batched=True, remove_columns=names, **shown)
