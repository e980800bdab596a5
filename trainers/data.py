"""Datasets: reading files, checks, and the transforms that trainers share."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, interleave_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase, TrainingArguments


BUILDERS = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def require_columns(dataset: Any, columns: Iterable[str]) -> None:
    """
    Check a dataset before any work is done.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): The data. What a stream does not tell
            beforehand (its length, sometimes its columns) is not checked.
        columns (`Iterable[str]`): Columns it must have.

    Raises:
        ValueError: if it is empty or lacks a column; names the columns found.
    """
    if isinstance(dataset, Sized) and len(dataset) == 0:
        raise ValueError("The dataset is empty.")
    found = dataset.column_names
    missing = [column for column in columns if found is not None and column not in found]
    if missing:
        raise ValueError(f"The dataset lacks the column(s) {', '.join(missing)}; it has {', '.join(found)}.")


def require_one_batch(dataset: Any, args: TrainingArguments) -> None:
    """
    Check that a training set fills one batch, where a smaller last batch is dropped.

    Raises:
        ValueError: if it does not: an epoch would have no step.
    """
    batch = args.train_batch_size * args.world_size
    if args.dataloader_drop_last and isinstance(dataset, Sized) and len(dataset) < batch:
        raise ValueError(
            f"The training set has {len(dataset)} rows, fewer than one batch of {batch}: lower "
            "per_device_train_batch_size, or pass dataloader_drop_last=False."
        )


def smoothed_probabilities(sizes: Sequence[float], exponent: float = 0.7) -> list[float]:
    """
    Sampling probabilities of languages, `P'(L) ~ P(L)^exponent` renormalised
    (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), section 2.3, stage 2).

    Args:
        sizes (`Sequence[float]`): Amount of text in each language, in any unit.
        exponent (`float`, *optional*, defaults to 0.7): 1 keeps the proportions, 0 makes them equal.

    Returns:
        `list[float]`: probabilities that sum to 1.

    Raises:
        ValueError: if a size is not positive.
    """
    if not sizes or min(sizes) <= 0:
        raise ValueError(f"Every language needs some text; sizes: {list(sizes)}.")
    powers = [(size / sum(sizes)) ** exponent for size in sizes]
    return [power / sum(powers) for power in powers]


def load_files(files: Sequence[str], *, streaming: bool = False) -> Any:
    """
    Read data files of one kind: text (a row a line), JSON Lines, CSV or Parquet, the first three also gzipped.

    Args:
        files (`Sequence[str]`): Paths or URLs.
        streaming (`bool`, *optional*, defaults to `False`): Read while training, not before.

    Returns:
        [`~datasets.Dataset`], or [`~datasets.IterableDataset`] for a stream: their rows; a text file's column is
        `text`.

    Raises:
        ValueError: if a file does not exist, is empty or malformed, the kinds differ or one is unknown.
    """
    kinds = set()
    for file in files:
        suffix = next((s for s in reversed(Path(file).suffixes) if s != ".gz"), "")
        if suffix not in BUILDERS:
            raise ValueError(f"{file} is of an unknown kind; known: {', '.join(BUILDERS)}, and .gz of them.")
        if "://" not in file:
            if not Path(file).is_file():
                raise ValueError(f"{file} does not exist.")
            with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as opened:
                empty = not opened.read(1)
            if empty:
                raise ValueError(f"The dataset is empty: nothing in {file}.")
        kinds.add(BUILDERS[suffix])
    if len(kinds) != 1:
        raise ValueError(f"Give files of one kind; got {', '.join(sorted(kinds)) or 'none'}.")
    builder = kinds.pop()
    try:
        return load_dataset(builder, data_files=list(files), split="train", streaming=streaming)
    except DatasetGenerationError as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        raise ValueError(f"Cannot read {', '.join(files)}: {reason}") from error


def tokenize_texts(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, column: str = "text", max_length: int = 512
) -> Dataset:
    """
    Token ids of a text column, a row a text, longer texts cut.

    Args:
        dataset ([`~datasets.Dataset`]): The texts.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer.
        column (`str`, *optional*, defaults to `"text"`): Column to read.
        max_length (`int`, *optional*, defaults to 512): Longest text in tokens.

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


