"""Training pairs: entailed sentences and captions of one image, without any sentence of an evaluation set."""

from __future__ import annotations

import random
from pathlib import Path

from datasets import Dataset

from benchmarks.reproduction.study import held_out_sentences
from trainers.evaluation.readers import read_rows


STS_TESTS = ("stsb", "sts12", "sts13", "sts14", "sts15", "sts16", "sick")
Pair = tuple[str, str]


def training_pairs(data: Path) -> list[Pair]:
    """Entailed pairs of SNLI and one pair of captions per image, none with a sentence of an evaluation set."""
    held_out = held_out_sentences(
        row
        for name, split in [("stsb", "dev"), *((name, "test") for name in STS_TESTS)]
        for row in read_rows(data / name / f"{split}.jsonl.gz")
    )
    draw = random.Random(0)
    pairs = [
        (row["sentence1"], row["sentence2"])
        for row in read_rows(data / "snli" / "train.jsonl.gz")
        if row["label_text"] == "entailment"
    ]
    for row in read_rows(data / "multi30k-captions" / "train.jsonl.gz"):
        first, second = draw.sample(row["captions"], 2)
        pairs.append((first, second))
    pairs = [pair for pair in pairs if not any(sentence.strip().lower() in held_out for sentence in pair)]
    draw.shuffle(pairs)
    return pairs


def pair_dataset(data: Path) -> Dataset:
    """[`training_pairs`] with the columns `anchor` and `positive`."""
    pairs = training_pairs(data)
    return Dataset.from_dict({"anchor": [a for a, _ in pairs], "positive": [p for _, p in pairs]})
