"""The study's training pairs have no sentence of an evaluation set."""

from __future__ import annotations

import pytest

from benchmarks.reproduction.sts_finetuning import TESTS, training_pairs
from trainers.evaluation.readers import read_rows


@pytest.mark.slow
def test_no_sentence_of_an_evaluation_set_is_trained_on(data_folder):
    pairs = training_pairs(data_folder)
    assert len(pairs) > 30_000
    assert pairs == training_pairs(data_folder), "the same pairs in every run"
    trained = {sentence.strip().lower() for pair in pairs for sentence in pair}
    for name, split in [("stsb", "dev"), *((name, "test") for name in TESTS)]:
        for row in read_rows(data_folder / name / f"{split}.jsonl.gz"):
            assert row["sentence1"].strip().lower() not in trained
            assert row["sentence2"].strip().lower() not in trained
