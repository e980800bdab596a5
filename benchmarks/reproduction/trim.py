"""
Trimmed vocabularies of real encoders: sizes, equal hidden states, and what becomes of other texts.

    python -m benchmarks.reproduction.trim minilm                       # all-MiniLM-L6-v2 (extra `quickstart`)
    python -m benchmarks.reproduction.trim e5 --model FOLDER            # multilingual-e5-small
    python -m benchmarks.reproduction.trim smollm2 --model FOLDER       # SmolLM2-135M-Instruct
    python -m benchmarks.reproduction.report                            # write the table

Each is trimmed to the 20,000 English texts of benchmarks.reproduction.exits, with all single characters ("all") and
with those of these texts ("texts"). "difference" is the largest difference of a hidden state, of 200 texts in float32.
Other texts are the held-out ones, Cranfield's documents, and 1,000 lines in each of four languages.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.reproduction.embedding import MAX_LENGTH
from benchmarks.reproduction.fit_texts import lines, sources
from benchmarks.reproduction.study import add_results, documents_there, encoder_parser, source_of
from m3bert.commands.command import run_command
from m3bert.commands.sources import data_folder
from m3bert.models.trim import compare, trim
from m3bert.models.vocabulary import Vocabulary


ENCODERS = ("minilm", "e5", "smollm2")
LANGUAGES = ("deu", "por", "rus", "zho")
SHOWN = 200  # texts whose hidden states are compared


@torch.no_grad()
def difference(folders: list[str], texts: list[str]) -> float:
    """The largest difference between the hidden states of two encoders."""
    loaded = [
        (AutoTokenizer.from_pretrained(each), AutoModel.from_pretrained(each).float().eval()) for each in folders
    ]
    largest = 0.0
    for text in texts:
        options = {"truncation": True, "max_length": MAX_LENGTH, "return_tensors": "pt"}
        one, other = (model(**tokenizer(text, **options)).last_hidden_state for tokenizer, model in loaded)
        largest = max(largest, float((one - other).abs().max()))
    return largest


def measure(source: str, texts: list[str], others: dict[str, list[str]], *, every_character: bool) -> dict[str, Any]:
    """What trimming an encoder to texts does: its sizes, the difference, and other texts."""
    with TemporaryDirectory() as temporary:
        measured = trim(source, Path(temporary), lambda: texts, every_character=every_character)
        measured["held-out texts"] = measured.pop("other")
        folders = [source, temporary]
        old, new = (Vocabulary(AutoTokenizer.from_pretrained(each).backend_tokenizer) for each in folders)
        measured |= {name: compare(old, new, rows) for name, rows in others.items() if rows}
        measured["hidden states"] = {"difference": difference(folders, texts[:: max(1, len(texts) // SHOWN)][:SHOWN])}
    return measured


def main(arguments: list[str]) -> None:
    options = encoder_parser(__doc__, ENCODERS).parse_args(arguments)
    data, source = data_folder(), source_of(options)
    texts = [text for rows in sources(data).values() for text in rows]
    others = {"Cranfield": documents_there("cranfield", data)}
    others |= {name: lines(data, f"text-multilingual/{name}.txt.gz")[:1000] for name in LANGUAGES}
    about = {
        "command": "python -m benchmarks.reproduction.trim",
        "settings": {"texts": len(texts), "max_length": MAX_LENGTH, "states": SHOWN},
        "seed": "none: nothing is drawn",
        "metric": "tokens, parameters, bytes and shares; run -> seed -> what is measured -> measure",
    }
    for characters in ("all", "texts"):
        measured = measure(source, texts, others, every_character=characters == "all")
        print(options.encoder, characters, measured, flush=True)
        add_results("trim", {f"{options.encoder}, {characters}": {"0": measured}}, about)


if __name__ == "__main__":
    run_command(main)
