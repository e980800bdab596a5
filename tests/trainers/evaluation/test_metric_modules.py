"""The modules of the library `evaluate`; that they give the right numbers is tested beside each metric."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from trainers.evaluation.modules import METRICS, compute_metric, load_metric


def test_every_module_can_be_loaded():
    assert len(METRICS) == 6 and all(load_metric(name).features for name in METRICS)
    with pytest.raises(ValueError, match="no metric 'bleu'; legal values: alignment_uniformity, "):
        load_metric("bleu")


def test_batches_give_the_scores_of_all():
    metric, pairs = load_metric("similarity_spearman"), np.random.default_rng(0).normal(size=(2, 30))
    for rows in (slice(0, 7), slice(7, 30)):
        metric.add_batch(predictions=pairs[0, rows], references=pairs[1, rows])
    assert metric.compute() == compute_metric("similarity_spearman", predictions=pairs[0], references=pairs[1])


def test_threads_take_turns():
    truth = [0, 1] * 20

    def accuracy(wrong: int) -> float:
        guesses = [1 - label if row < wrong else label for row, label in enumerate(truth)]
        return compute_metric("classification", predictions=guesses, references=truth)["accuracy"]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(accuracy, range(40))) == [(40 - wrong) / 40 for wrong in range(40)]
