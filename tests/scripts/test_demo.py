"""The page: what it shows equals naive searches. A Space: a folder that runs alone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from m3bert.commands import demo
from m3bert.commands.encoder import EncoderArguments
from m3bert.encode.quantizer import write_quantizer
from m3bert.evaluation import GridEncoder
from m3bert.modeling import M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers import Granularity, Grid
from tests.modeling_m3bert.static_models import give_table


pytest.importorskip("sentence_transformers", reason="vectors in 8 bits or 1 need sentence-transformers")
GRID = Grid.parse("2,4,6x8,12,32")
QUERY = "read the list"


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, GRID)


@pytest.fixture(params=["exits", "static"])
def with_exits(tiny_model, tiny_tokenizer, request) -> GridEncoder:
    """An encoder with a table and exits at layers 2 and 4, which may read the table; documents are at layer 6."""
    if request.param == "static":
        give_table(tiny_model)
    else:
        exits = {layer: (torch.randn(32, 32) / 6, torch.randn(32) / 6) for layer in (2, 4)}
        tiny_model.set_depths(exits=exits, table=torch.randn(99, 32))
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("6x8,12,32"))


def naive_scores(query: torch.Tensor, vectors: torch.Tensor, code: str) -> torch.Tensor:
    if code == "binary":
        return ((query > 0) == (vectors > 0)).float().mean(dim=1) * 2 - 1
    if code == "int8":
        low = vectors.amin(dim=0)
        step = (vectors.amax(dim=0) - low) / 255
        vectors = low + (((vectors - low) / step).floor() + 0.5) * step
    return vectors @ query


@pytest.mark.parametrize("code", ["float32", "int8", "binary"])
def test_both_sides_are_what_a_naive_search_finds(encoder, sentences, code):
    texts = sentences[:16]
    sides = demo.answer(encoder, demo.embed(encoder, texts), QUERY, Granularity(2, 12, code), 2)
    for side, g in zip(sides, (Granularity(2, 12), Granularity(6, 32)), strict=True):
        query, vectors = (encoder.encode(each).at(g, normalize=True) for each in ([QUERY], texts))
        scores = naive_scores(query[0], vectors, code if side is sides[0] else "float32")
        assert side.scores == pytest.approx(scores.sort(descending=True).values[:5].tolist(), abs=2e-3)
        assert side.scores == pytest.approx(scores[side.rows].tolist(), abs=2e-3) and len({*side.rows}) == 5
    assert sides[1].index_bytes == 16 * 32 * 4


@pytest.mark.parametrize("query_layer", [0, 2, 6])
def test_queries_of_every_exit_search_documents_of_the_last_layer(with_exits, sentences, query_layer):
    assert demo.query_layers(with_exits) == [0, 2, 4, 6]
    corpus, g = demo.embed(with_exits, sentences[:9]), Granularity(6, 12)
    found = demo.search(with_exits, corpus, QUERY, g, query_layer)
    reader = replace(with_exits, grid=Grid((Granularity(query_layer, 12),)))
    query = reader.encode([QUERY]).at(Granularity(query_layer, 12), normalize=True)[0]
    scores = with_exits.encode(sentences[:9], role="document").at(g, normalize=True) @ query
    assert found.scores == pytest.approx(scores.sort(descending=True).values[:5].tolist(), abs=2e-3)


def test_a_model_is_loaded_with_exits_and_quantizer(with_exits, tiny_tokenizer, tmp_path, sentences):
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=32, layers=[6])).eval()
    quantizer.initialize(torch.randn(300, 32))
    with_exits.model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    write_quantizer(tmp_path, quantizer)
    loaded = demo.load(EncoderArguments(model_name_or_path=str(tmp_path), grid="2x8,12"))
    assert str(loaded.grid) == "6x8,12,32"
    found = demo.search(loaded, demo.embed(loaded, sentences[:9]), QUERY, Granularity(6, 12, "qama-2"), 6)
    codes = [quantizer.encode(loaded.encode(each).at(loaded.grid.full), "qama-2", 12) for each in ([QUERY], sentences)]
    cosines = 2 * quantizer.hamming(codes[0], codes[1][:9])[0] - 1
    assert found.scores == pytest.approx(cosines.sort(descending=True).values[:5].tolist(), abs=2e-3)
    assert found.index_bytes == 9 * 5  # 12 dims of 3 bits in whole bytes


def test_the_page_compares_the_library_or_texts_of_its_own(encoder, sentences):
    pytest.importorskip("gradio", reason="the page needs gradio")
    page = demo.build_demo(encoder, demo.embed(encoder, sentences[:9]))
    (compare,) = {block.fn for block in page.fns.values() if block.fn is not None}
    for texts, known in (
        ("", sentences[:9]),
        ("open a file\n\n open a file \nread a list", ["open a file", "read a list"]),
    ):
        summary, chosen, full = compare(QUERY, texts, 2, 12, "int8")
        assert "documents that the full size finds" in summary
        assert chosen.label.startswith("Chosen: 2 layers, 12 dims, int8 (8 bits)")
        assert full.label.startswith("Full size: 6 layers, 32 dims, float32 (32 bits)")
        assert {row[2] for row in chosen.value["data"]} <= {*known} and len(chosen.value["data"]) == min(5, len(known))


@pytest.mark.slow
def test_a_space_runs_from_its_folder(tmp_path):
    pytest.importorskip("gradio", reason="the page needs gradio")
    folder = tmp_path / "space"
    demo.main(["--model_name_or_path", "user/tiny", "--query_prompt", "find ", "--space", str(folder)])
    assert "models: [user/tiny]" in (folder / "README.md").read_text()
    assert "--query_prompt=find " in (folder / "app.py").read_text()
    required = (folder / "requirements.txt").read_text()
    assert {"torch", "gradio", "faiss-cpu", "scikit-learn"} <= {line.split(">")[0] for line in required.splitlines()}
    code = "import m3bert; print(m3bert.__file__); import app"
    environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.startswith(str(folder)) and "user/tiny" in done.stderr, done.stderr
