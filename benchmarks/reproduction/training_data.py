"""Training data of the studies, without any sentence of their evaluation sets. `TRAINING_DATA` has them by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer

from benchmarks.reproduction.backbones import HELD_OUT_LINES, corpus, pieces
from benchmarks.reproduction.study import held_out_sentences
from scripts.sources import default_base
from trainers.evaluation.readers import read_rows


STS_TESTS = ("stsb", "sts12", "sts13", "sts14", "sts15", "sts16", "sick")
# The test sets of MIPIC and MIC that are there, by family.
REGULARIZER_TESTS = {
    "similarity": STS_TESTS,
    "classification": ("banking77", "emotion", "tweeteval-emotion"),
    "pairs": ("mrpc", "wic", "scitail"),
}
REGULARIZER_SOURCES = [
    ("banking77", "train"),
    ("tweeteval-sentiment", "train_reconstructed"),
    *((name, "train") for name in ("stsb", "sick", "mrpc", "wic")),
]
TEXTS_PER_SOURCE = 4000
HELD_OUT_TEXTS = 800  # of the held-out lines, to measure a masked language model by
Pair = tuple[str, str]


def held_out(data: Path, splits: Iterable[tuple[str, str]]) -> set[str]:
    """The sentences of some splits, each a (data set, split)."""
    return held_out_sentences(row for name, split in splits for row in read_rows(data / name / f"{split}.jsonl.gz"))


def training_pairs(data: Path) -> list[Pair]:
    """Entailed pairs of SNLI and one pair of captions per image, none with a sentence of an evaluation set."""
    excluded = held_out(data, [("stsb", "dev"), *((name, "test") for name in STS_TESTS)])
    draw = random.Random(0)
    pairs = [
        (row["sentence1"], row["sentence2"])
        for row in read_rows(data / "snli" / "train.jsonl.gz")
        if row["label_text"] == "entailment"
    ]
    for row in read_rows(data / "multi30k-captions" / "train.jsonl.gz"):
        first, second = draw.sample(row["captions"], 2)
        pairs.append((first, second))
    pairs = [pair for pair in pairs if not any(sentence.strip().lower() in excluded for sentence in pair)]
    draw.shuffle(pairs)
    return pairs


def pair_dataset(data: Path) -> Dataset:
    """[`training_pairs`] with the columns `anchor` and `positive`."""
    pairs = training_pairs(data)
    return Dataset.from_dict({"anchor": [a for a, _ in pairs], "positive": [p for _, p in pairs]})


def regularizer_sentences(data: Path) -> list[str]:
    """The distinct sentences of the training sets of MIPIC and MIC, up to 4,000 of each, in a fixed random order."""
    splits = [(name, split) for tests in REGULARIZER_TESTS.values() for name in tests for split in ("dev", "test")]
    excluded = held_out(data, [its for its in splits if (data / its[0] / f"{its[1]}.jsonl.gz").is_file()])
    draw, texts = random.Random(0), []
    for name, split in REGULARIZER_SOURCES:
        rows = read_rows(data / name / f"{split}.jsonl.gz")
        found = {row[side].strip() for row in rows for side in ("text", "sentence1", "sentence2") if side in row}
        own = sorted(text for text in found if text.lower() not in excluded)
        texts += draw.sample(own, min(TEXTS_PER_SOURCE, len(own)))
    texts = sorted(set(texts))
    draw.shuffle(texts)
    return texts


def text_pieces(data: Path, lines: slice) -> Dataset:
    """Lines of the corpus for masked language modelling, in pieces of 64 tokens."""
    return pieces(corpus(data)[lines], AutoTokenizer.from_pretrained(default_base()))


def held_out_text(data: Path) -> Dataset:
    """Pieces of text that the masked language models of a study do not train on."""
    return text_pieces(data, slice(HELD_OUT_TEXTS))


TRAINING_DATA: dict[str, Callable[[Path], Dataset]] = {
    "pairs": pair_dataset,
    "sentences": lambda data: Dataset.from_dict({"text": regularizer_sentences(data)}),
    "text": lambda data: text_pieces(data, slice(HELD_OUT_LINES, None)),
}
