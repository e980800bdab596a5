"""A prepared data set: packed rows of token ids per language on disk, and what is known about them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from ..core.packed_rows import check_packable
from ..core.states import max_positions
from .languages import mix_languages, smoothed_probabilities


MANIFEST = "prepared.json"
SIZES = b"m3bert_sizes"  # key of a shard's schema: its sizes, as JSON


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    A digest of all that the token ids of a fast tokenizer depend on: vocabulary, normalisation, special tokens.
    Padding and truncation, which every call sets, do not count.
    """
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    for name in ("padding", "truncation"):
        parts.pop(name, None)
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Sizes:
    """
    How much text there is.

    Args:
        documents (`int`): Documents with text.
        empty (`int`): Documents without, which are left out.
        pieces (`int`): Documents after long ones were cut.
        tokens (`int`): Tokens of all pieces, special tokens included.
        rows (`int`): Packed rows.
    """

    documents: int = 0
    empty: int = 0
    pieces: int = 0
    tokens: int = 0
    rows: int = 0

    def __add__(self, other: Sizes) -> Sizes:
        return Sizes(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


def shard_sizes(file: Path) -> Sizes:
    """
    The sizes of one shard.

    Raises:
        ValueError: if the file cannot be read.
    """
    try:
        with pa.OSFile(str(file)) as source:
            metadata = pa.ipc.open_stream(source).schema.metadata or {}
        return Sizes(**json.loads(metadata[SIZES]))
    except (pa.ArrowInvalid, KeyError) as error:
        raise ValueError(f"{file} is not a shard of `m3bert prepare`, or is damaged: delete it, and run again.") from (
            error
        )


def mixture(sizes: Mapping[str, Sizes], exponent: float) -> dict[str, dict[str, float]]:
    """
    The mixture of languages by tokens (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), section 2.3).

    Returns:
        `dict`: language -> `share` of all tokens, `probability` of a token of it in training, and `passes`, how often
            its text is read while every token of all languages is read once on average.
    """
    counts = [size.tokens for size in sizes.values()]
    probabilities = smoothed_probabilities(counts, exponent)
    return {
        language: {
            "share": count / sum(counts),
            "probability": probability,
            "passes": probability * sum(counts) / count,
        }
        for language, count, probability in zip(sizes, counts, probabilities, strict=True)
    }


@dataclass(frozen=True)
class PreparedData:
    """
    A folder that [`prepare`] wrote: `prepared.json` and, per language, a folder of Arrow files.

    Args:
        folder (`Path`): The folder.
        settings (`dict`): All that the files depend on: the tokenizer, `max_length`, the files of text, ...
        sizes (`dict[str, Sizes]`): Language -> how much text there is.
        exponent (`float`): Exponent of the mixture.
    """

    folder: Path
    settings: Mapping[str, Any]
    sizes: Mapping[str, Sizes]
    exponent: float

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """
        Read `prepared.json`.

        Raises:
            ValueError: if the folder has none, or is not complete.
        """
        found = read_manifest(Path(folder))
        if found is None:
            raise ValueError(f"{folder} has no {MANIFEST}: `m3bert prepare` writes such a folder.")
        if "languages" not in found:
            raise ValueError(f"{folder} is not complete: run the same `m3bert prepare` again to finish it.")
        names = Sizes.__dataclass_fields__
        sizes = {
            language: Sizes(**{name: entry[name] for name in names}) for language, entry in found["languages"].items()
        }
        return cls(Path(folder), found["settings"], sizes, found["language_exponent"])

    @property
    def max_length(self) -> int:
        """Tokens of a row at most."""
        return self.settings["max_length"]

    def write(self) -> None:
        """Write `prepared.json`, with the mixture."""
        mixed = mixture(self.sizes, self.exponent)
        languages = {language: asdict(size) | mixed[language] for language, size in self.sizes.items()}
        content = {"settings": self.settings, "language_exponent": self.exponent, "languages": languages}
        write_manifest(self.folder, content)

    def check(self, tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
        """
        Check that a model can be trained on the rows.

        Args:
            tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
            config ([`~transformers.PreTrainedConfig`]): Its config.

        Raises:
            ValueError: if the rows were made with another tokenizer, have documents that are longer than the model
                reads, or the model cannot read packed rows.
        """
        check_packable(config)
        if tokenizer_fingerprint(tokenizer) != self.settings["tokenizer"]:
            raise ValueError(
                f"{self.folder} was prepared with another tokenizer: prepare the text again with "
                f"--tokenizer_name {tokenizer.name_or_path or 'that of the model'}."
            )
        if self.max_length > (limit := max_positions(config)):
            raise ValueError(
                f"{self.folder} has documents of up to {self.max_length} tokens, but the model reads {limit}: prepare "
                f"the text again with --max_length {limit}."
            )

    def shards(self, language: str) -> list[Path]:
        """The files of a language, in order."""
        return sorted((self.folder / language).glob("*.arrow"))

    def dataset(self, *, exponent: float | None = None, seed: int = 0) -> Dataset:
        """
        The packed rows of all languages, mixed by tokens ([`mix_languages`]). The files are memory-mapped.

        Args:
            exponent (`float`, *optional*): Exponent of the mixture. Default: that of the folder.
            seed (`int`, *optional*, defaults to 0): Seed of the mixture.

        Returns:
            [`~datasets.Dataset`]: columns `input_ids` and `document_lengths`.

        Raises:
            ValueError: if files are missing.
        """
        parts = []
        for language, size in self.sizes.items():
            part = concatenate_datasets([Dataset.from_file(str(file)) for file in self.shards(language)])
            if len(part) != size.rows:
                raise ValueError(
                    f"{self.folder / language} has {len(part)} rows, not {size.rows}: run `m3bert prepare` again."
                )
            parts.append(part)
        return mix_languages(
            parts,
            exponent=self.exponent if exponent is None else exponent,
            seed=seed,
            tokens=[size.tokens for size in self.sizes.values()],
        )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """
    The content of `prepared.json`; `None` if the folder has none.

    Raises:
        ValueError: if it is not JSON.
    """
    file = folder / MANIFEST
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}. Delete the folder, and prepare the text again.") from error


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write `prepared.json`, all of it or nothing."""
    temporary = folder / f"{MANIFEST}.part"
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, folder / MANIFEST)
