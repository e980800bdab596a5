"""The public names of `m3bert`."""

from __future__ import annotations

from importlib.metadata import version

import m3bert
from m3bert import modeling as modeling_m3bert, trainers


def test_every_method_has_its_config_and_trainer_at_the_top():
    for prefix in ("MIPIC", "MIC", "IBKD", "QAMA", "Contrastive", "ExitDistillation", "MultigranularMLM"):
        for end in ("Config", "Trainer"):
            assert getattr(m3bert, prefix + end) is getattr(trainers, prefix + end)
    assert m3bert.M3BertModel is modeling_m3bert.M3BertModel


def test_the_version_is_that_of_the_distribution():
    assert m3bert.__version__ == version("m3bert")
