"""Training data of the studies, without any sentence of their evaluation sets. `TRAINING_DATA` has them by name."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk
from transformers import AutoTokenizer

from benchmarks.reproduction.backbones import CACHE, HELD_OUT_LINES, corpus, pieces
from benchmarks.reproduction.study import held_out_sentences, is_there, needed
from m3bert.commands.sources import default_base
from m3bert.data.files import load_files
from m3bert.data.mining import MiningOptions, mine
from m3bert.evaluation.readers import read_rows
from m3bert.trainers import Teacher


STS_TESTS = ("stsb", "sts12", "sts13", "sts14", "sts15", "sts16", "sick")
STS_SPLITS = [("stsb", "dev"), ("sick", "dev"), *((name, "test") for name in STS_TESTS)]
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
UNLABELLED = {"snli": 24_000, "captions": 12_000, "news": 24_000}  # texts per source
LONGEST_NEWS = 20  # words
HELD_OUT_TEXTS = 800  # of the held-out lines, to measure a masked language model by
Pair = tuple[str, str]


def rows_of(data: Path, name: str, split: str) -> list[dict[str, Any]]:
    """The rows of a split; none if it is not there."""
    file = f"{name}/{split}.jsonl.gz"
    return read_rows(data / file) if is_there(data, file) else []


def held_out(data: Path, splits: Iterable[tuple[str, str]]) -> set[str]:
    """The sentences of some splits, each a (data set, split), where they are there."""
    files = (data / name / f"{split}.jsonl.gz" for name, split in splits)
    return held_out_sentences(row for file in files if file.is_file() for row in read_rows(file))


def training_pairs(data: Path) -> list[Pair]:
    """Entailed pairs of SNLI and one pair of captions per image, none with a sentence of an evaluation set."""
    excluded = held_out(data, [("stsb", "dev"), *((name, "test") for name in STS_TESTS)])
    draw = random.Random(0)
    pairs = [
        (row["sentence1"], row["sentence2"])
        for row in rows_of(data, "snli", "train")
        if row["label_text"] == "entailment"
    ]
    for row in rows_of(data, "multi30k-captions", "train"):
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
    excluded, draw, texts = held_out(data, splits), random.Random(0), []
    for name, split in REGULARIZER_SOURCES:
        rows = rows_of(data, name, split)
        different = {row[side].strip() for row in rows for side in ("text", "sentence1", "sentence2") if side in row}
        sentences = sorted(text for text in different if text.lower() not in excluded)
        texts += draw.sample(sentences, min(TEXTS_PER_SOURCE, len(sentences)))
    texts = sorted(set(texts))
    draw.shuffle(texts)
    return texts


def unlabelled_texts(data: Path) -> list[str]:
    """Distinct sentences of SNLI, captions, and lines of news of at most 20 words, in a fixed random order."""
    news = "text-english/news.txt.gz"
    different = {
        "snli": {row[side].strip() for row in rows_of(data, "snli", "train") for side in ("sentence1", "sentence2")},
        "captions": {
            caption.strip() for row in rows_of(data, "multi30k-captions", "train") for caption in row["captions"]
        },
        "news": {
            line.strip()
            for line in (load_files([str(data / news)])["text"] if is_there(data, news) else ())
            if 0 < len(line.split()) <= LONGEST_NEWS
        },
    }
    excluded, draw = held_out(data, STS_SPLITS), random.Random(0)
    texts: set[str] = set()
    for name, count in UNLABELLED.items():
        sentences = sorted(text for text in different[name] if text.lower() not in excluded)
        texts |= set(draw.sample(sentences, min(count, len(sentences))))
    shuffled = sorted(texts)
    draw.shuffle(shuffled)
    return shuffled


def triplets(data: Path) -> Dataset:
    """All entailed pairs of SNLI, each with one hard negative: a contradiction of the same premise where there is one,
    otherwise a text that the real encoder mined. Mined once, and kept in the cache."""
    folder = CACHE / "triplets"
    if not folder.is_dir():
        excluded = held_out(data, STS_SPLITS)
        by_premise: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for row in rows_of(data, "snli", "train"):
            if not any(row[side].strip().lower() in excluded for side in ("sentence1", "sentence2")):
                by_premise[row["sentence1"]][row["label_text"]].append(row["sentence2"])
        rows, without = [], []
        for premise, labelled in by_premise.items():
            contradictions = labelled["contradiction"]
            for index, hypothesis in enumerate(labelled["entailment"]):
                pair = {"anchor": premise, "positive": hypothesis}
                if contradictions:
                    rows.append(pair | {"negative": contradictions[index % len(contradictions)]})
                else:
                    without.append(pair)
        sample: dict[str, Any] = {"range_min": 10, "range_max": 100, "relative_margin": 0.1, "sampling": "random"}
        options = MiningOptions(negatives=1, batch_size=128, **sample)
        mined = mine(Dataset.from_list(without), Teacher(default_base(), max_length=64), options)
        name = next(column for column in mined.column_names if column.startswith("negative"))
        rows += mined.rename_column(name, "negative").to_list()
        random.Random(0).shuffle(needed(rows, "triplets", data))
        draft = folder.with_suffix(".draft")
        Dataset.from_list(rows).save_to_disk(draft)
        draft.rename(folder)
    return load_from_disk(folder)


def text_pieces(data: Path, lines: slice) -> Dataset:
    """Lines of the corpus for masked language modelling, in pieces of 64 tokens."""
    return pieces(corpus(data)[lines], AutoTokenizer.from_pretrained(default_base()))


def held_out_text(data: Path) -> Dataset:
    """Pieces of text that the masked language models of a study do not train on."""
    return text_pieces(data, slice(HELD_OUT_TEXTS))


TRAINING_DATA: dict[str, Callable[[Path], Dataset]] = {
    "pairs": pair_dataset,
    "sentences": lambda data: Dataset.from_dict({"text": regularizer_sentences(data)}),
    "unlabelled": lambda data: Dataset.from_dict({"text": unlabelled_texts(data)}),
    "triplets": triplets,
    "text": lambda data: text_pieces(data, slice(HELD_OUT_LINES, None)),
}
