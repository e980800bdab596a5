"""The whole quickstart in miniature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hub_cards.onnx_export import missing_packages
from modeling_m3bert import M3BertModel
from modeling_m3bert.modeling_elastic import Elasticity
from scripts import quickstart
from tests.conftest import tiny_config
from trainers import Grid, fit_exits
from trainers.data.stdlib_docs import Pair
from trainers.evaluation import GridEncoder


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pairs(sentences) -> list[Pair]:
    bodies = [f"{first} {second}" for first, second in zip(sentences, sentences[3:], strict=False)]
    return [
        Pair("m", f"m.{row}", text, body, True)
        for row, (text, body) in enumerate(zip(sentences, bodies, strict=False))
    ]


@pytest.fixture
def small_grid(monkeypatch) -> Grid:
    grid = Grid.parse("0,2,4,6x8,32")
    monkeypatch.setattr(quickstart, "GRID", grid)
    monkeypatch.setattr(quickstart, "FULL", grid.full)
    monkeypatch.setattr(quickstart, "SHORT_LENGTH", 48)
    return grid


def test_one_pass_gives_untouched_fitted_and_indexed_embeddings(tiny_tokenizer, pairs, small_grid, tmp_path):
    model = M3BertModel(tiny_config(max_position_embeddings=64)).eval()
    model.set_depths(table=model.get_input_embeddings().weight)
    encoder = GridEncoder(model, tiny_tokenizer, small_grid, max_length=48)
    texts, documents = [pair.body for pair in pairs], quickstart.documents_of(pairs)

    untouched = encoder.encode(texts)
    before = quickstart.add_exits(encoder, pairs, tmp_path / "training" / "before.npy")
    spec = Elasticity.of(model.config)
    assert spec.exits == [0, 2, 4, 6] and spec.fit["basis"] == "principal"
    fitted, anew = quickstart.after_exits(encoder, texts, untouched), encoder.encode(texts)
    for layer in small_grid.layers:
        torch.testing.assert_close(fitted.widest(layer), anew.widest(layer), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(before.of(texts), anew.at(small_grid.full), atol=1e-5, rtol=1e-4)
    index = before.of(documents)
    torch.testing.assert_close(index, encoder.encode(documents).at(small_grid.full), atol=1e-5, rtol=1e-4)

    quickstart.write_index(pairs, index, tmp_path)
    saved = load_file(tmp_path / "index.safetensors")
    assert list(saved) == ["layer_6"] and torch.equal(saved["layer_6"], index)


def test_a_fit_hands_on_the_states_of_all_its_texts(tiny_tokenizer, pairs):
    model, found = M3BertModel(tiny_config(max_position_embeddings=64)).eval(), {}
    texts = quickstart.documents_of(pairs)
    expected = GridEncoder(model, tiny_tokenizer, Grid.parse("2,6x32"), max_length=48).encode(texts).layers
    plain = fit_exits(model, tiny_tokenizer, texts, layers=[2], max_length=48)

    def keep(some, pooled):
        assert sorted(pooled) == [0, 2, 6]  # layer 0 is the static table
        found.update(zip(some, zip(pooled[2], pooled[6], strict=True), strict=True))

    assert fit_exits(model, tiny_tokenizer, texts, layers=[2], max_length=48, on_states=keep) == plain
    for row, text in enumerate(texts):
        torch.testing.assert_close(found[text][0], expected[2][row], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found[text][1], expected[6][row], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_quickstart_runs_from_end_to_end(minilm, tmp_path):
    def run(*arguments):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "scripts.quickstart", "--output_dir", str(tmp_path), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    for arguments, searches in ((["--fast"], 3), (["--steps", "2"], 5)):
        printed = run(*arguments)
        assert "0 layers x 384 dims" in printed and "2 layers x 384 dims" in printed
        results = json.loads((tmp_path / "results.json").read_text())
        assert len(results["granularities"]) == 16 and results["latency"]["quantile"] < 0.5
        other = "pip install 'm3bert[onnx]'" if missing_packages() else "| layer | torch | ONNX float32 | ONNX int8 |"
        assert other in printed
        assert sum(isinstance(its, dict) for its in results["granularities"]["2x64"].values()) == searches
        assert (tmp_path / "recall.png").stat().st_size > 10_000
        assert "textwrap" in run("--query", "wrap a paragraph of text to a given width")
    fitted = results["granularities"]["2x64"]["exits"]["recall@10"]
    assert fitted > 2 * results["granularities"]["2x64"]["untouched"]["recall@10"]