@dataclass
class CleaningReport:
    """
    What [`clean_pairs`] dropped, of a stream so far in its current pass.

    Args:
        rows (`int`): Pairs read.
        identical (`int`): Dropped, since the same query came with the same document before.
        over_cap (`int`): Dropped, since the query had as many documents already as it may have.
    """

    rows: int = 0
    identical: int = 0
    over_cap: int = 0

    def __str__(self) -> str:
        kept = self.rows - self.identical - self.over_cap
        return (
            f"Kept {kept} of {self.rows} pairs; dropped {self.identical} identical ones "
            f"and {self.over_cap} over the cap of documents per query."
        )


def clean_pairs(
    dataset: Dataset | IterableDataset,
    query: Sequence[str],
    document: Sequence[str],
    *,
    max_per_query: int | None = None,
) -> tuple[Any, CleaningReport]:
    """
    Drop identical pairs, and those over a cap of documents per query, which keeps frequent queries from ruling the
    batches (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), section 2.3 and appendix B, stage 3). Of a
    query's documents the first ones stay. What was seen is remembered as hashes, about 100 bytes a pair.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): The pairs.
        query (`Sequence[str]`): Columns that make the query.
        document (`Sequence[str]`): Columns that make the document.
        max_per_query (`int`, *optional*): The cap; `None` is none.

    Returns:
        The cleaned dataset, of the same kind, and its [`CleaningReport`]. A stream is cleaned while it is read, anew
        in every pass, and its report grows with it; read in worker processes, the report stays with them.

    Raises:
        ValueError: if the dataset is empty or lacks a column, or the cap is below 1.
    """
    if max_per_query is not None and max_per_query < 1:
        raise ValueError(f"max_per_query={max_per_query} must be 1 or more.")
    require_columns(dataset, [*query, *document])
    report = CleaningReport()

    def kept(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
        report.rows = report.identical = report.over_cap = 0
        pairs: set[bytes] = set()
        documents: Counter[bytes] = Counter()
        for index, row in enumerate(rows):
            report.rows += 1
            pair, asked = _digest(row, [*query, *document]), _digest(row, query)
            if pair in pairs:
                report.identical += 1
            elif max_per_query is not None and documents[asked] >= max_per_query:
                report.over_cap += 1
            else:
                pairs.add(pair)
                documents[asked] += 1
                yield index, row

    if isinstance(dataset, Dataset):
        texts = dataset.select_columns([*query, *document])
        return dataset.select([index for index, _ in kept(texts)]), report

    def stream() -> Iterator[Mapping[str, Any]]:
        for _, row in kept(dataset):
            yield row

    return IterableDataset.from_generator(stream, features=dataset.features), report


def _digest(row: Mapping[str, Any], columns: Sequence[str]) -> bytes:
    """A hash of a row's texts that tells where one ends and the next begins."""
    return blake2b(repr([row[column] for column in columns]).encode(), digest_size=8).digest()


def mix_languages(datasets: Sequence[Dataset], *, exponent: float = 0.7, seed: int = 0) -> Dataset:
    """
    One dataset out of one a language, drawn with [`smoothed_probabilities`] of their row counts until every one has
    been seen whole; rows of small languages repeat.

    Args:
        datasets (`Sequence[Dataset]`): One a language, with the same columns.
        exponent (`float`, *optional*, defaults to 0.7): See [`smoothed_probabilities`].
        seed (`int`, *optional*, defaults to 0): Of the draw.

    Returns:
        [`~datasets.Dataset`]
    """
    if len(datasets) == 1:
        return datasets[0]
    probabilities = smoothed_probabilities([len(dataset) for dataset in datasets], exponent)
    return interleave_datasets(
        list(datasets), probabilities=probabilities, seed=seed, stopping_strategy="all_exhausted"
    )
