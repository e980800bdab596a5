"""The study of QAMA: its page has the figures of its results file, and its measures are what they are said to be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean

import pytest
import torch


pytest.importorskip("faiss")
pytest.importorskip("matplotlib")

from benchmarks.reproduction import qama as study
from modeling_m3bert import M3BertQuantizer, M3BertQuantizerConfig
from trainers import Granularity
from trainers.core.codes import bytes_per_vector, with_present_names


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> dict:
    return with_present_names(json.loads((study.RESULTS / "qama.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "studies.md").read_text(encoding="utf-8").partition("## QAMA")[2].partition("\n## ")[0]


def test_all_steps_have_the_same_seeds(results):
    steps = {run: set(seeds) for run, seeds in results["scores"].items() if run in study.STEPS}
    assert steps.keys() == study.STEPS.keys() and all(seeds == {"0", "1"} for seeds in steps.values())


def test_the_page_has_the_steps_of_the_results_file(results, page):
    rows = dict(re.findall(r"^\| ([+t].+?) \| (.+) \|$", page, re.MULTILINE))
    for step in study.STEPS:
        expected = [
            study.value(results, step, study.RETRIEVAL_TESTS, Granularity(6, dim, code))
            for code in ("qama-2", "qama-1.5")
            for dim in (384, 192, 96)
        ]
        assert rows[step] == " | ".join(f"{value:.1f}" for value in expected)


def test_the_page_has_the_quality_by_bytes_of_the_results_file(results, page):
    full = study.value(results, "no quantizer", study.RETRIEVAL_TESTS, "6x384")
    rows = re.findall(r"^\| (\d+) \| `(.+?)`, (\d+) \| (.+?) \| (.+?) \| (.+?) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for size, code, dim, *cells, others in rows:
        g = Granularity(6, int(dim), code)
        assert bytes_per_vector(code, int(dim)) == int(size)
        for cell, way in zip(cells, ("", "asymmetric", "re-scored"), strict=True):
            tests = [study.named(test, way) for test in study.RETRIEVAL_TESTS]
            assert cell == study.share(study.value(results, "+ variance control", tests, g), full)
        for name, width, value in re.findall(r"`(\w+)` (\d+) dims ([\d.]+)", others):
            key = Granularity(6, int(width), name)
            assert abs(bytes_per_vector(name, int(width)) - int(size)) <= 1
            assert value == f"{study.value(results, 'no quantizer', study.RETRIEVAL_TESTS, key):.1f}"
        for words, value in re.findall(r"PQ(.*?) ([\d.]+)$", others):
            key = re.findall(r"\d+", words) or [size]
            assert value == f"{study.value(results, 'faiss PQ', study.RETRIEVAL_TESTS, key[0]):.1f}"


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
