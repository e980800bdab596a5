"""Text pairs of mixed lengths from local data sets."""

from __future__ import annotations

import random

from benchmarks._measure import SEED
from m3bert.commands.sources import data_folder
from m3bert.evaluation import find_task
from m3bert.evaluation.evaluators import Retrieval
from m3bert.evaluation.readers import load_task, read_rows


COLUMNS = ("anchor", "positive")
MAX_LENGTH = 256  # tokens
RELEVANT = 2  # lowest grade of a passage that answers its query


def mixed_pairs(count: int) -> list[dict[str, str]]:
    """
    Pairs `anchor`, `positive` in random order: a third each of two captions of an image (multi30k), premise and
    entailed hypothesis (SNLI), and query and relevant passage (MS MARCO). The same pairs in every run.

    Raises:
        ValueError: if there are no local data sets.
    """
    data, draw = data_folder(), random.Random(SEED)
    captions = [row["captions"][:2] for row in read_rows(data / "multi30k-captions" / "train.jsonl.gz")]
    entailed = [
        (row["sentence1"], row["sentence2"])
        for row in read_rows(data / "snli" / "train.jsonl.gz")
        if row["label_text"] == "entailment"
    ]
    passages = load_task(find_task("msmarco-mini"), data)
    assert isinstance(passages, Retrieval)
    answered = [
        (query, passages.texts["documents"][row])
        for query, grades in zip(passages.texts["queries"], passages.relevant, strict=True)
        for row, grade in grades.items()
        if grade >= RELEVANT
    ]
    sources = (captions, entailed, answered)
    shares = [count // 3 + (place < count % 3) for place in range(3)]
    pairs = [pair for source, share in zip(sources, shares, strict=True) for pair in draw.sample(source, share)]
    draw.shuffle(pairs)
    return [dict(zip(COLUMNS, pair, strict=True)) for pair in pairs]
