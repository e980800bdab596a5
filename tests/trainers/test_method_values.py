"""The losses of three steps of every method, and the weights after them, as on 2026-11-26."""

from __future__ import annotations

import json

import pytest

from benchmarks.method_values import TAUGHT, values_of
from m3bert.trainers import METHODS
from tests.snippets import ROOT


GOLDEN = json.loads((ROOT / "tests" / "frozen" / "method_values.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_losses_and_weights_that_it_had(method, tmp_path):
    *losses, total, norm = values_of(method, tmp_path)
    *expected, expected_total, expected_norm = GOLDEN[method]
    tolerance = 1e-3 if method in TAUGHT else 1e-5  # in float32, or in float64 with losses logged in float32
    assert losses == pytest.approx(expected, rel=tolerance)
    assert norm == pytest.approx(expected_norm, rel=tolerance)
    assert total == pytest.approx(expected_total, abs=tolerance * expected_norm)
