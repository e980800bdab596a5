"""
Prepare text for masked-LM training: tokenise it once, and pack documents into rows of --max_length tokens.

    m3bert prepare --files data --tokenizer_name intfloat/multilingual-e5-base --output_dir runs/prepared
    m3bert prepare --files all.jsonl --language_column lang --tokenizer_name DIR --output_dir runs/prepared
    m3bert train multigranular-mlm --prepared_data runs/prepared --tokenizer_name DIR --output_dir runs/mlm

--files are a folder with one folder of files per language (data/en/a.jsonl), or files, whose language is the name of
their folder, or the value of --language_column in each row. Documents that are longer than a row are cut into several.
Documents that share a row do not attend to each other in training.

The command prints how much text each language has, and how often it is drawn: with a probability proportional to its
share P(L) of all tokens, raised to --language_exponent. The table is also in prepared.json. If the command is
interrupted, run it again: it keeps what is finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from ..data.formats import check_files, files_by_language
from ..utils.help_texts import option
from .command import parse_options


@dataclass
class PreparingArguments:
    """Which text, which tokenizer, and which rows."""

    files: list[str] = option(MISSING, "Folders with one folder of files per language, or files.")
    tokenizer_name: str = option(MISSING, "Folder or Hub id of the model to train, or of its tokenizer.")
    output_dir: str = option("runs/prepared", "Folder to write, or to go on writing.")
    text_column: str = option("text", "Column with the documents.")
    language_column: str | None = option(None, "Column with the language. Default: the name of the file's folder.")
    language_exponent: float = option(0.7, "Exponent of P(L); 1 keeps the proportions. Can be changed afterwards.")
    max_length: int = option(512, "Maximum length of a row in tokens.")
    num_proc: int = option(1, "Number of processes.")
    trust_remote_code: bool = option(False, "Run code that comes with the tokenizer.")


def size_table(prepared: Mapping[str, Any]) -> str:
    """Per language: its text, its share of all tokens, and how often it is drawn."""
    from ..hub_cards.tables import markdown, percent

    header = ["language", "documents", "tokens", "rows", "full %", "tokens %", "drawn %", "passes"]

    def row(language: str, size: Mapping[str, Any]) -> list[str]:
        counts = [f"{size[name]:,}" for name in ("documents", "tokens", "rows")]
        full = size["tokens"] / (size["rows"] * prepared["settings"]["max_length"])
        shares = map(percent, (full, size["share"], size["probability"]))
        return [language, *counts, *shares, f"{size['passes']:.2f}"]

    return markdown(header, [row(language, size) for language, size in prepared["languages"].items()])


def main(arguments: list[str]) -> None:
    (options,) = parse_options((PreparingArguments,), __doc__, arguments)
    columns = [options.text_column, *([options.language_column] if options.language_column else [])]
    for files in files_by_language(options.files).values():
        check_files(files, columns)
    from transformers import AutoTokenizer

    from ..data.preparing import prepare

    prepared = prepare(
        options.files,
        AutoTokenizer.from_pretrained(options.tokenizer_name, trust_remote_code=options.trust_remote_code),
        options.output_dir,
        max_length=options.max_length,
        text_column=options.text_column,
        language_column=options.language_column,
        exponent=options.language_exponent,
        num_proc=options.num_proc,
    )
    print(size_table(prepared))
    if empty := sum(size["empty"] for size in prepared["languages"].values()):
        print(f"{empty:,} documents without text are left out.")
