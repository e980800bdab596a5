"""
Trim a vocabulary: an encoder in its own repository, with the tokens that your texts use and those that spell all other
text. Most weights of a small multilingual encoder are embeddings of tokens that texts in a few languages never have:

    m3bert trim intfloat/multilingual-e5-small runs/trimmed --files passages.txt queries.txt
    m3bert trim intfloat/multilingual-e5-small runs/trimmed --languages en pt

These texts keep their tokens and hidden states, to the last bit. Other texts may have more, shorter tokens: how many,
is measured on texts that are held out, or on those of --other. --languages reads articles of Wikipedia from the Hub.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.text_files import TextFiles
from ..models.repository import MODEL_FILES, naming
from ..utils.durable import replacing_files
from .command import argument_parser, next_step, writing_to


if TYPE_CHECKING:
    from ..models.trim import Texts


def texts_of(files: Sequence[str], options: Namespace) -> Texts:
    """The texts of some files, as the source reads them."""
    texts, tokenizer = TextFiles(files, options.text_column), None
    if "+" in options.text_column:  # the tokenizer has the separator of joined columns
        from transformers import AutoTokenizer

        with naming(options.source):
            tokenizer = AutoTokenizer.from_pretrained(options.source, revision=options.revision)
    return lambda: chain(*texts.sources(tokenizer).values())


def articles(languages: Sequence[str], number: int, snapshot: str) -> list[str]:
    """The first articles of Wikipedia in each language, from the Hub."""
    from datasets import load_dataset

    names = [f"{snapshot}.{language}" for language in languages]
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
    parser = argument_parser(__doc__)
    parser.add_argument("source", help="folder or Hub id of an encoder with a fast tokenizer")
    parser.add_argument("output_dir", help="folder for the trimmed encoder")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--files", nargs="+", help=".txt, .jsonl, .csv or .parquet files, also gzipped")
    chosen.add_argument("--languages", nargs="+", help="languages of Wikipedia, such as en pt")
    parser.add_argument(
        "--text_column",
        default="text",
        help="column with the texts; title+text joins two (default: text)",
    )
    parser.add_argument(
        "--articles", type=int, default=10_000, help="articles of Wikipedia per language (default: %(default)s)"
    )
    parser.add_argument(
        "--snapshot",
        default="20231101",
        help="date of the data set wikimedia/wikipedia (default: %(default)s)",
    )
    parser.add_argument("--other", nargs="+", help="files with texts to measure on; default: every tenth text")
    parser.add_argument(
        "--characters",
        choices=["all", "texts"],
        default="all",
        help="single characters to keep: all, or those of the texts, other ones become unknown (default: all)",
    )
    parser.add_argument("--revision", help="branch, tag or commit of the source")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the source")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that output_dir holds")
    options = parser.parse_args(arguments)
    output = Path(options.output_dir)
    with writing_to(output, MODEL_FILES, options.overwrite, options.source):
        other = texts_of(options.other, options) if options.other else None
        if options.files:
            texts = texts_of(options.files, options)
        else:
            texts = articles(options.languages, options.articles, options.snapshot).copy
        from ..models.trim import trim

        with replacing_files(output, stale=MODEL_FILES if options.overwrite else ()) as draft:
            sizes = trim(
                options.source,
                draft,
                texts,
                other=other,
                every_character=options.characters == "all",
                revision=options.revision,
                trust_remote_code=options.trust_remote_code,
            )
    print(f"{report(sizes, 'held-out' if other is None else 'other')}\nSaved to {output}.")
    next_step(model=output, trust_remote_code=options.trust_remote_code)
