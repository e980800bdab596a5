"""
A page to try an elastic encoder: what a depth, number of dims and precision finds and costs, beside the full size. For
a model with exits, documents are embedded once, with all layers, and the depth is that of the query.

    m3bert demo                                                   # the encoder of the quickstart
    m3bert demo --model_name_or_path user/model                   # any encoder
    m3bert demo --model_name_or_path user/model --space runs/space     # write a folder to publish as a Space

Searches 800 documents of Python's standard library, or texts entered on the page. Needs the extra `demo`. Address and
port are gradio's: GRADIO_SERVER_NAME, GRADIO_SERVER_PORT, GRADIO_SHARE.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.metadata import requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.utils import validate_repo_id
from packaging.requirements import Requirement

from ..encode.codes import CODES, code_of
from ..encode.coding import PackedIndex
from ..encode.encoder import default_grid
from ..encode.extras import require_extra, require_sentence_transformers
from ..encode.states import unwrap_encoder
from ..evaluation import GridEmbeddings, GridEncoder
from ..evaluation.latency import seconds_in_turn
from ..modeling.modeling_elastic import Elasticity
from ..trainers import Granularity, Grid
from ..trainers.data.stdlib_docs import split_by_module, stdlib_pairs
from .command import parse_options
from .encoder import EncoderArguments, load_encoder


if TYPE_CHECKING:
    import gradio

QUICKSTART = Path("runs/quickstart/model")
EXAMPLE = "measure how long a small piece of code takes"
SHOWN = 5  # documents on each side
ROUNDS = 5  # of which the median time counts
INTRODUCTION = """
# One encoder, many sizes
Search with the same query at a depth, number of dims and precision of your choice, and at the full size. The precision
is that of the stored documents; searches are exact. Times are for one query on this machine.
"""
ABOUT_EXITS = "Documents are embedded once, with all layers. Only the query is read at fewer layers."
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
    """Where the page goes."""

    space: str | None = field(
        default=None,
        metadata={"help": "Do not serve the page, but write this new folder to publish as a Space of the Hub."},
    )


@dataclass(frozen=True)
class Corpus:
    """Documents to search, and their embeddings at every granularity."""

    texts: list[str]
    embeddings: GridEmbeddings


@dataclass(frozen=True)
class Found:
    """Result and cost of one query."""

    granularity: Granularity  # of the documents, with their precision
    query_layer: int
    rows: list[int]
    scores: list[float]
    encode_ms: float
    search_ms: float
    index_bytes: int

    def __str__(self) -> str:
        g = self.granularity
        depth = f"{g.layer} layers" if self.query_layer == g.layer else f"query {self.query_layer} of {g.layer} layers"
        return (
            f"{depth}, {g.dim} dims, {with_bits(g.code)}: encode {self.encode_ms:.1f} ms, search "
            f"{self.search_ms:.2f} ms, {self.index_bytes / 1e3:,.1f} kB"
        )


def with_bits(code: str) -> str:
    return f"{code} ({code_of(code).bits:g} bits)"


def embed(encoder: GridEncoder, texts: Sequence[str], shown: Sequence[str] | None = None) -> Corpus:
    """Texts as documents, which are shown as other texts if there are some."""
    return Corpus([*(shown or texts)], encoder.encode(texts, role="document").require_finite())


def library(encoder: GridEncoder) -> Corpus:
    """The part of Python's documentation that the quickstart evaluates on."""
    _, pairs = split_by_module(stdlib_pairs())
    texts = [f"{pair.summary} {pair.body}" for pair in pairs]
    return embed(encoder, texts, [f"{pair.name}: {pair.summary}" for pair in pairs])


def query_layers(encoder: GridEncoder) -> list[int]:
    """The layers of a query to search documents of the last layer: those with an exit, and the last one. None without
    an exit below it."""
    last = encoder.grid.layers[-1]
    below = [depth for depth in Elasticity.of(unwrap_encoder(encoder.model).config).exits if depth < last]
    return [*below, last] if below else []


