"""The study of QAMA: its steps have the same seeds, and its measures are what they are said to be."""

from statistics import mean

import pytest
import torch


pytest.importorskip("faiss")
pytest.importorskip("matplotlib")

from benchmarks.reproduction import qama as study
from benchmarks.reproduction.tables.cells import results
from benchmarks.reproduction.tables.indexes import QAMA_STEPS
from m3bert.modeling import M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers import Granularity


def test_all_steps_have_the_same_seeds():
    scores = results("qama")["scores"]
    assert QAMA_STEPS == list(study.STEPS) and all(set(scores[step]) == {"0", "1"} for step in study.STEPS)


def test_agreement_counts_the_other_documents_that_both_find():
    torch.manual_seed(0)
    documents = torch.randn(60, 384)
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=384)).eval()
    quantizer.calibrate(documents)
    found = study.agreement({"documents": documents}, ["qama-2"], quantizer)
    unit = torch.nn.functional.normalize(documents, dim=1)
    for dim in study.DIMS:
        signs = quantizer.signs(quantizer.encode(documents, "qama-2", dim))
        tops = []
        for side in (unit, signs):
            similarities = side @ side.T
            similarities.fill_diagonal_(-torch.inf)
            tops.append(similarities.topk(10).indices.tolist())
        naive = mean(len(set(ours) & set(its)) / 10 for ours, its in zip(*tops, strict=True))
        # Ties of Hamming distances may be broken in another order.
        assert found[Granularity(6, dim, "qama-2")] == pytest.approx(naive, abs=0.02)
