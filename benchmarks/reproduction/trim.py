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

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.reproduction.exits import MAX_LENGTH, RESULTS, lines, sources
from benchmarks.reproduction.study import add_results, development_tasks
from m3bert.commands.command import run_command
from m3bert.commands.sources import data_folder, default_base
from m3bert.commands.trim import compare, trim
from m3bert.evaluation.readers import load_task


KINDS = {"minilm": "WordPiece", "e5": "Unigram", "smollm2": "byte-level BPE"}
LANGUAGES = ("deu", "por", "rus", "zho")
SHOWN = 200  # texts whose hidden states are compared


@torch.no_grad()
def difference(folders: list[str], texts: list[str]) -> float:
    """The largest difference between the hidden states of two encoders."""
    loaded = [(AutoTokenizer.from_pretrained(its), AutoModel.from_pretrained(its).float().eval()) for its in folders]
    largest = 0.0
    for text in texts:
        options = {"truncation": True, "max_length": MAX_LENGTH, "return_tensors": "pt"}
        one, other = (model(**tokenizer(text, **options)).last_hidden_state for tokenizer, model in loaded)
        largest = max(largest, float((one - other).abs().max()))
    return largest


def measure(source: str, texts: list[str], others: dict[str, list[str]], *, every_character: bool) -> dict[str, Any]:
    """What trimming an encoder to texts does: its sizes, the difference, and other texts."""
    with TemporaryDirectory() as temporary:
        found = trim(source, Path(temporary), lambda: texts, every_character=every_character)
        found["held-out texts"] = found.pop("other")
        tokenizers = [AutoTokenizer.from_pretrained(its) for its in (source, temporary)]
        backends = [tokenizer.backend_tokenizer for tokenizer in tokenizers]
        for backend in backends:
            backend.no_truncation()
            backend.no_padding()
        for name, its in others.items():
            found[name] = compare(backends, [tokenizer.unk_token_id for tokenizer in tokenizers], its)
        found["hidden states"] = {"difference": difference([source, temporary], texts[:: len(texts) // SHOWN][:SHOWN])}
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", choices=KINDS, help="the encoder")
    parser.add_argument("--model", help="its folder; minilm has a package")
    options = parser.parse_args(arguments)
    if options.model is None and options.encoder != "minilm":
        raise ValueError(f"{options.encoder} needs --model, the folder of the encoder.")
    data, source = data_folder(), options.model or default_base()
    texts = [text for its in sources(data).values() for text in its]
    (cranfield,) = (load_task(task, data) for task in development_tasks(["cranfield"]))
    others = {"Cranfield": list(cranfield.texts["documents"])}
    others |= {name: lines(data, f"text-multilingual/{name}.txt.gz")[:1000] for name in LANGUAGES}
    about = {
        "command": "python -m benchmarks.reproduction.trim",
        "settings": {"texts": len(texts), "max_length": MAX_LENGTH, "states": SHOWN},
        "seed": "none: nothing is drawn",
        "metric": "tokens, parameters, bytes and shares; run -> seed -> what is measured -> measure",
    }
    for characters in ("all", "texts"):
        found = measure(source, texts, others, every_character=characters == "all")
        print(options.encoder, characters, found, flush=True)
        add_results(RESULTS / "trim.json", {f"{options.encoder}, {characters}": {"0": found}}, about)


if __name__ == "__main__":
    run_command(main)
