"""The page: what it shows equals direct searches, also in a browser that sees only this machine."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from modeling_m3bert import M3BertModel, M3BertQuantizer, M3BertQuantizerConfig
from scripts import demo, quickstart
from scripts.demo import Corpus, DemoArguments, answer, kept_corpus, load, own_corpus
from scripts.encoder import EncoderArguments
from tests.conftest import tiny_config
from tests.modeling_m3bert.static_models import give_table
from trainers import Granularity, Grid
from trainers.data.stdlib_docs import Pair
from trainers.evaluation import GridEncoder
from trainers.evaluation.precision import Setting
from trainers.hub.quantizer import write_quantizer


pytest.importorskip("sentence_transformers", reason="vectors in 8 bits or 1 need sentence-transformers")
GRID = Grid.parse("2,4,6x8,12,32")
QUERY = "read the list"


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, GRID)


@pytest.fixture
def corpus(encoder, sentences) -> Corpus:
    return own_corpus(encoder, "\n".join(sentences[:16]))


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def side(html: str, name: str) -> str:
    return re.search(rf'<section class="{name}">.*?</section>', html, re.DOTALL)[0]


def hits(section: str) -> list[tuple[float, str]]:
    """Score and name of each document."""
    found = re.findall(r'<span class="score">(.*?)</span><span><b>(.*?)</b>', section)
    return [(float(score), text_of(name)) for score, name in found]


def naive_scores(encoder: GridEncoder, query: str, texts: list[str], setting: Setting) -> list[float]:
    """Every document alone, by the numbers of its embedding."""
    g = setting.granularity
    query_vector = encoder.encode([query]).at(g.size, normalize=True)[0]
    vectors = torch.cat([encoder.encode([text]).at(g.size, normalize=True) for text in texts])
    if g.code == "binary":
        return [float(((query_vector > 0) == (vector > 0)).float().mean() * 2 - 1) for vector in vectors]
    if g.code == "int8":
        low = vectors.amin(dim=0)
        step = (vectors.amax(dim=0) - low) / 255
        vectors = low + (((vectors - low) / step).floor() + 0.5) * step
    return (vectors @ query_vector).tolist()


@pytest.mark.parametrize("code", ["float32", "int8", "binary"])
def test_both_sides_show_what_a_naive_search_finds(encoder, corpus, code):
    setting, full = Setting(Granularity(2, 12, code)), Setting(Granularity(6, 32))
    html = answer(encoder, corpus, f"  {QUERY} ", setting)
    names: dict[str, list[str]] = {}
    for name, expected in (("chosen", setting), ("full", full)):
        shown = hits(side(html, name))
        scores = naive_scores(encoder, QUERY, corpus.texts, expected)
        best = sorted(scores, reverse=True)[:5]
        names[name] = [shown_name for _, shown_name in shown]
        assert [score for score, _ in shown] == pytest.approx(best, abs=2e-3)
        own = [scores[corpus.names.index(shown_name)] for shown_name in names[name]]
        assert own == pytest.approx(best, abs=2e-3) and len(set(names[name])) == 5
    shared = set(names["chosen"]) & set(names["full"])
    assert f"Finds {len(shared)} of the 5 documents" in text_of(html)
    assert len(re.findall('<li class="shared">', html)) == 2 * len(shared)


def test_lines_count_once_and_keep_their_numbers(encoder):
    found = own_corpus(encoder, "\nopen a file\n\n  open a file\nread a list\nopen a file")
    assert found.texts == ["open a file", "read a list"] and found.names == ["line 2", "line 5"]
    assert found.notes == ["Repeated lines, left out: 2."]


def test_long_texts_are_cut_and_counted(encoder):
    found = own_corpus(encoder, f"{'read ' * 50_000}\nopen a file")
    assert found.notes == ["1 of 2 documents were truncated to 48 tokens."]
    html = answer(encoder, found, "open " * 60, Setting(Granularity(4, 12, "int8")))
    assert "The query was truncated to 48 tokens." in html
    assert len(html) < 5000, "a document of a quarter million letters is shown by its beginning"


def test_texts_are_shown_as_they_are_not_run(encoder):
    found = own_corpus(encoder, "<script>alert(1)</script> & a list")
    html = answer(encoder, found, QUERY, Setting(Granularity(4, 12, "int8")))
    assert "<script>" not in html and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; a list" in html


def test_a_run_of_the_quickstart_is_read(sentences, tmp_path, monkeypatch):
    full = Grid.parse("6x8,12,32")
    monkeypatch.setattr(quickstart, "FULL", full.full)
    pairs = [Pair("m", f"m.{row}", text, sentences[-row], True) for row, text in enumerate(sentences[:7])]
    vectors = torch.randn(len(pairs), 32)
    quickstart.write_index(pairs, vectors, tmp_path)
    found = kept_corpus(tmp_path, full)
    assert found.names == [pair.name for pair in pairs] and found.texts == [pair.summary for pair in pairs]
    assert torch.equal(found.embeddings.at(full.full), vectors)
    with pytest.raises(ValueError, match="has no vectors at 2x8, 6x64"):
        kept_corpus(tmp_path, Grid.parse("2x8,6x8,6x64"))


# --- A model with exits -----------------------------------------------------------------------------------------


@pytest.fixture
def with_exits(tiny_model, tiny_tokenizer, request) -> GridEncoder:
    """An encoder with a table and exits at layers 2 and 4, which may read the table; documents are at layer 6."""
    if getattr(request, "param", None) == "static":
        give_table(tiny_model)
    else:
        exits = {layer: (torch.randn(32, 32) / 6, torch.randn(32) / 6) for layer in (2, 4)}
        tiny_model.set_depths(exits=exits, table=torch.randn(99, 32))
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("6x8,12,32"))


@pytest.mark.parametrize("with_exits", ["exits", "static"], indirect=True)
@pytest.mark.parametrize("query_layer", [0, 2, 6])
@pytest.mark.parametrize("full_query_layer", [0, 6])
def test_queries_at_any_exit_search_one_index(with_exits, sentences, query_layer, full_query_layer):
    indexed = own_corpus(with_exits, "\n".join(sentences[:16]))
    assert list(indexed.embeddings.layers) == [6], "documents are embedded at one layer"
    html = answer(with_exits, indexed, QUERY, Setting(Granularity(6, 12), query_layer), full_query_layer)
    for name, layer, dim in (("chosen", query_layer, 12), ("full", full_query_layer, 32)):
        g = Granularity(layer, dim)
        query = GridEncoder(with_exits.model, with_exits.tokenizer, Grid((g,))).encode([QUERY]).at(g, normalize=True)
        documents = with_exits.encode(indexed.texts, role="document").at(Granularity(6, dim), normalize=True)
        scores = (documents @ query[0]).tolist()
        section = side(html, name)
        assert [score for score, _ in hits(section)] == pytest.approx(sorted(scores, reverse=True)[:5], abs=2e-3)
        assert f"query {layer} of 6 layers, {dim} dims, float32 (32 bits)" in text_of(section)
    assert "documents that the full index finds" in text_of(html)


def test_only_layers_with_an_exit_are_offered_to_queries(with_exits, encoder, tiny_tokenizer):
    assert demo.query_layers(with_exits) == [0, 2, 4, 6]
    assert demo.query_layers(GridEncoder(M3BertModel(tiny_config()), tiny_tokenizer, GRID)) == []
    alone = M3BertModel(tiny_config())
    alone.set_depths(exits={6: (torch.eye(32), torch.zeros(32))})
    assert demo.query_layers(GridEncoder(alone, tiny_tokenizer, GRID)) == [], "a rotation of the last layer only"


def test_a_model_with_exits_is_loaded_with_one_index(tmp_path, with_exits, tiny_tokenizer, monkeypatch):
    with_exits.model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(demo, "library_corpus", lambda encoder: str(encoder.grid))
    found, indexed = load(EncoderArguments(model_name_or_path=str(tmp_path)))
    assert indexed == str(found.grid) == "6x8,16,32" and demo.query_layers(found) == [0, 2, 4, 6]


# --- A model with a quantizer -----------------------------------------------------------------------------------


@pytest.fixture
def with_quantizer(encoder) -> GridEncoder:
    """The encoder with a quantizer for its last layer."""
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=32, layers=[6])).eval()
    quantizer.initialize(torch.randn(300, 32))
    return replace(encoder, quantizer=quantizer)


def test_codes_of_a_quantizer_find_what_its_hamming_distances_find(with_quantizer, corpus):
    quantizer = with_quantizer.quantizer
    html = answer(with_quantizer, corpus, QUERY, Setting(Granularity(6, 12, "qama-2")))
    vectors = with_quantizer.encode(corpus.texts, role="document").at(GRID.full)
    documents = quantizer.encode(vectors, "qama-2", 12)
    query = quantizer.encode(with_quantizer.encode([QUERY]).at(GRID.full), "qama-2", 12)
    cosines = (2 * quantizer.hamming(query, documents)[0] - 1).tolist()  # of the bits as 1 and -1
    shown_scores = [score for score, _ in hits(side(html, "chosen"))]
    assert shown_scores == pytest.approx(sorted(cosines, reverse=True)[:5], abs=2e-3)
    said = text_of(html)
    assert "6 layers, 12 dims, qama-2 (3 bits)" in said and "vector 5 bytes" in said
    assert "12 dims do not fill whole bytes: 4 bits per vector are unused." in said  # 36 bits in 5 bytes


def test_a_model_is_loaded_with_its_quantizer(tmp_path, with_quantizer, tiny_tokenizer, monkeypatch, corpus):
    with_quantizer.model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    write_quantizer(tmp_path, with_quantizer.quantizer)
    monkeypatch.setattr(demo, "library_corpus", lambda encoder: corpus)
    found, _ = load(EncoderArguments(model_name_or_path=str(tmp_path)))
    assert found.quantizer.fingerprint == with_quantizer.quantizer.fingerprint


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


CHROMIUM_OPTIONS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
).split()


@pytest.fixture
def page(encoder, corpus) -> Iterator[object]:
    """The page in a browser."""
    with opened_page(encoder, corpus) as opened:
        yield opened


@contextmanager
def opened_page(encoder: GridEncoder, corpus: Corpus) -> Iterator[Any]:
    """A page in a browser, of which every request to elsewhere and every complaint is kept and is an error."""
    pytest.importorskip("gradio", reason="the page needs gradio")
    playwright = pytest.importorskip("playwright.sync_api", reason="a browser is driven by playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium here")
    blocks = demo.build_demo(encoder, corpus)
    options = DemoArguments(port=free_port())
    demo.serve(blocks, options, prevent_thread_lock=True, quiet=True)
    complaints: list[str] = []

    def allow_this_machine(route):
        if urlsplit(route.request.url).hostname == options.host:
            route.continue_()
        else:
            complaints.append(f"request to {route.request.url}")
            route.abort()

    try:
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=chromium, args=CHROMIUM_OPTIONS)
            context = browser.new_context(viewport={"width": 400, "height": 900})
            context.route("**/*", allow_this_machine)
            opened = context.new_page()
            opened.on("console", lambda said: said.type == "error" and complaints.append(said.text))
            opened.on("pageerror", lambda error: complaints.append(str(error)))
            opened.goto(f"http://{options.host}:{options.port}/")
            yield opened
            browser.close()
    finally:
        blocks.close()
    assert not complaints


def shown(page, *titles: str) -> str:
    """The result, once it has these titles."""
    for title in titles:
        page.locator("#result h3", has_text=title).wait_for()
    return page.locator("#result").inner_html()


@pytest.mark.slow
def test_a_reader_compares_sizes_in_a_browser(page, encoder, sentences):
    full = "Full size: 6 layers, 32 dims, float32 (32 bits)"
    shown(page, "Chosen: 4 layers, 12 dims, int8 (8 bits)", full)  # what it opens with
    page.get_by_label("My own texts").check()
    page.locator("#texts textarea").fill("\n".join(sentences[:9]))
    page.locator("#query textarea, #query input").fill(QUERY)
    page.locator("#layer input[type=range]").fill("1")
    page.locator("#dim input[type=range]").fill("3")
    page.get_by_text("Layers: 2 of 6").wait_for()
    page.get_by_text("Dims: 32 of 32").wait_for()
    for code, label in (("float32", "float32 (32 bits)"), ("int4", "int4 (4 bits)"), ("binary", "binary (1 bit)")):
        page.locator("#code").get_by_label(label, exact=True).check()
        page.locator("#compare").click()
        html = shown(page, f"Chosen: 2 layers, 32 dims, {label}", full)
        expected = answer(
            encoder, own_corpus(encoder, "\n".join(sentences[:9])), QUERY, Setting(Granularity(2, 32, code))
        )
        for name in ("chosen", "full"):
            assert hits(side(html, name)) == hits(side(expected, name))
            assert re.findall("<dd>(.*?)</dd>", html)[2:4] == re.findall("<dd>(.*?)</dd>", expected)[2:4]
    assert page.evaluate("document.documentElement.scrollWidth") <= 400, "nothing is wider than a telephone"


@pytest.mark.slow
def test_a_document_runs_nothing_in_a_browser_and_no_file_of_the_machine_is_served(page):
    shown(page, "Chosen", "Full size")
    hostile = ["<script>document.title = 'ran'</script>", "<img src=x onerror=\"document.title = 'ran'\">"]
    page.get_by_label("My own texts").check()
    page.locator("#texts textarea").fill("\n".join(hostile))
    page.locator("#query textarea, #query input").fill(hostile[0])
    page.locator("#compare").click()
    page.locator("#result", has_text="line 2").wait_for()
    assert page.locator("#result").inner_text().count("document.title = 'ran'") == 4
    assert page.locator("#result script, #result img").count() == 0 and page.title() != "ran"
    for file in (__file__, "/etc/passwd", "../../../etc/passwd"):
        assert page.request.get(f"{page.url}gradio_api/file={file}").status in (403, 404)


@pytest.mark.slow
def test_a_reader_changes_the_depth_of_the_query_in_a_browser(with_exits, sentences):
    indexed = own_corpus(with_exits, "\n".join(sentences[:9]))
    with opened_page(with_exits, indexed) as page:
        shown(
            page,
            "Chosen: query 2 of 6 layers, 12 dims, int8 (8 bits)",
            "Full index: query 6 of 6 layers, 32 dims, float32 (32 bits)",
        )
        page.locator("#query textarea, #query input").fill(QUERY)
        page.locator("#layer input[type=range]").fill("1")
        page.get_by_text("Query layers, chosen: 0 of 6").wait_for()
        page.locator("#full_layer input[type=range]").fill("3")
        page.get_by_text("Query layers, full index: 4 of 6").wait_for()
        page.locator("#compare").click()
        html = shown(page, "Chosen: query 0 of 6", "Full index: query 4 of 6")
        expected = answer(with_exits, indexed, QUERY, Setting(Granularity(6, 12, "int8"), 0), 4)
        for name in ("chosen", "full"):
            assert hits(side(html, name)) == hits(side(expected, name))
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_single_size_can_be_looked_at(tiny_model, tiny_tokenizer):
    gradio = pytest.importorskip("gradio", reason="the page needs gradio")
    alone = GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("6x32"))
    blocks = demo.build_demo(alone, own_corpus(alone, "open a file"))
    sliders = [block for block in blocks.blocks.values() if isinstance(block, gradio.Slider)]
    assert [(slider.label, slider.interactive) for slider in sliders] == [
        ("Layers: 6 of 6", False),
        ("Dims: 32 of 32", False),
    ]
    assert not blocks.analytics_enabled
