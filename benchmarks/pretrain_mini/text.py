"""The text and the pairs of a small pretraining, from local data sets."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from m3bert.evaluation.readers import read_rows
from m3bert.evaluation.tasks import BITEXT_LANGUAGES


XNLI = ("ar", "bg", "de", "el", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
ENGLISH = ("news", "web", "books", "brown")
ENGLISH_LINES, LINES_PER_LANGUAGE = 40_000, 3_000  # more than the steps read
ENGLISH_EVAL, EVAL_PER_LANGUAGE, EVAL_PAIRS = 256, 8, 256
PAIRS = 60_000  # of each kind


def lines(file: Path) -> list[str]:
    """The lines of a gzipped file that are not empty."""
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        return [line.strip() for line in opened if line.strip()]


def scored_sentences(data: Path) -> set[str]:
    """The sentences that the models are scored on, in lower case."""
    files = [data / "stsb" / "test.jsonl.gz"]
    files += [data / "tatoeba" / f"{language}-eng.jsonl.gz" for language in BITEXT_LANGUAGES]
    return {
        row[side].strip().lower() for file in files for row in read_rows(file) for side in ("sentence1", "sentence2")
    }


def translations(data: Path) -> list[tuple[str, str]]:
    """English sentences of XNLI's development set, which is no test here, and their translations."""
    english = read_rows(data / "xnli" / "en-dev.jsonl.gz")
    pairs: dict[tuple[str, str], None] = {}  # in order, each once
    for language in XNLI:
        for row, other in zip(english, read_rows(data / "xnli" / f"{language}-dev.jsonl.gz"), strict=True):
            pairs |= {(row[side], other[side]): None for side in ("sentence1", "sentence2")}
    return list(pairs)


def english_pairs(data: Path, draw: random.Random) -> list[tuple[str, str]]:
    """Two captions of an image, and entailed sentences of SNLI."""
    pairs = []
    for row in read_rows(data / "multi30k-captions" / "train.jsonl.gz"):
        first, second = draw.sample(row["captions"], 2)
        pairs.append((first, second))
    for row in read_rows(data / "snli" / "train.jsonl.gz"):
        if row["label_text"] == "entailment":
            pairs.append((row["sentence1"], row["sentence2"]))
    return pairs


def write_text(data: Path, folder: Path) -> None:
    """
    Write the text of all stages, without the sentences that are scored: `english/eng` and `languages/LANGUAGE` for
    masked language modelling, `pairs`, and held-out parts of each.
    """
    if folder.is_dir():
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    scored, draw = scored_sentences(data), random.Random(0)

    def not_scored(texts: Iterable[str]) -> list[str]:
        return [text for text in texts if text.lower() not in scored]

    def write(name: str, texts: Sequence[str]) -> None:
        file = unfinished / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")

    def drawn(pairs: list[tuple[str, str]]) -> list[str]:
        unscored = [pair for pair in pairs if not {text.strip().lower() for text in pair} & scored]
        rows = [json.dumps({"query": first, "document": second}, ensure_ascii=False) for first, second in unscored]
        rows = list(dict.fromkeys(rows))  # each once
        return draw.sample(rows, min(PAIRS, len(rows)))

    english = not_scored(line for name in ENGLISH for line in lines(data / "text-english" / f"{name}.txt.gz"))
    draw.shuffle(english)
    write("english-eval.txt", english[:ENGLISH_EVAL])
    for place in ("english/eng", "languages/eng"):
        write(f"{place}/text.txt", english[ENGLISH_EVAL:][:ENGLISH_LINES])
    held_out = english[:EVAL_PER_LANGUAGE]
    for file in sorted((data / "text-multilingual").glob("*.txt.gz")):
        texts = not_scored(lines(file))
        held_out += texts[:EVAL_PER_LANGUAGE]
        language = file.name.removesuffix(".txt.gz")
        write(f"languages/{language}/text.txt", texts[EVAL_PER_LANGUAGE:][:LINES_PER_LANGUAGE])
    write("multilingual-eval.txt", held_out)
    kinds = {"translations": drawn(translations(data)), "english": drawn(english_pairs(data, draw))}
    each = EVAL_PAIRS // len(kinds)
    write("pairs-eval.jsonl", [row for rows in kinds.values() for row in rows[:each]])
    for name, rows in kinds.items():
        write(f"pairs/{name}.jsonl", rows[each:])
    unfinished.rename(folder)
