"""The page: what it shows equals an exact search. A Space: a folder that runs alone."""

import json
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
from tests.browser import browser, free_port
from tests.conftest import save
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


def found_at(encoder: GridEncoder, texts: list[str], g: Granularity) -> demo.Found:
    query = replace(encoder, grid=Grid.product([g.layer], [32])).encode([QUERY])
    return demo.search(encoder, demo.embed(encoder, texts), query, g, 1.5)


def assert_best(rows: list[int], scores: torch.Tensor) -> None:
    """The rows of the five best scores, best first; equals in any order."""
    assert scores[rows].tolist() == pytest.approx(scores.sort(descending=True).values[:5].tolist(), abs=2e-3)
    assert len({*rows}) == 5


@pytest.mark.parametrize(("code", "size"), [("float32", 48), ("int8", 12), ("binary", 2)])
def test_a_search_has_the_bytes_of_its_precision(encoder, sentences, code, size):
    found = found_at(encoder, sentences[:16], Granularity(2, 12, code))
    assert len({*found.rows}) == 5
    assert found.index_bytes == 16 * size + (2 * 4 * 12 if code == "int8" else 0) and found.ms > 1.5


@pytest.mark.parametrize("query_layer", [0, 2, 6])
def test_queries_of_every_exit_search_documents_of_the_last_layer(with_exits, sentences, query_layer):
    assert demo.query_layers(with_exits) == [0, 2, 4, 6]
    found, g = found_at(with_exits, sentences[:9], Granularity(query_layer, 12)), Granularity(query_layer, 12)
    query = replace(with_exits, grid=Grid((g,))).encode([QUERY]).at(g, normalize=True)[0]
    vectors = with_exits.encode(sentences[:9], role="document").at(Granularity(6, 12), normalize=True)
    assert_best(found.rows, vectors @ query)


def test_a_model_is_loaded_with_exits_and_quantizer(with_exits, tiny_tokenizer, tmp_path, sentences):
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=32, layers=[6])).eval()
    quantizer.initialize(torch.randn(300, 32))
    save(tmp_path, with_exits.model, tiny_tokenizer)
    write_quantizer(tmp_path, quantizer)
    loaded = demo.load(EncoderArguments(model_name_or_path=str(tmp_path), grid="2x8,12"))
    assert str(loaded.grid) == "6x8,12,32"
    found = found_at(loaded, sentences[:9], Granularity(6, 12, "qama-2"))
    codes = [quantizer.encode(loaded.encode(each).at(loaded.grid.full), "qama-2", 12) for each in ([QUERY], sentences)]
    assert_best(found.rows, 2 * quantizer.hamming(codes[0], codes[1][:9])[0] - 1)
    assert found.index_bytes == 9 * 5  # 12 dims of 3 bits in whole bytes


def test_the_page_compares_the_library_or_texts_of_its_own(encoder, sentences):
    pytest.importorskip("gradio", reason="the page needs gradio")
    page = demo.build_demo(encoder, demo.embed(encoder, sentences[:9]))
    compare = next(block.fn for block in page.fns.values() if getattr(block.fn, "__name__", "") == "compare")
    for texts, count in (("", 5), ("open a file\n\n open a file \nread <b>a list", 2)):
        summary, lists, depths, _ = compare(QUERY, texts, 2, 12, "int8")
        assert f"of the {count}</b> documents that the full model finds" in summary
        assert "<h3>2 layers, 12 dims, int8</h3>" in lists and "<h3>Full model, 32 dims, float32</h3>" in lists
        assert lists.count("<li") == 2 * count
        header, _, chosen, other, full = depths.splitlines()
        assert chosen.startswith("| **2 layers** |") and other.startswith("| 4 layers |")
        assert full.startswith("| all 6 layers |") and full.endswith(f" of {count} |")
        assert ("read &lt;b&gt;a list" in lists) == bool(texts)
    assert "5 of the 5" in compare(QUERY, "", 6, 32, "float32")[0]


@pytest.mark.parametrize(("layer", "code", "line"), [(2, "int8", ', precision="int8")'), (6, "float32", "(texts)")])
def test_the_snippet_loads_the_chosen_size(with_exits, tiny_tokenizer, tmp_path, sentences, layer, code, line):
    save(tmp_path, with_exits.model, tiny_tokenizer)
    loaded = demo.load(EncoderArguments(model_name_or_path=str(tmp_path)))
    python = demo.snippet(loaded, layer, 12, code)
    assert line in python
    names = {"texts": sentences[:9]}
    exec(python, names)
    reader = replace(loaded, grid=Grid.product([layer], [12]))
    ours = reader.encode([demo.PRESETS[0]]).at(Granularity(layer, 12), normalize=True)[0]
    assert torch.nn.functional.cosine_similarity(torch.from_numpy(names["vector"]), ours, dim=0) > 0.9999
    assert names["index"].shape == (9, 12) and names["index"].dtype == code


@pytest.fixture
def served(with_exits, tiny_tokenizer, tmp_path):
    """Address of `m3bert demo` in a process of its own."""
    pytest.importorskip("gradio", reason="the page needs gradio")
    save(tmp_path / "model", with_exits.model, tiny_tokenizer)
    environment = {**os.environ, "GRADIO_SERVER_PORT": str(free_port()), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "m3bert", "demo", "--model_name_or_path", str(tmp_path / "model")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed = next(line for line in process.stdout if "http" in line)
            assert "share=" not in printed and "GRADIO_SHARE=true" in printed
            yield printed.split()[4]
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (400, 850)])
def test_the_page_in_a_browser(served, tmp_path, width, height):
    headline = "return document.querySelector('.headline h2')?.innerText"
    with browser(tmp_path) as page:
        page.open(served, width, height)
        assert page.wait_for(headline).startswith("Look-up: ")
        first = page.run("return document.querySelector('.found').innerText")
        page.run(f"[...document.querySelectorAll('button')].find(b => b.innerText == '{demo.PRESETS[1]}').click()")
        page.wait_for(f"return document.querySelector('.found').innerText != {json.dumps(first)}")
        page.run("[...document.querySelectorAll('label')].find(l => l.innerText == 'all 6 layers').click()")
        page.wait_for(f"{headline}.startsWith('All 6 layers: ')")
        page.wait_for("return !document.querySelector('.cm-content').innerText.includes('output_layer')")
        assert page.run("return document.documentElement.scrollWidth <= innerWidth")
        assert page.errors() == []
        page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


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
