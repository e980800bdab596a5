"""
A page to try an elastic encoder: what a depth, number of dims and precision finds and costs, beside the full size. For
a model with exits, documents are embedded once, with all layers; the depth is the question's.

    m3bert demo                                                   # the encoder of the quickstart
    m3bert demo --model_name_or_path user/model                   # any encoder
    m3bert demo --model_name_or_path user/model --space runs/space     # write a folder to publish as a Space

Searches 800 documents of Python's standard library, or texts entered on the page. Needs the extra `demo`. Address and
port are gradio's: GRADIO_SERVER_NAME, GRADIO_SERVER_PORT, GRADIO_SHARE.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from html import escape
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id
from packaging.requirements import Requirement

from ..data.stdlib_docs import split_by_module, stdlib_pairs
from ..encode.coding import PackedIndex
from ..encode.encoder import default_grid
from ..encode.granularity import Granularity, Grid, is_elastic
from ..encode.precisions import FLOAT, PRECISIONS
from ..encode.states import unwrap_encoder
from ..evaluation import GridEmbeddings, GridEncoder
from ..evaluation.latency import milliseconds_in_turn
from ..hub_cards.tables import markdown
from ..modeling.configuration_elastic import Elasticity
from ..utils.extras import require_extra, require_sentence_transformers
from ..utils.help_texts import option
from .command import parse_options
from .encoder import EncoderArguments, load_encoder


QUICKSTART = Path("runs/quickstart/model")
# Questions at which the quickstart's look-up finds at least 4 of the 5 documents that all layers find.
PRESETS = ("unpack a zip archive", "parse an XML document", "sort a list", "copy a file", "pick a random number")
SHOWN = 5  # documents on each side
ROUNDS = 40  # of a measurement
ABOUT_EXITS = "Documents are embedded once, by all layers. Fewer layers, or a table look-up, read the question."
STYLE = """
.headline h2 {font-size: 1.5rem; line-height: 1.25; margin: 0} .headline b, .both b::after {color: var(--color-accent)}
.headline p {color: var(--body-text-color-subdued)} .found ol {list-style: none; margin: 0; padding: 0}
.found {display: grid; grid-template-columns: repeat(auto-fit, minmax(16em, 1fr)); gap: 0 2em; overflow-wrap: anywhere}
.found li {border-left: 4px solid var(--border-color-primary); margin: .5rem 0; padding-left: .7rem}
.found .both {border-color: var(--color-accent)} .both b::after {content: " ✓ both"; font-weight: 400}
"""
SPACE_EXTRAS = ("demo", "evaluation", "faiss", "sentence-transformers")
SPACE_CARD = """---
title: One encoder, many sizes
sdk: gradio
sdk_version: {gradio}
app_file: app.py
models: [{model}]
---

