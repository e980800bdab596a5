"""
Trim a vocabulary: an encoder in its own repository, with the tokens that your texts use and those that spell all other
text. Most weights of a small multilingual encoder are embeddings of tokens that texts in a few languages never have:

    m3bert trim intfloat/multilingual-e5-small runs/trimmed --files passages.txt queries.txt
    m3bert trim intfloat/multilingual-e5-small runs/trimmed --languages en pt

These texts keep their tokens and hidden states, to the last bit. Other texts may have more, shorter tokens: how many,
is measured on texts that are held out, or on those of --other. --languages reads articles of Wikipedia from the Hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..data.text_files import TextFiles
from ..models.repository import MODEL_FILES, loading_from
from ..utils.durable import replacing_files
from ..utils.help_texts import option
from .command import next_step, parse_options, writing_to


if TYPE_CHECKING:
    from ..models.trim import Texts

SNAPSHOT = "20231101"  # of the data set wikimedia/wikipedia


@dataclass
class TrimArguments:
    """The texts, and what to keep beside their tokens."""

    files: list[str] = option([], "Texts: .txt, .jsonl, .csv or .parquet files, also gzipped.")
    languages: list[str] = option([], "In place of --files: languages of Wikipedia, such as en pt.")
    text_column: str = option("text", "Column with the texts; title+text joins two.")
    articles: int = option(10_000, "Articles of Wikipedia per language.")
    other: list[str] = option([], "Files with texts to measure on. Default: every tenth text.")
    characters: Literal["all", "texts"] = option(
        "all", "Single characters to keep: all, or those of the texts; then others become unknown."
    )
    revision: str | None = option(None, "Branch, tag or commit of the source.")
    trust_remote_code: bool = option(False, "Run code that comes with the source.")
    overwrite: bool = option(False, "Replace a model that output_dir holds.")


def texts_of(files: Sequence[str], options: TrimArguments, source: str) -> Texts:
    """The texts of some files, as the source reads them."""
    texts, tokenizer = TextFiles(files, options.text_column), None
    if "+" in options.text_column:  # the tokenizer has the separator of joined columns
        from transformers import AutoTokenizer

        with loading_from(source):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=options.revision)
    return lambda: chain(*texts.sources(tokenizer).values())


def articles(languages: Sequence[str], number: int) -> list[str]:
    """The first articles of Wikipedia in each language, from the Hub."""
    from datasets import load_dataset

    names = [f"{SNAPSHOT}.{language}" for language in languages]
    loaded = [load_dataset("wikimedia/wikipedia", name, split="train", streaming=True) for name in names]
    return [row["text"] for rows in loaded for row in islice(rows, number)]


def report(sizes: Mapping[str, Mapping[str, float]], which: str) -> str:
    """What [`trim`] returns, as a table."""
    titles = {"tokens": "thousand tokens", "parameters": "million parameters", "bytes": "MB of weights"}
    titles |= {"graph_bytes": "MB as an ONNX graph in 8 bits, about"}
    lines, other = [f"{'':<36}{'before':>9}{'after':>9}"], sizes["other"]
    for name, title in titles.items():
        before, after = (sizes[side][name] / (1e3 if name == "tokens" else 1e6) for side in ("before", "after"))
        lines.append(f"{title:<36}{before:>9.1f}{after:>9.1f}")
    lines.append(
        f"{other['texts']:,} {which} texts have {other['longer']:.2%} more tokens, {other['unknown_after']:.2%} of "
        f"which are unknown (before: {other['unknown_before']:.2%})."
    )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    options, place = parse_options(
        (TrimArguments,),
        __doc__,
        arguments,
        source={"help": "folder or Hub id of an encoder with a fast tokenizer"},
        output_dir={"type": Path, "help": "folder for the trimmed encoder"},
    )
    if bool(options.files) == bool(options.languages):
        raise ValueError("Trimming needs texts: pass either --files or --languages.")
    with writing_to(place.output_dir, MODEL_FILES, options.overwrite, place.source):
        other = texts_of(options.other, options, place.source) if options.other else None
        if options.files:
            texts = texts_of(options.files, options, place.source)
        else:
            texts = partial(iter, articles(options.languages, options.articles))  # a new iterator at each call
        from ..models.trim import trim

        with replacing_files(place.output_dir, stale=MODEL_FILES) as draft:
            sizes = trim(
                place.source,
                draft,
                texts,
                other=other,
                every_character=options.characters == "all",
                revision=options.revision,
                trust_remote_code=options.trust_remote_code,
            )
    print(f"{report(sizes, 'held-out' if other is None else 'other')}\nSaved to {place.output_dir}.")
    next_step(model=place.output_dir, trust_remote_code=options.trust_remote_code)
