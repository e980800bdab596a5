"""Prepared text: packed rows of token ids per language on disk, and how often each language is drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, List, Value, load_from_disk
from transformers import PreTrainedTokenizerBase

from ..encode.granularity import EncoderConfig
from ..encode.identity import tokenizer_fingerprint
from ..encode.packed_rows import check_packable
from ..encode.states import max_positions
from ..utils.durable import only_writer, replacing_files
from ..utils.typed import read_json
from .dataset_checks import require_columns
from .files import load_files, reading_data
from .formats import files_by_language
from .languages import mix_languages, smoothed_probabilities
from .packing import DOCUMENT_LENGTHS, Frame, packed_rows


MANIFEST = "prepared.json"
PACKED_TOGETHER = 10_000  # documents
LEGAL_LANGUAGE = re.compile(r"\w[\w.-]*")  # it names a folder
Columns = dict[str, list[list[int]]]
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
    Tokenise and pack text for masked-LM training, and write it into a folder; return what [`read_prepared`] reads.
    Calling it again continues an interrupted call: the library datasets keeps what is finished.

    Args:
        files (`Sequence[str]`): Files of text, or folders with one folder of files per language.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): A fast tokenizer.
        folder (`str` or `Path`): Folder to write.
        max_length (`int`, *optional*, defaults to 512): Tokens of a row at most.
        text_column (`str`, *optional*, defaults to `"text"`): Column with the documents.
        language_column (`str`, *optional*): Column with the language of each document. Default: the language is the
            name of the folder that a file is in.
        exponent (`float`, *optional*, defaults to 0.7): Exponent of the mixture of languages.
        num_proc (`int`, *optional*, defaults to 1): Number of processes. Each packs a part of the documents.

    Raises:
        ValueError: if a language has no text, the folder was made with other settings, files or another tokenizer, or
            another process writes to it.
    """
    folder = Path(folder)
    pack = partial(packed_texts, tokenizer=tokenizer, frame=Frame.of(tokenizer), max_length=max_length)
    pack(["a"])  # raises a ValueError before any work is done
    settings = {
        "max_length": max_length,
        "text_column": text_column,
        "language_column": language_column,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "files": sorted(
            ["/".join(Path(name).absolute().parts[-2:]), Path(name).stat().st_size]
            for name in chain(*files_by_language(files).values())
        ),
    }
    before = read_prepared(folder)["settings"] if (folder / MANIFEST).is_file() else settings
    if different := [name for name in settings if before.get(name) != settings[name]]:
        raise ValueError(
            f"{folder} was made with other settings: {', '.join(different)}. Choose another folder, or delete it."
        )
    with only_writer(folder), replacing_files(folder, last=MANIFEST) as draft:
        languages = {
            language: _pack_language(language, part, draft, pack, text_column, num_proc if num_proc > 1 else None)
            for language, part in texts_by_language(files, text_column, language_column).items()
        }
        tokens = [entry["tokens"] for entry in languages.values()]
        for entry, probability in zip(languages.values(), smoothed_probabilities(tokens, exponent), strict=True):
            share = entry["tokens"] / sum(tokens)
            entry |= {"share": share, "probability": probability, "passes": probability / share}
        content = {"settings": settings, "language_exponent": exponent, "languages": languages}
        (draft / MANIFEST).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return content


def _pack_language(
    language: str,
    texts: Dataset,
    draft: Path,
    pack: Callable[[Sequence[str]], Columns],
    text_column: str,
    processes: int | None,
) -> dict[str, float]:
    """Write the packed rows of a language, and return its numbers of documents, tokens and rows."""
    if LEGAL_LANGUAGE.fullmatch(language) is None:
        raise ValueError(f"Language {language!r} cannot name a folder: use letters, digits, '_', '-' and '.'.")
    filled = texts.filter(_have_text, batched=True, input_columns=[text_column], num_proc=processes)
    # The library datasets keeps the result: a call that was interrupted does not pack it again.
    rows = filled.map(
        pack,
        input_columns=[text_column],
        remove_columns=filled.column_names,
        batched=True,
        batch_size=PACKED_TOGETHER,
        features=ROWS,
        num_proc=processes,
        desc=f"Packing {language}",
    )
    tokens = pc.sum(pc.list_flatten(rows.data.column(DOCUMENT_LENGTHS))).as_py() if len(rows) else 0
    if not tokens:
        raise ValueError(f"Language {language!r} has no text: its {len(texts)} documents make no tokens.")
    rows.save_to_disk(str(draft / language))
    return {"documents": len(filled), "empty": len(texts) - len(filled), "tokens": tokens, "rows": len(rows)}


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
        exponent (`float`, *optional*): Exponent of the mixture. Default: as prepared.
        seed (`int`, *optional*, defaults to 0): Seed of the mixture.

    Returns:
        [`~datasets.Dataset`]: columns `input_ids` and `document_lengths`.

    Raises:
        ValueError: if the folder is damaged, the rows were made with another tokenizer or have
            documents that are longer than the model reads, or the model cannot read packed rows.
    """
    prepared = read_prepared(folder)
    check_packable(config)
    if tokenizer_fingerprint(tokenizer) != prepared["settings"]["tokenizer"]:
        raise ValueError(
            f"{folder} was prepared with another tokenizer: prepare the text again with the model's tokenizer."
        )
    if (longest := prepared["settings"]["max_length"]) > (limit := max_positions(config)):
        raise ValueError(
            f"{folder} has documents of up to {longest} tokens, but the model reads {limit}: prepare the text again "
            f"with --max_length {limit}."
        )
    rows = []
    for language in prepared["languages"]:
        with reading_data(f"{folder}/{language}"):
            rows.append(load_from_disk(str(Path(folder, language))))
    return mix_languages(
        rows,
        exponent=prepared["language_exponent"] if exponent is None else exponent,
        seed=seed,
        tokens=[size["tokens"] for size in prepared["languages"].values()],
    )


def read_prepared(folder: str | Path) -> dict[str, Any]:
    """
    The content of `prepared.json`: `settings`, on which the rows depend; `language_exponent`, the exponent of the
    mixture; and per language the number of `documents` with text, of `empty` ones, which are left out, of `tokens`
    with special tokens, of packed `rows`, its `share` of all tokens, the `probability` of a token of it in training,
    and `passes`, how often its text is read while every token is read once on average.
    """
    return read_json(Path(folder, MANIFEST))


def texts_by_language(files: Sequence[str], text_column: str, language_column: str | None) -> dict[str, Dataset]:
    """The documents of each language, with languages in alphabetical order; arguments as for [`prepare`]."""
    if language_column is None:
        return {language: _texts(group, text_column) for language, group in files_by_language(files).items()}
    dataset = _texts(sorted(files), text_column, language_column)
    languages = np.array([str(language or "") for language in dataset[language_column]])
    return {str(name): dataset.select(np.flatnonzero(languages == name)) for name in np.unique(languages)}


def _texts(files: Sequence[str], *columns: str) -> Dataset:
    """Some columns of files."""
    dataset = load_files(files)
    require_columns(dataset, columns)
    return dataset.select_columns(list(columns))


def _have_text(texts: Sequence[str | None]) -> list[bool]:
    return [bool(text and not text.isspace()) for text in texts]


def packed_texts(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, frame: Frame, max_length: int) -> Columns:
    """The packed rows of some documents."""
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    tokens = tokenizer(list(texts), **options)["input_ids"] if texts else []
    return dict(zip(ROWS, packed_rows(tokens, frame, max_length), strict=True))