Try [{model}](https://huggingface.co/{model}) at every depth, number of dims and precision, side by side with its full
size. Written by `m3bert demo --space`; the folder `m3bert` is a copy of this package.
"""


@dataclass
class DemoArguments:
    """Options of the page."""

    space: str | None = option(None, "Serve no page, but write this new folder to publish as a Space of the Hub.")


@dataclass(frozen=True)
class Corpus:
    """Documents to search, as (title, text), and their embeddings at every granularity."""

    texts: list[tuple[str, str]]
    embeddings: GridEmbeddings


@dataclass(frozen=True)
class Found:
    """Rows of the documents that a query finds, best first; its milliseconds; and the bytes of the index."""

    rows: list[int]
    ms: float
    index_bytes: int


def embed(encoder: GridEncoder, texts: Sequence[str]) -> Corpus:
    return Corpus([("", text[:300]) for text in texts], encoder.encode(texts, role="document").require_finite())


def library(encoder: GridEncoder) -> Corpus:
    """The part of Python's documentation that the quickstart evaluates on, shown as names and summaries."""
    _, pairs = split_by_module(stdlib_pairs())
    embedded = embed(encoder, [f"{pair.summary} {pair.body}" for pair in pairs]).embeddings
    return Corpus([(pair.name, pair.summary) for pair in pairs], embedded)


def query_layers(encoder: GridEncoder) -> list[int]:
    """Layers of a query for documents of the last layer: those with an exit, and the last one. None without exits."""
    last = encoder.grid.layers[-1]
    below = [depth for depth in Elasticity.of(unwrap_encoder(encoder.model).config).aligned if depth < last]
    return [*below, last] if below else []


def search(encoder: GridEncoder, corpus: Corpus, query: GridEmbeddings, g: Granularity, encode_ms: float) -> Found:
    """Search with a query of a granularity, using last-layer documents if exits exist."""
    stored = g.layer if g.layer in encoder.grid.layers else encoder.grid.full.layer
    index = PackedIndex.pack(corpus.embeddings.widest(stored), g.code, g.dim, encoder.quantizer)
    seek = partial(index.search, query.widest(g.layer), SHOWN)
    search_ms = milliseconds_in_turn({"search": seek}, ROUNDS)["search"]
    return Found(seek()[1][0].tolist(), encode_ms + search_ms, index.nbytes)


def in_words(layer: int, last: int) -> str:
    return f"all {last} layers" if layer == last else f"{layer} layer{'s' * (layer > 1)}" if layer else "look-up"


def headline(depth: str, shared: int, chosen: Found, full: Found) -> str:
    """The result in a sentence, then the times and bytes of both sizes."""
    time, size = chosen.ms / full.ms, chosen.index_bytes / full.index_bytes
    return f"""<h2>{depth.capitalize()}: <b>{shared} of the {len(full.rows)}</b> documents that the full model finds,
in <b>{time:.0%}</b> of its time, with <b>{size:.1%}</b> of its bytes</h2><p>{chosen.ms:.1f} ms instead of
{full.ms:.1f} ms to embed one question and search, on this machine; {chosen.index_bytes / 1e3:,.0f} kB instead of
{full.index_bytes / 1e3:,.0f} kB of document vectors</p>"""


def listing(title: str, corpus: Corpus, rows: Sequence[int], shared: set[int]) -> str:
    """Documents in their order; those that both sizes find are marked."""
    line = '<li class="{}"><b>{}</b><div>{}</div></li>'
    items = [line.format("both" * (row in shared), *map(escape, corpus.texts[row])) for row in rows]
    return f"<div><h3>{title}</h3><ol>{''.join(items)}</ol></div>"


def depth_table(points: Mapping[int, tuple[float, int]], chosen: int, count: int) -> str:
    """Every depth, the chosen one in bold: its milliseconds, and the documents that it shares with the full model."""
    rows = []
    for layer, (ms, shared) in points.items():
        row = [in_words(layer, max(points)), f"{ms:.1f}", f"{shared} of {count}"]
        rows.append([f"**{cell}**" for cell in row] if layer == chosen else row)
    return markdown(["This question at every depth", "ms", "documents shared with the full model"], rows)


def snippet(encoder: GridEncoder, layer: int, dim: int, code: str) -> str:
    """Python that loads a size, and stores documents in a precision."""
    config = unwrap_encoder(encoder.model).config
    full = f"name, truncate_dim={dim}" + ", trust_remote_code=True" * is_elastic(config)
    depth = 'model_kwargs={"output_layer"' if is_elastic(config) else 'config_kwargs={"num_hidden_layers"'
    short = full if layer == config.num_hidden_layers else f"{full}, {depth}: {layer}}}"
    stored = {FLOAT: ")", "int8": ', precision="int8")', "binary": ', precision="ubinary")'}
    return f"""from sentence_transformers import SentenceTransformer

name = "{config.name_or_path}"
documents = SentenceTransformer({short if layer in encoder.grid.layers else full})
questions = SentenceTransformer({short})
index = documents.encode_document(texts{stored.get(code, f")  # `m3bert index` stores {code}")}
vector = questions.encode_query("{PRESETS[0]}")"""


def build_demo(encoder: GridEncoder, documents: Corpus) -> Any:
    """The page of an encoder: users choose from its grid, and search documents or their texts."""
    gr = require_extra("gradio", "demo", "The page")
    exits, full = query_layers(encoder), encoder.grid.full
    layers = exits or encoder.grid.layers
    reader = replace(encoder, grid=Grid.product(layers, [full.dim]))
    alone = {layer: replace(encoder, grid=Grid.product([layer], [full.dim])) for layer in layers}
    ms = milliseconds_in_turn({layer: partial(short.encode, PRESETS[:1]) for layer, short in alone.items()}, ROUNDS)
    embed_lines = lru_cache(8)(lambda lines: embed(encoder, lines))

    def compare(query: str, texts: str, layer: int, dim: int, code: str) -> list[str]:
        lines = tuple(dict.fromkeys(line.strip() for line in texts.splitlines() if line.strip()))
        corpus = embed_lines(lines) if lines else documents
        vectors = reader.encode([query])
        whole = search(encoder, corpus, vectors, full, ms[full.layer])
        hits = {each: search(encoder, corpus, vectors, Granularity(each, dim, code), ms[each]) for each in layers}
        shared = {each: {*hit.rows} & {*whole.rows} for each, hit in hits.items()}
        points = {each: (hit.ms, len(shared[each])) for each, hit in hits.items()}
        depth, size = in_words(layer, full.layer), f"{dim} dims, {code}"
        mine = listing(f"{depth.capitalize()}, {size}", corpus, hits[layer].rows, shared[layer])
        theirs = listing(f"Full model, {full.dim} dims, {FLOAT}", corpus, whole.rows, shared[layer])
        summary = headline(depth, len(shared[layer]), hits[layer], whole)
        every = depth_table(points, layer, len(whole.rows))
        return [summary, mine + theirs, every, snippet(encoder, layer, dim, code)]

    with gr.Blocks(title="One encoder, many sizes", analytics_enabled=False) as page:
        gr.Markdown(f"# One encoder, many sizes\n{ABOUT_EXITS if exits else ''}")
        query = gr.Textbox(PRESETS[0], label="Question", container=False, max_length=10_000)
        gr.Examples([*PRESETS], query, label="Questions that the look-up answers well")
        summary = gr.HTML(elem_classes="headline")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                names = [(in_words(each, full.layer), each) for each in layers]
                layer = gr.Radio(names, value=layers[0 if exits else len(layers) // 2], label="Layers of the question")
                dim = gr.Radio(encoder.grid.dims, value=full.dim, label="Dims: the leading numbers of each vector")
                codes = [
                    precision
                    for precision in PRECISIONS.values()
                    if encoder.quantizer is not None or not precision.learned
                ]
                stored = [(f"{code.name}: {code.words}", code.name) for code in codes]
                code = gr.Radio(stored, value="int8", label="Precision of the document vectors")
            with gr.Column(scale=5, min_width=320):
                lists, depths = gr.HTML(elem_classes="found"), gr.Markdown()
        python = gr.Code(language="python", label="Load this size", interactive=False, show_line_numbers=False)
        with gr.Accordion("Search your own texts", open=False):
            texts = gr.Textbox("", label="One per line, in place of Python's documentation", lines=4, max_length=10**5)
            button = gr.Button("Search them")
        triggers = [page.load, query.change, button.click, layer.input, dim.input, code.input]
        shown, controls = [summary, lists, depths, python], [query, texts, layer, dim, code]
        gr.on(triggers, compare, controls, shown, trigger_mode="always_last", show_progress="hidden")
    return page


def load(encoding: EncoderArguments) -> GridEncoder:
    """The encoder that the options name, by default the quickstart's, with the full size in its grid."""
    if encoding.model_name_or_path is None and QUICKSTART.is_dir():
        encoding = replace(encoding, model_name_or_path=str(QUICKSTART))
    encoder = load_encoder(encoding)
    full = default_grid(unwrap_encoder(encoder.model).config, encoder.projection).full
    encoder = replace(encoder, grid=Grid(tuple({*encoder.grid, full})))
    if query_layers(encoder):
        encoder = replace(encoder, grid=Grid.product([full.layer], encoder.grid.dims))  # documents at one layer
    return encoder


def write_space(folder: Path, encoding: EncoderArguments) -> None:
    """Write a complete Space of the Hub to a new folder: app, requirements, card, and a copy of the code."""
    if encoding.model_name_or_path is None:
        raise ValueError("--space needs --model_name_or_path, a model on the Hub.")
    validate_repo_id(encoding.model_name_or_path)
    folder.mkdir(parents=True)
    source, ignore = Path(__file__).parent.parent, shutil.ignore_patterns("__pycache__")
    shutil.copytree(source, folder / "m3bert", ignore=ignore)
    defaults = asdict(EncoderArguments())
    arguments = [f"--{name}={value}" for name, value in asdict(encoding).items() if value != defaults[name]]
    app = f"from m3bert.commands.demo import main\n\n\nmain({arguments!r})\n"
    (folder / "app.py").write_text(app, encoding="utf-8")
    needed = [
        f"{one.name}{one.specifier}\n"
        for one in map(Requirement, requires("m3bert") or [])
        if one.name != "m3bert"
        and (one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in SPACE_EXTRAS))
    ]
    (folder / "requirements.txt").write_text("".join(needed), encoding="utf-8")
    card = SPACE_CARD.format(gradio=version("gradio"), model=encoding.model_name_or_path)
    (folder / "README.md").write_text(card, encoding="utf-8")


def main(arguments: list[str]) -> None:
    encoding, options = parse_options((EncoderArguments, DemoArguments), __doc__, arguments)
    gradio = require_extra("gradio", "demo", "The page")
    require_sentence_transformers("The page")
    if options.space:
        write_space(Path(options.space), encoding)
        print(f"{options.space}: publish it with `hf upload user/name {options.space} --repo-type space`.")
        return
    encoder = load(encoding)
    page = build_demo(encoder, library(encoder))
    page.launch(
        quiet=True,
        prevent_thread_lock=True,
        theme=gradio.themes.Soft(font=("Inter", "system-ui", "sans-serif")),
        css=STYLE,
    )
    print(f"The page is at {page.local_url} (Ctrl+C ends it). GRADIO_SHARE=true gives it a public address.")
    page.block_thread()
