"""How often each language is drawn."""

from __future__ import annotations

import pytest
from datasets import Dataset

from m3bert.trainers.data.languages import mix_languages, smoothed_probabilities


def test_smoothing_raises_small_languages():
    # 0.9^0.7 / (0.9^0.7 + 0.1^0.7)
    assert smoothed_probabilities([90, 10]) == pytest.approx([0.82318, 0.17682], abs=1e-5)
    assert smoothed_probabilities([3, 1], exponent=1.0) == pytest.approx([0.75, 0.25])
    assert sum(smoothed_probabilities([5, 7, 11, 1])) == pytest.approx(1)


def test_languages_are_drawn_with_smoothed_probabilities():
    large, small = Dataset.from_dict({"x": [0] * 900}), Dataset.from_dict({"x": [1] * 100})
    mixed = mix_languages([large, small], seed=1)
    assert len(mixed) > 1000
    assert sum(mixed["x"]) / len(mixed) == pytest.approx(0.177, abs=0.03)
    assert mix_languages([large]) is large
