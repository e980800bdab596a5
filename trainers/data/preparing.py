"""Prepare text for masked-LM training: tokenise, cut, pack, and write shards, in several processes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..core.dataset_checks import require_columns
from .files import FORMATS, load_files, suffix_of
from .packing import DOCUMENT_LENGTHS, Frame, packed_rows
from .prepared import SIZES, PreparedData, Sizes, read_manifest, shard_sizes, tokenizer_fingerprint, write_manifest


SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), (DOCUMENT_LENGTHS, pa.list_(pa.int32()))])
ROWS_AT_ONCE = 100_000  # of a column of languages
ROWS_PER_BATCH = 1000  # of a shard: what training reads at once
LEGAL_LANGUAGE = re.compile(r"\w[\w.-]*")  # it names a folder


@dataclass(frozen=True)
class Settings:
    """
    What the prepared rows depend on, apart from the text and the tokenizer.

    Args:
        max_length (`int`, *optional*, defaults to 512): Tokens of a row at most.
        text_column (`str`, *optional*, defaults to `"text"`): Column with the documents.
        language_column (`str`, *optional*): Column with the language of each document. Default: the language is the
            name of the folder that a file is in.
        documents_per_shard (`int`, *optional*, defaults to 10000): Documents per file. They are packed with each
            other.

    Raises:
        ValueError: if a number is below 1.
    """

    max_length: int = 512
    text_column: str = "text"
    language_column: str | None = None
    documents_per_shard: int = 10_000

    def __post_init__(self) -> None:
        for name in ("max_length", "documents_per_shard"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")


@dataclass(frozen=True)
class Documents:
    """
    The documents of a language.

    Args:
        dataset ([`~datasets.Dataset`]): The documents, also of other languages.
        rows (`range` or `numpy.ndarray`): The rows that are in the language.
    """

    dataset: Dataset
    rows: range | np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def parts(self, size: int) -> Iterator[Documents]:
        """All documents, `size` at a time."""
        for start in range(0, len(self), size):
            yield Documents(self.dataset, self.rows[start : start + size])

    def texts(self, column: str) -> list[str]:
        """
        The texts; an empty one for a missing value.

        Raises:
            ValueError: if a value is not text.
        """
        values = self.dataset[self.rows][column]
        for value in values:
            if value is not None and not isinstance(value, str):
                raise ValueError(f"Column {column!r} has a value that is not text: {value!r}.")
        return [value or "" for value in values]


def files_by_language(files: Sequence[str]) -> dict[str, list[str]]:
    """
    Group files by the folder that they are in, which names their language.

    Args:
        files (`Sequence[str]`): Files, or folders with one folder of files per language.

    Returns:
        `dict[str, list[str]]`: language -> files, both in alphabetical order.

    Raises:
        ValueError: if a folder has no folders, or a language no files.
    """
    found: dict[str, list[str]] = {}
    for name in files:
        folder = Path(name)
        if not folder.is_dir():
            found.setdefault(folder.absolute().parent.name, []).append(name)
            continue
        languages = sorted(child for child in folder.iterdir() if child.is_dir())
        if not languages:
            raise ValueError(f"{folder} has no folders: it must have one per language, such as {folder / 'en'}.")
        for language in languages:
            texts = [str(file) for file in language.iterdir() if suffix_of(file.name) in FORMATS]
            if not texts:
                raise ValueError(f"Language {language.name!r} has no text: {language} has no files of a known format.")
            found.setdefault(language.name, []).extend(texts)
    return {language: sorted(found[language]) for language in sorted(found)}


def load_documents(files: Sequence[str], settings: Settings) -> dict[str, Documents]:
    """
    The documents of each language, with languages in alphabetical order.

    Args:
        files (`Sequence[str]`): Files of text, or folders with one folder of files per language.
        settings ([`Settings`]): Where the text and the languages are.

    Raises:
        ValueError: if a language has no text, a file cannot be read or lacks a column, or a language cannot name a
            folder.
    """
    columns = [settings.text_column, *([settings.language_column] if settings.language_column else [])]
    if settings.language_column is None:
        documents = {}
        for language, group in files_by_language(files).items():
            try:
                dataset = load_files(group)
                require_columns(dataset, columns)
            except ValueError as error:
                raise ValueError(f"Language {language!r} cannot be read: {error}") from error
            documents[language] = Documents(dataset.select_columns(columns), range(len(dataset)))
    else:
        dataset = load_files(sorted(files))
        require_columns(dataset, columns)
        rows = rows_by_language(dataset, settings.language_column)
        texts = dataset.select_columns([settings.text_column])
        documents = {language: Documents(texts, rows[language]) for language in sorted(rows)}
    for language, found in documents.items():
        if LEGAL_LANGUAGE.fullmatch(language) is None:
            raise ValueError(f"Language {language!r} cannot name a folder: use letters, digits, '_', '-' and '.'.")
        if not has_text(found, settings):
            raise ValueError(f"Language {language!r} has no text: all its {len(found)} documents are empty.")
    return documents


def rows_by_language(dataset: Dataset, column: str) -> dict[str, np.ndarray]:
    """
    The rows of each language.

    Raises:
        ValueError: if a row has no language.
    """
    numbers: dict[str, int] = {}
    parts = []
    for batch in dataset.select_columns([column]).with_format("arrow").iter(ROWS_AT_ONCE):
        encoded = pa.chunked_array(batch[column]).cast(pa.string()).combine_chunks().dictionary_encode()
        if encoded.null_count or "" in encoded.dictionary.to_pylist():
            raise ValueError(f"Column {column!r} has an empty value: every document needs a language.")
        codes = [numbers.setdefault(language, len(numbers)) for language in encoded.dictionary.to_pylist()]
        parts.append(np.array(codes, dtype=np.int32)[encoded.indices.to_numpy()])
    languages = np.concatenate(parts)
    return {language: np.flatnonzero(languages == number) for language, number in numbers.items()}


def has_text(documents: Documents, settings: Settings) -> bool:
    """Whether a document is not empty. Reads up to the first one."""
    parts = documents.parts(settings.documents_per_shard)
    return any(text.strip() for part in parts for text in part.texts(settings.text_column))


def write_shard(file: Path, documents: Documents, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
    """Tokenise and pack documents, and write their rows and sizes into a file: all of it or nothing."""
    texts = documents.texts(settings.text_column)
    filled = [text for text in texts if text.strip()]
    tokens: list[list[int]] = []
    if filled:
        tokens = tokenizer(filled, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    tokens = [ids for ids in tokens if ids]
    rows, lengths = packed_rows(tokens, Frame.of(tokenizer), settings.max_length)
    sizes = Sizes(
        documents=len(tokens),
        empty=len(texts) - len(tokens),
        pieces=sum(map(len, lengths)),
        tokens=sum(map(len, rows)),
        rows=len(rows),
    )
    table = pa.table([pa.array(rows, SCHEMA.field(0).type), pa.array(lengths, SCHEMA.field(1).type)], schema=SCHEMA)
    table = table.replace_schema_metadata({SIZES: json.dumps(asdict(sizes))})
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".part")
    with pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=ROWS_PER_BATCH)
    os.replace(temporary, file)


def shards_of(folder: Path, documents: Mapping[str, Documents], size: int) -> Iterator[tuple[Path, Documents]]:
    """The file of each shard, with its documents."""
    for language, found in documents.items():
        for number, part in enumerate(found.parts(size)):
            yield folder / language / f"{number:06d}.arrow", part


def prepare(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    settings: Settings,
    *,
    exponent: float = 0.7,
    num_proc: int = 1,
) -> PreparedData:
    """
    Tokenise and pack text for masked-LM training, and write it into a folder. The call can be interrupted and made
    again: finished shards are kept, and the files are the same.

    Args:
        files (`Sequence[str]`): Files of text, or folders with one folder of files per language.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): A fast tokenizer.
        folder (`str` or `Path`): Folder to write.
        settings ([`Settings`]): What the rows depend on.
        exponent (`float`, *optional*, defaults to 0.7): Exponent of the mixture of languages. It may differ from that
            of an earlier call.
        num_proc (`int`, *optional*, defaults to 1): Number of processes.

    Returns:
        [`PreparedData`]

    Raises:
        ValueError: if a language has no text, or the folder was begun with other settings, files or another tokenizer
            (the message names the differences).
    """
    if num_proc < 1:
        raise ValueError(f"num_proc={num_proc} must be 1 or more.")
    folder = Path(folder)
    packed_rows([], Frame.of(tokenizer), settings.max_length)  # raises a ValueError before any work is done
    documents = load_documents(files, settings)
    all_settings = asdict(settings) | {
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "files": described_files(files, settings),
    }
    begin(folder, all_settings)
    shards = list(shards_of(folder, documents, settings.documents_per_shard))
    missing = [shard for shard in shards if not shard[0].is_file()]
    writing = written(missing, tokenizer, settings, num_proc)
    for _ in tqdm(writing, desc="Preparing", total=len(shards), initial=len(shards) - len(missing)):
        pass
    sizes = dict.fromkeys(documents, Sizes())
    for file, _ in shards:
        sizes[file.parent.name] += shard_sizes(file)
    for language, size in sizes.items():
        if not size.tokens:
            raise ValueError(f"Language {language!r} has no text: the tokenizer makes no tokens of it.")
    prepared = PreparedData(folder, all_settings, sizes, exponent)
    prepared.write()
    return prepared


def described_files(files: Sequence[str], settings: Settings) -> list[list[Any]]:
    """Folder and name of each file, and its size in bytes."""
    names = list(files)
    if settings.language_column is None:
        names = [name for group in files_by_language(files).values() for name in group]
    return sorted(["/".join(Path(name).absolute().parts[-2:]), Path(name).stat().st_size] for name in names)


def begin(folder: Path, settings: Mapping[str, Any]) -> None:
    """
    Write the settings into a new folder, or compare them with those of an older one.

    Raises:
        ValueError: if the settings differ, or the folder has other content.
    """
    found = read_manifest(folder)
    if found is None:
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no prepared data: choose another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        write_manifest(folder, {"settings": settings})
        return
    before = found["settings"]
    differences = [name for name in settings if before.get(name) != settings[name]]
    if differences:
        listed = ", ".join(
            f"{name} ({before.get(name)}, now {settings[name]})" if name not in ("files", "tokenizer") else name
            for name in differences
        )
        raise ValueError(f"{folder} was begun with other settings: {listed}. Choose another folder, or delete it.")


def written(
    shards: Sequence[tuple[Path, Documents]], tokenizer: PreTrainedTokenizerBase, settings: Settings, num_proc: int
) -> Iterator[None]:
    """Write shards, in this process or in several; yields after each."""
    if num_proc == 1:
        for file, documents in shards:
            write_shard(file, documents, tokenizer, settings)
            yield
        return
    # Not forked from this process: tokenizers have threads, which a fork would lose.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(num_proc, context, _start, (tokenizer, settings)) as pool:
        futures = [pool.submit(_write, file, documents) for file, documents in shards]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


_started: list[tuple[PreTrainedTokenizerBase, Settings]] = []  # of a process of the pool: sent once, not per shard


def _start(tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what runs at once
    _started.append((tokenizer, settings))


def _write(file: Path, documents: Documents) -> None:
    write_shard(file, documents, *_started[0])