def search(encoder: GridEncoder, corpus: Corpus, query: str, g: Granularity, query_layer: int) -> Found:
    """Search documents at a granularity with a query that is read up to a layer."""
    reader = replace(encoder, grid=Grid((replace(g, layer=query_layer),)))
    index = PackedIndex.pack(corpus.embeddings.widest(g.layer), g.code, g.dim, encoder.quantizer)
    encoded = reader.encode([query]).widest(query_layer)
    (scores,), (rows,) = index.search(encoded, SHOWN)
    calls = {"encode": lambda: reader.encode([query]), "search": lambda: index.search(encoded, SHOWN)}
    encode, seek = (1000 * seconds for seconds in seconds_in_turn(calls, ROUNDS).values())
    return Found(g, query_layer, rows.tolist(), scores.tolist(), encode, seek, index.nbytes)


def answer(encoder: GridEncoder, corpus: Corpus, query: str, g: Granularity, query_layer: int) -> tuple[Found, Found]:
    """The documents that a query finds at a granularity, and at the full size, which is the last of the encoder's
    grid."""
    full = encoder.grid.full
    return search(encoder, corpus, query, g, query_layer), search(encoder, corpus, query, full, full.layer)


def build_demo(encoder: GridEncoder, documents: Corpus) -> gradio.Blocks:
    """The page of an encoder: users choose from its grid, and search documents or texts of their own."""
    gr = require_extra("gradio", "demo", "The page")
    dims, depths = encoder.grid.dims, query_layers(encoder)
    layers = depths or encoder.grid.layers
    codes = [code for code in CODES.values() if encoder.quantizer is not None or not code.learned]
    embed_lines = lru_cache(8)(lambda lines: embed(encoder, lines))

    def compare(query: str, texts: str, layer: int, dim: int, code: str) -> list[Any]:
        lines = tuple(dict.fromkeys(line.strip() for line in texts.splitlines() if line.strip()))
        corpus = embed_lines(lines) if lines else documents
        g = Granularity(layers[-1] if depths else layer, dim, code)
        chosen, full = answer(encoder, corpus, query, g, layer)
        shared = {*chosen.rows} & {*full.rows}
        bytes_share = chosen.index_bytes / full.index_bytes
        time_share = (chosen.encode_ms + chosen.search_ms) / (full.encode_ms + full.search_ms)
        summary = (
            f"Finds **{len(shared)} of the {len(full.rows)}** documents that the full size finds, with "
            f"**{bytes_share:.1%}** of its bytes and **{time_share:.0%}** of its time."
        )
        tables = []
        for title, side in (("Chosen", chosen), ("Full size", full)):
            rows = [
                [f"{score:.3f}", "✓" if row in shared else "", corpus.texts[row]]
                for row, score in zip(side.rows, side.scores, strict=True)
            ]
            tables.append(gr.Dataframe(rows, label=f"{title}: {side}"))
        return [summary, *tables]

    def choice(label: str, values: Sequence[int]) -> Any:
        return gr.Radio([(str(value), value) for value in values], value=values[len(values) // 2], label=label)

    with gr.Blocks(title="An elastic encoder", analytics_enabled=False) as page:
        gr.Markdown(INTRODUCTION + (ABOUT_EXITS if depths else ""))
        query = gr.Textbox(EXAMPLE, label="Query", max_length=10_000)
        layer, dim = choice("Layers of the query" if depths else "Layers", layers), choice("Dims", dims)
        names = [(with_bits(code.name), code.name) for code in codes]
        code = gr.Radio(names, value="int8", label="Precision (stored bits per dim)")
        texts = gr.Textbox(label="Your own texts in place of the library's, one per line", lines=2, max_length=10**5)
        button = gr.Button("Compare", variant="primary")
        summary = gr.Markdown()
        with gr.Row():
            headers = ["score", "both", "document"]
            tables = [gr.Dataframe(headers=headers, wrap=True, max_chars=300, interactive=False) for _ in range(2)]
        triggers = [page.load, button.click, query.submit, layer.input, dim.input, code.input]
        controls = [query, texts, layer, dim, code]
        gr.on(triggers, compare, controls, [summary, *tables], trigger_mode="always_last")
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
    require_extra("gradio", "demo", "The page")
    require_sentence_transformers("The page")
    if options.space:
        write_space(Path(options.space), encoding)
        print(f"{options.space}: publish it with `hf upload user/name {options.space} --repo-type space`.")
        return
    encoder = load(encoding)
    build_demo(encoder, library(encoder)).launch()
