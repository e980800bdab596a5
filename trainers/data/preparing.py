"""Prepared text: packed rows of token ids per language on disk, and how often each language is drawn."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value, load_from_disk
from transformers import PreTrainedTokenizerBase

from ..core.dataset_checks import require_columns
from ..core.durable import only_writer, replace_text
from ..core.encoding.packed_rows import check_packable
from ..core.granularity import EncoderConfig
from ..core.states import max_positions
from .files import FORMATS, load_files, suffix_of
from .languages import mix_languages, smoothed_probabilities
from .packing import DOCUMENT_LENGTHS, Frame, packed_rows


MANIFEST = "prepared.json"
UNFINISHED = ".unfinished"  # folder of what a run that goes on will need
PACKED_TOGETHER = 10_000  # documents
LEGAL_LANGUAGE = re.compile(r"\w[\w.-]*")  # it names a folder
ROWS = Features({"input_ids": List(Value("int32")), DOCUMENT_LENGTHS: List(Value("int32"))})


def prepare(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    max_length: int = 512,
    text_column: str = "text",
    language_column: str | None = None,
    exponent: float = 0.7,
    num_proc: int = 1,
) -> dict[str, Any]:
    """
    Tokenise and pack text for masked-LM training, and write it into a folder. The call can be interrupted and made
    again: what is finished is kept, and the rows are the same.

    Args:
        files (`Sequence[str]`): Files of text, or folders with one folder of files per language.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): A fast tokenizer.
        folder (`str` or `Path`): Folder to write.
        max_length (`int`, *optional*, defaults to 512): Tokens of a row at most.
        text_column (`str`, *optional*, defaults to `"text"`): Column with the documents.
        language_column (`str`, *optional*): Column with the language of each document. Default: the language is the
            name of the folder that a file is in.
        exponent (`float`, *optional*, defaults to 0.7): Exponent of the mixture of languages. It may differ from that
            of an earlier call.
        num_proc (`int`, *optional*, defaults to 1): Number of processes. The rows do not depend on it.

    Returns:
        `dict`: what [`read_prepared`] reads.

    Raises:
        ValueError: if a language has no text, or the folder was begun with other settings, files or another tokenizer
            (the message names the differences), or another process writes to it.
    """
    if num_proc < 1:
        raise ValueError(f"num_proc={num_proc} must be 1 or more.")
    folder, processes = Path(folder), num_proc if num_proc > 1 else None
    pack = partial(packed_texts, tokenizer=tokenizer, frame=Frame.of(tokenizer), max_length=max_length)
    pack([])  # raises a ValueError before any work is done
    texts = texts_by_language(files, text_column, language_column)
    filled = {
        language: part.filter(_have_text, batched=True, input_columns=[text_column], num_proc=processes)
        for language, part in texts.items()
    }
    if empty := [language for language, part in filled.items() if not len(part)]:
        raise ValueError(f"Language {empty[0]!r} has no text: all its {len(texts[empty[0]])} documents are empty.")
    settings = {
        "max_length": max_length,
        "text_column": text_column,
        "language_column": language_column,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "files": described_files(files, language_column),
    }
    with only_writer(folder):
        begin(folder, settings)
        languages: dict[str, dict[str, Any]] = {}
        for language, part in filled.items():
            if not (folder / language).is_dir():
                write_rows(folder / language, part, text_column, pack, processes)
            rows = rows_of(folder / language)
            tokens = pc.sum(pc.list_flatten(rows.data.column(DOCUMENT_LENGTHS))).as_py()
            documents = {"documents": len(part), "empty": len(texts[language]) - len(part)}
            languages[language] = {**documents, "tokens": tokens, "rows": len(rows)}
        mixed = mixture({language: entry["tokens"] for language, entry in languages.items()}, exponent)
        languages = {language: entry | mixed[language] for language, entry in languages.items()}
        content = {"settings": settings, "language_exponent": exponent, "languages": languages}
        _write_manifest(folder, content)
    return content


def load_prepared(
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    config: EncoderConfig,
    *,
    exponent: float | None = None,
    seed: int = 0,
) -> Dataset:
    """
    The packed rows of all languages that [`prepare`] wrote, mixed by tokens ([`mix_languages`]). The files are
    memory-mapped.

    Args:
        folder (`str` or `Path`): The folder.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The tokenizer of the model to train.
        config ([`~transformers.PreTrainedConfig`]): Its config.
        exponent (`float`, *optional*): Exponent of the mixture. Default: that of the folder.
        seed (`int`, *optional*, defaults to 0): Seed of the mixture.

    Returns:
        [`~datasets.Dataset`]: columns `input_ids` and `document_lengths`.

    Raises:
        ValueError: if the folder is not complete or damaged, the rows were made with another tokenizer or have
            documents that are longer than the model reads, or the model cannot read packed rows.
    """
    prepared = read_prepared(folder)
    check_packable(config)
    if tokenizer_fingerprint(tokenizer) != prepared["settings"]["tokenizer"]:
        raise ValueError(
            f"{folder} was prepared with another tokenizer: prepare the text again with "
            f"--tokenizer_name {tokenizer.name_or_path or 'that of the model'}."
        )
    if (longest := prepared["settings"]["max_length"]) > (limit := max_positions(config)):
        raise ValueError(
            f"{folder} has documents of up to {longest} tokens, but the model reads {limit}: prepare the text again "
            f"with --max_length {limit}."
        )
    return mix_languages(
        [rows_of(Path(folder, language)) for language in prepared["languages"]],
        exponent=prepared["language_exponent"] if exponent is None else exponent,
        seed=seed,
        tokens=[size["tokens"] for size in prepared["languages"].values()],
    )


def read_prepared(folder: str | Path) -> dict[str, Any]:
    """
    The content of `prepared.json`: `settings`, on which the rows depend; `language_exponent`, the exponent of the
    mixture; and per language the number of `documents` with text, of `empty` ones, which are left out, of `tokens`
    with special tokens, of packed `rows`, and its part in the [`mixture`].

    Raises:
        ValueError: if the folder has no `prepared.json`, or is not complete.
    """
    if (found := _manifest(Path(folder))) is None:
        raise ValueError(f"{folder} has no {MANIFEST}: `m3bert prepare` writes such a folder.")
    if "languages" not in found:
        raise ValueError(f"{folder} is not complete: run the same `m3bert prepare` again to finish it.")
    return found


def mixture(tokens: Mapping[str, int], exponent: float) -> dict[str, dict[str, float]]:
    """
    The mixture of languages by tokens (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), section 2.3).

    Returns:
        `dict`: language -> `share` of all tokens, `probability` of a token of it in training, and `passes`, how often
            its text is read while every token of all languages is read once on average.
    """
    total = sum(tokens.values())
    drawn = smoothed_probabilities(list(tokens.values()), exponent)
    return {
        language: {"share": count / total, "probability": probability, "passes": probability * total / count}
        for (language, count), probability in zip(tokens.items(), drawn, strict=True)
    }


def texts_by_language(files: Sequence[str], text_column: str, language_column: str | None) -> dict[str, Dataset]:
    """
    The documents of each language, with languages in alphabetical order; arguments as for [`prepare`].

    Raises:
        ValueError: if a language has no files, a file cannot be read or lacks a column, a column is not text, or a
            language cannot name a folder.
    """
    found = {}
    if language_column is None:
        for language, group in files_by_language(files).items():
            try:
                found[language] = _texts(group, text_column)
            except ValueError as error:
                raise ValueError(f"Language {language!r} cannot be read: {error}") from error
    else:
        dataset = _texts(sorted(files), text_column, language_column)
        column = dataset.data.column(language_column).cast(pa.string()).dictionary_encode().combine_chunks()
        names, codes = column.dictionary.to_pylist(), column.indices
        if codes.null_count or "" in names:
            raise ValueError(f"Column {language_column!r} has an empty value: every document needs a language.")
        for name in sorted(names):
            found[name] = dataset.select(np.flatnonzero(codes.to_numpy() == names.index(name)))
    if illegal := [language for language in found if LEGAL_LANGUAGE.fullmatch(language) is None]:
        raise ValueError(f"Language {illegal[0]!r} cannot name a folder: use letters, digits, '_', '-' and '.'.")
    return found


def _texts(files: Sequence[str], text_column: str, *columns: str) -> Dataset:
    """Some columns of files; a ValueError if one is missing, or the first is not text."""
    dataset = load_files(files)
    require_columns(dataset, [text_column, *columns])
    kind = dataset.features[text_column]
    if getattr(kind, "dtype", None) not in ("string", "large_string", "null"):
        raise ValueError(f"{', '.join(files)}: column {text_column!r} is not text, but {kind}.")
    return dataset.select_columns([text_column, *columns])


def _have_text(texts: Sequence[str | None]) -> list[bool]:
    return [bool(text and not text.isspace()) for text in texts]


def files_by_language(files: Sequence[str]) -> dict[str, list[str]]:
    """
    Files, or those in folders with one folder per language, grouped by the folder that they are in: language -> files,
    both in alphabetical order.

    Raises:
        ValueError: if a folder has no folders, or a language no files.
    """
    found: dict[str, list[str]] = {}
    for name in files:
        folder = Path(name)
        if not folder.is_dir():
            found.setdefault(folder.absolute().parent.name, []).append(name)
            continue
        languages = [child for child in folder.iterdir() if child.is_dir()]
        if not languages:
            raise ValueError(f"{folder} has no folders: it must have one per language, such as {folder / 'en'}.")
        for language in languages:
            texts = [str(file) for file in language.iterdir() if suffix_of(file.name) in FORMATS]
            if not texts:
                raise ValueError(f"Language {language.name!r} has no text: {language} has no files of a known format.")
            found.setdefault(language.name, []).extend(texts)
    return {language: sorted(found[language]) for language in sorted(found)}


def described_files(files: Sequence[str], language_column: str | None) -> list[list[Any]]:
    """Folder and name of each file, and its size in bytes."""
    names = list(files) if language_column else [name for group in files_by_language(files).values() for name in group]
    return sorted(["/".join(Path(name).absolute().parts[-2:]), Path(name).stat().st_size] for name in names)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    A digest of all that the token ids of a fast tokenizer depend on: vocabulary, normalisation, special tokens.
    Padding and truncation, which every call sets, do not count.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = {name: part for name, part in parts.items() if name not in ("padding", "truncation")}
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def begin(folder: Path, settings: Mapping[str, Any]) -> None:
    """
    Write the settings into a new folder, or compare them with those of an older one.

    Raises:
        ValueError: if the settings differ, or the folder has other content.
    """
    if (found := _manifest(folder)) is None:
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no prepared data: choose another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        _write_manifest(folder, {"settings": settings})
    elif different := [name for name in settings if found["settings"].get(name) != settings[name]]:
        raise ValueError(
            f"{folder} was begun with other settings: {', '.join(different)}. Choose another folder, or delete it."
        )


def _manifest(folder: Path) -> dict[str, Any] | None:
    file = folder / MANIFEST
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def _write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    replace_text(folder / MANIFEST, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def packed_texts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, frame: Frame, max_length: int
) -> dict[str, list[list[int]]]:
    """The packed rows of some documents, as columns."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    tokens = tokenizer(list(texts), **options)["input_ids"] if texts else []
    return dict(zip(ROWS, packed_rows(tokens, frame, max_length), strict=True))


