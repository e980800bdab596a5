"""The modules of the library `evaluate`; that they give our numbers is tested beside each metric."""

from __future__ import annotations

import pytest

from trainers.evaluation.modules import METRICS, load_metric


def test_every_module_can_be_loaded():
    assert len(METRICS) == 6
    with pytest.raises(ValueError, match="no metric 'bleu'; legal values: alignment_uniformity, "):
        load_metric("bleu")
