"""The texts that exits and paths are fitted to, and those that exits are trained on."""

from __future__ import annotations

import gzip
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.reproduction.study import is_there, needed
from benchmarks.reproduction.training_data import STS_SPLITS, held_out, rows_of


COUNTS = {
    "news passages": 4000,
    "brown passages": 3000,
    "web passages": 1500,
    "wikipedia": 2000,
    "news": 4000,
    "web": 1500,
    "captions": 2500,
    "questions": 1500,
}
PASSAGES = ("news passages", "brown passages", "web passages", "wikipedia")
PASSAGE_WORDS = (50, 110)
# Training: the short texts of the fit, one of ten longer ones, so that these keep their embeddings, and spans of them.
SHORT, LONGER_SHARE, QUERIES = 160, 10, 8000


def sources(data: Path) -> dict[str, list[str]]:
    """Source -> its texts, in a fixed random order."""
    draw, excluded = random.Random(0), held_out(data, STS_SPLITS)
    files = {name: lines(data, f"text-english/{name}.txt.gz") for name in ("news", "web", "brown")}
    texts = {f"{name} passages": passages(files[name], draw) for name in files}
    texts |= {name: [line for line in files[name] if len(line.split()) >= 4] for name in ("news", "web")}
    texts["wikipedia"] = [
        detokenised(line)
        for split in ("dev", "test")
        for line in lines(data, f"wikitext-2/{split}.txt.gz")
        if not line.startswith("=") and len(line.split()) >= 30
    ]
    texts["captions"] = [row["captions"][0] for row in rows_of(data, "multi30k-captions", "train")]
    texts["questions"] = [row["text"] for row in rows_of(data, "banking77", "train")]
    chosen = {}
    for name, count in COUNTS.items():
        rows = sorted({text for text in texts[name] if text.lower() not in excluded})
        draw.shuffle(rows)
        chosen[name] = rows[:count]
    return needed({name: rows for name, rows in chosen.items() if rows}, "texts of the fit", data)


def lines(data: Path, name: str) -> list[str]:
    """The lines of a gzipped file that are not empty; none of a file that is not there."""
    if not is_there(data, name):
        return []
    with gzip.open(data / name, "rt", encoding="utf-8") as opened:
        return [line.strip() for line in opened if line.strip()]


def passages(sentences: Sequence[str], draw: random.Random) -> list[str]:
    """Consecutive sentences, joined until they have a random number of words."""
    joined: list[str] = []
    current: list[str] = []
    words = draw.randint(*PASSAGE_WORDS)
    for sentence in sentences:
        current.append(sentence)
        if sum(len(part.split()) for part in current) >= words:
            joined.append(" ".join(current))
            current, words = [], draw.randint(*PASSAGE_WORDS)
    return joined


def detokenised(line: str) -> str:
    """A line of WikiText without its tokenisation marks and unknown words."""
    line = re.sub(r" @([-,.])@ ", r"\1", line.replace("<unk> ", ""))
    return re.sub(r" ([,.;:!?)'])", r"\1", line).replace("( ", "(")


def mostly_short(texts: Iterable[str]) -> list[str]:
    """The different texts to train on: the short ones, and one of ten longer ones."""
    different = [*dict.fromkeys(texts)]
    longer = [text for text in different if len(text) > SHORT]
    left_out = {*longer} - {*longer[::LONGER_SHARE]}
    return [text for text in different if text not in left_out]


def short_queries(texts: Mapping[str, Sequence[str]], data: Path) -> list[str]:
    """Spans of 3 to 16 words of the texts, captions and questions excepted, in place of queries."""
    draw, whole = random.Random(1), {text for rows in texts.values() for text in rows}
    longer = [text.split() for name, rows in texts.items() if name not in ("captions", "questions") for text in rows]
    spans: dict[str, None] = {}
    for _ in range(20 * QUERIES if longer else 0):  # few texts have few different spans
        if len(spans) == QUERIES:
            break
        words, count = draw.choice(longer), draw.randint(3, 16)
        start = draw.randint(0, max(0, len(words) - count))
        span = " ".join(words[start : start + count]).strip(" ,.;:")
        if span and span not in whole:
            spans[span] = None
    return needed(list(spans), "texts to take queries from", data)