def write_rows(
    folder: Path, documents: Dataset, column: str, pack: Callable[[Sequence[str]], Any], num_proc: int | None
) -> None:
    """
    Write the packed rows of a language into its folder, all of them or nothing. What the processes have finished is
    kept beside it until then.

    Raises:
        ValueError: if there are no rows.
    """
    unfinished = folder.parent / UNFINISHED
    unfinished.mkdir(exist_ok=True)
    # Rows are made of whole windows of documents, whatever the number of processes.
    windows = Dataset.from_dict({"start": range(0, len(documents), PACKED_TOGETHER)})
    rows = windows.map(
        lambda starts: pack(documents[starts[0] : starts[0] + PACKED_TOGETHER][column]),
        input_columns=["start"],
        remove_columns=["start"],
        batched=True,
        batch_size=1,
        features=ROWS,
        num_proc=num_proc,
        cache_file_name=str(unfinished / f"{folder.name}.arrow"),
        desc=f"Packing {folder.name}",
    )
    if not len(rows):
        raise ValueError(f"Language {folder.name!r} has no text: the tokenizer makes no tokens of it.")
    rows.save_to_disk(str(unfinished / folder.name))
    os.replace(unfinished / folder.name, folder)
    shutil.rmtree(unfinished, ignore_errors=True)


def rows_of(folder: Path) -> Dataset:
    """
    The packed rows of a language.

    Raises:
        ValueError: if they are missing or damaged.
    """
    try:
        return load_from_disk(str(folder))
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{folder} cannot be read: {reason}. Delete it, and run `m3bert prepare` again.") from error
