"""The whole quickstart in miniature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hub_cards.onnx_export import missing_packages
from modeling_m3bert import M3BertModel
from scripts import quickstart, quickstart_report
from tests.conftest import tiny_config
from trainers import Granularity, Grid, fit_exits
from trainers.data.stdlib_docs import Pair
from trainers.evaluation import Latency


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

    def embed(texts):
        return quickstart.embed(model, tiny_tokenizer, texts, small_grid.layers, 48, "test")

    untouched = embed(quickstart.sides_of(pairs))
    embeddings = quickstart.add_exits(model, tiny_tokenizer, pairs)
    vectors = torch.stack([embeddings[text] for text in quickstart.documents_of(pairs)])
    assert model.config.exit_layers == [0, 2, 4, 6] and model.config.exit_fit["basis"] == "principal"
    fitted, anew = quickstart.apply_exits(model, untouched), embed(quickstart.sides_of(pairs))
    for layer in small_grid.layers:
        torch.testing.assert_close(fitted[layer], anew[layer], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(vectors, embed(quickstart.documents_of(pairs))[6], atol=1e-5, rtol=1e-4)

    quickstart.write_index(pairs, vectors, tmp_path)
    index = load_file(tmp_path / "index.safetensors")
    assert list(index) == ["layer_6"] and torch.equal(index["layer_6"], vectors)

    teacher = quickstart.teacher_of(embeddings, tmp_path / "training" / "before.npy")
    assert torch.equal(teacher.of([pairs[3].body]), embeddings[pairs[3].body][None])


def test_a_fit_hands_on_the_states_of_all_its_texts(tiny_tokenizer, pairs):
    model, found = M3BertModel(tiny_config(max_position_embeddings=64)).eval(), {}
    texts = quickstart.sides_of(pairs)
    expected = quickstart.embed(model, tiny_tokenizer, texts, [2, 6], 48, "test")
    plain = fit_exits(model, tiny_tokenizer, texts, layers=[2])

    def keep(some, pooled):
        assert sorted(pooled) == [2, 6]
        found.update(zip(some, zip(pooled[2], pooled[6], strict=True), strict=True))

    assert fit_exits(model, tiny_tokenizer, texts, layers=[2], on_states=keep) == plain
    for row, text in enumerate(texts):
        torch.testing.assert_close(found[text][0], expected[2][row], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found[text][1], expected[6][row], atol=1e-5, rtol=1e-4)


def test_documents_are_read_at_the_layer_that_is_asked(small_grid):
    """Queries at layer 0 point away from the documents of their own layer, and at those of layer 6."""
    queries, documents = torch.eye(32), torch.eye(32)
    states = {layer: torch.cat([queries, documents]) for layer in small_grid.layers}
    states[0] = torch.cat([queries, documents.flip(0)])
    scores = quickstart.measure(states, "exits", asymmetric=True)
    assert list(scores) == ["exits", "exits_asymmetric"]
    at = Granularity(0, 32)
    assert scores["exits"][at]["recall@1"] == 0 and scores["exits_asymmetric"][at]["recall@1"] == 1
    assert scores["exits"][Granularity(6, 32)] == scores["exits_asymmetric"][Granularity(6, 32)]
    assert list(quickstart.measure(states, "untouched", asymmetric=False)) == ["untouched"]


def test_the_table(small_grid):
    one = {"recall@10": 0.5, "mrr@10": 0.25}
    scores = {name: dict.fromkeys(small_grid, one) for name in ("untouched", "exits", "exits_asymmetric")}
    milliseconds = {str(layer): 1.0 for layer in small_grid.layers}
    latency = Latency(
        encode_ms=milliseconds,
        search_ms={"8": 0.5, "32": 0.5},
        rerank_ms={},
        documents=9,
        encoder="m3bert",
        threads=1,
        engine="faiss",
    )
    lines = quickstart_report.report(small_grid, scores, latency, {"recall@10": 1.0, "mrr@10": 0.125}).splitlines()
    assert lines[0].startswith("| granularity | converted | exits | exits, documents at layer 6 |")
    assert lines[2] == "| 0x8 | 50.0 / 25.0 | 50.0 / 25.0 | 50.0 / 25.0 | 1.5 | 32 |"
    assert lines[-1] == "| TF-IDF | 100.0 / 12.5 | 100.0 / 12.5 | 100.0 / 12.5 |  |  |"
    assert len({line.count("|") for line in lines}) == 1


def test_times_are_explained_and_engines_shown_where_they_were_measured(small_grid, monkeypatch):
    latency = Latency({"0": 0.5, "2": 1.0, "4": 2.0, "6": 3.0}, {"8": 0.5}, {}, 9, "m3bert", 2, quantile=0.1)
    monkeypatch.setattr(quickstart_report, "missing_packages", lambda: ["onnxruntime"])
    text = quickstart_report.latency_report(small_grid, latency)
    assert "9 documents (threads: 2). Each time is the 10th percentile" in text
    assert text.endswith("which needs onnxruntime: pip install 'm3bert[onnx]'.")
    measured = replace(latency, engine_ms={"ONNX float32": {"6": 1.5}, "ONNX int8": {"6": 0.75}})
    text = quickstart_report.latency_report(small_grid, measured)
    assert text.endswith("| 6 | 3.00 | 1.50 | 0.75 |") and "pip install" not in text


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
        assert len(set(results["granularities"]["2x64"]) & set(quickstart_report.SEARCHES)) == searches
        assert (tmp_path / "recall.png").stat().st_size > 10_000
        assert "textwrap" in run("--query", "wrap a paragraph of text to a given width")
    fitted = results["granularities"]["2x64"]["exits"]["recall@10"]
    assert fitted > 2 * results["granularities"]["2x64"]["untouched"]["recall@10"]
