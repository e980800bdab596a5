"""
A page to try an elastic encoder: what each depth, number of dims and precision finds and costs. For a model with
exits, documents are embedded once, with all layers, and the page chooses the depth of the query.

    m3bert demo                                                   # the encoder and documents of the quickstart
    m3bert demo --model_name_or_path user/model                   # any encoder; it embeds 800 documents first
    m3bert demo --model_name_or_path user/model --space runs/space     # write a folder to publish as a Space

Searches the documentation of Python's standard library, or texts entered on the page. Needs the extra `demo`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from modeling_m3bert.modeling_elastic import Elasticity
from trainers import Granularity, Grid
from trainers.core.codes import CODES, Code, bytes_per_vector, code_of, stored_bits
from trainers.core.device import ComputeArguments
from trainers.core.extras import require_extra, require_sentence_transformers
from trainers.core.states import unwrap_encoder
from trainers.data.stdlib_docs import split_by_module, stdlib_pairs
from trainers.evaluation import GridEmbeddings, GridEncoder
from trainers.evaluation.encoding import Role, default_grid
from trainers.evaluation.precision import Search, Setting, search_at

from .command import parse_options, run_command
from .encoder import EncoderArguments, load_encoder
from .space import write_space


if TYPE_CHECKING:
    import gradio

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before gradio is imported

QUICKSTART = Path("runs/quickstart")
LIBRARY, OWN = "Python's standard library", "My own texts"
EXAMPLE = "measure how long a small piece of code takes"
SHOWN = 5  # documents on each side
LONGEST_SHOWN = 300  # characters of a document
MOST_LINES = 1000
SESSIONS = 100  # whose state, which the page does not use, is kept: about 40 kB each
LONGEST_QUERY, LONGEST_TEXTS = 10_000, 1_000_000  # characters that the page takes
KEPT_CORPORA = 8  # of texts from the page
PAGE_CSS = """
:is(#layer, #dim, #full_layer) :is(.tab-like-container, .min_value, .max_value) { display: none; }
#result .html-container { padding: 0; }
"""
RESULT_CSS = """
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
section { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 0.8rem; min-width: 0; }
h3 { margin: 0 0 0.6rem; }
dl { display: grid; grid-template-columns: repeat(4, 1fr); gap: 0.5rem; margin: 0 0 0.8rem; }
@media (max-width: 640px) { dl { grid-template-columns: repeat(2, 1fr); } }
dt, .score { opacity: 0.75; font-size: 0.85em; }
dd { margin: 0; font-weight: 600; }
ol { list-style: none; margin: 0; padding: 0; }
li { display: grid; grid-template-columns: 3rem 1fr; padding: 0.3rem 0.5rem; border-left: 3px solid transparent; }
li span { overflow-wrap: anywhere; }
li.shared, .problem { border-left: 3px solid var(--color-accent); }
.problem { padding: 0.3rem 0.8rem; }
"""
EXPLANATION = """
A coloured line marks documents that both sides found. Scores are cosines. The precision says how the
documents are stored: rounded to 16, 8 or 4 bits, or binary. With `binary` (binary), only the signs of query and
documents are compared, by Hamming distance. Each search is exact: it compares the query with all documents. Times are
for one query on this machine, the median of five runs.
"""
ABOUT_QUANTIZER = """
This model has a quantizer. Its precisions (`qama-...`) keep one of a few learned levels per dim, and are compared by
Hamming distance, too. The bits are those that are stored: four levels take three, so that Hamming distances are
differences of levels.
"""


INTRODUCTION = """
# One encoder, many sizes
Search with the same query at a depth, number of dims and precision of your choice, and at the full size. Compare what
they find, and what it costs.
"""
ABOUT_EXITS = """
The documents are embedded once, with all layers. Only the query is read at fewer layers: an exit takes it into the
space of the documents. With 0 layers, the query is embedded by looking up its tokens in a table.
"""


@dataclass
class DemoArguments:
    """How to serve the page."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to serve at; 0.0.0.0 accepts other machines."})
    port: int = field(default=7860, metadata={"help": "Port to serve at."})
    share: bool = field(default=False, metadata={"help": "Create a public link through gradio's servers."})
    space: str | None = field(
        default=None,
        metadata={"help": "Do not serve the page, but write this new folder to publish as a Space of the Hub."},
    )


@dataclass(frozen=True)
class Corpus:
    """
    Documents to search.

    Args:
        names (`list[str]`): Name of each document.
        texts (`list[str]`): Text to show for each.
        embeddings ([`GridEmbeddings`]): Embeddings at every granularity.
        notes (`list[str]`): Remarks to show with the results.
    """

    names: list[str]
    texts: list[str]
    embeddings: GridEmbeddings
    notes: list[str] = field(default_factory=list)


def kept_corpus(run: Path, grid: Grid) -> Corpus:
    """
    The documents of the quickstart's run, with the vectors that it saved.

    Raises:
        ValueError: if it saved no vectors for some granularity.
    """
    with open(run / "documents.jsonl", encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    kept = {
        int(name.removeprefix("layer_")): vectors for name, vectors in load_file(run / "index.safetensors").items()
    }
    missing = [str(g) for g in grid if g.layer not in kept or g.dim > kept[g.layer].shape[1]]
    if missing:
        raise ValueError(
            f"{run} has no vectors at {', '.join(missing)}. To embed the documents again, pass "
            f"--model_name_or_path {run / 'model'}."
        )
    names, texts = ([document[key] for document in documents] for key in ("name", "summary"))
    return Corpus(names, texts, GridEmbeddings(grid, kept))


def library_corpus(encoder: GridEncoder) -> Corpus:
    """The part of Python's documentation that the quickstart evaluates on, embedded now."""
    _, pairs = split_by_module(stdlib_pairs())
    texts = [f"{pair.summary} {pair.body}" for pair in pairs]
    embeddings = encoder.encode(texts, role="document", description="Embedding the library").require_finite()
    return Corpus([pair.name for pair in pairs], [pair.summary for pair in pairs], embeddings)


def own_corpus(encoder: GridEncoder, text: str) -> Corpus:
    """
    The distinct lines of a text as documents.

    Raises:
        ValueError: if there is none, or too many.
    """
    if len(text) > LONGEST_TEXTS:
        raise ValueError(f"{len(text):,} characters are too many: this page takes {LONGEST_TEXTS:,} at most.")
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), start=1) if line.strip()}
    if not lines:
        raise ValueError("There are no texts: enter some, one per line.")
    if len(lines) > MOST_LINES:
        raise ValueError(f"{len(lines):,} lines are too many: this page takes {MOST_LINES:,} at most.")
    first: dict[str, int] = {}
    for number, line in lines.items():
        first.setdefault(line, number)
    texts, repeated = list(first), len(lines) - len(first)
    notes = cut_notes(encoder, texts, "document")
    if repeated:
        notes.append(f"Repeated lines, left out: {repeated}.")
    embeddings = encoder.encode(texts, role="document").require_finite()
    return Corpus([f"line {number}" for number in first.values()], texts, embeddings, notes)


def cut_notes(encoder: GridEncoder, texts: Sequence[str], role: Role) -> list[str]:
    """A remark on texts that are longer than the encoder's limit, if there are any."""
    prompted = [encoder.prompts.get(role, "") + text for text in texts]
    limit = encoder.max_length_of(role)
    cut = sum(len(ids) > limit for ids in encoder.tokenizer(prompted, verbose=False)["input_ids"])
    what = "The query was" if role == "query" else f"{cut} of {len(texts)} documents were"
    return [f"{what} truncated to {limit} tokens."] if cut else []


def query_layers(encoder: GridEncoder) -> list[int]:
    """The layers that a query may read to search documents at the deepest layer of the encoder's grid, ascending:
    those with an exit, and that layer itself. Without exits below it there are none."""
    config, documents = unwrap_encoder(encoder.model).config, encoder.grid.layers[-1]
    below = [depth for depth in Elasticity.of(config).exits if depth < documents]
    return [*below, documents] if below else []


def answer(
    encoder: GridEncoder, corpus: Corpus, query: str, setting: Setting, full_query_layer: int | None = None
) -> str:
    """
    What a query finds and costs at a setting, side by side with the full size in float32.

    Args:
        encoder ([`GridEncoder`]): The encoder; the last granularity of its grid is the full size.
        corpus ([`Corpus`]): Documents, embedded by this encoder.
        query (`str`): The query.
        setting ([`Setting`]): Granularity with a precision and, for an encoder with exits, layer of the query.
        full_query_layer (`int`, *optional*): Layer of the query at the full size, for an encoder with exits.

    Returns:
        `str`: HTML.

    Raises:
        ValueError: if there is no query, or it is too long, the size is not in the grid, or the encoder lacks the
            quantizer of a precision.
    """
    query = query.strip()
    if not query:
        raise ValueError("There is no query: enter one.")
    if len(query) > LONGEST_QUERY:
        raise ValueError(
            f"A query of {len(query):,} characters is too long: this page takes {LONGEST_QUERY:,} at most."
        )
    g = setting.granularity
    if g.size not in corpus.embeddings.grid.granularities:
        raise ValueError(f"{g.size} is not among the encoded granularities {corpus.embeddings.grid}.")
    full = Setting(encoder.grid.granularities[-1], full_query_layer)
    chosen, largest = search_at(encoder, corpus.embeddings, query, [setting, full], k=SHOWN)
    notes = [*corpus.notes, *cut_notes(encoder, [query], "query")]
    if unused := 8 * bytes_per_vector(g.code, g.dim) - stored_bits(g.code, g.dim):
        bits = "1 bit per vector is" if unused == 1 else f"{unused} bits per vector are"
        notes.append(f"{g.dim} dims do not fill whole bytes: {bits} unused.")
    return render(corpus, chosen, largest, notes)


def render(corpus: Corpus, chosen: Search, full: Search, notes: Sequence[str] = ()) -> str:
    """Two searches side by side as HTML, with a summary of their overlap."""
    shared = set(chosen.rows) & set(full.rows)
    bytes_share = chosen.index_bytes / full.index_bytes
    time_share = (chosen.encode_ms + chosen.search_ms) / (full.encode_ms + full.search_ms)
    other = "full size" if full.setting.query_layer is None else "full index"
    summary = (
        f"Finds <b>{len(shared)} of the {len(full.rows)}</b> documents that the {other} finds, with "
        f"<b>{bytes_share:.1%}</b> of its bytes and <b>{time_share:.0%}</b> of its time."
    )
    lines = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    sides = "".join(
        f'<section class="{side}"><h3>{title}: {named(found.setting)}</h3>{costs_of(found, len(corpus.names))}'
        f"<ol>{''.join(items_of(corpus, found, shared))}</ol></section>"
        for side, title, found in (("chosen", "Chosen", chosen), ("full", other.capitalize(), full))
    )
    return f'<p class="summary">{summary}</p>{lines}<div class="sides">{sides}</div>'


def named(setting: Setting) -> str:
    g = setting.granularity
    depth = f"{g.layer} layers" if setting.query_layer is None else f"query {setting.query_layer} of {g.layer} layers"
    return f"{depth}, {g.dim} dims, {with_bits(code_of(g.code))}"


def with_bits(code: Code) -> str:
    """A precision with its stored bits per dim."""
    return f"{code.name} ({code.bits:g} bit{'s' if code.bits != 1 else ''})"


def codes_of(encoder: GridEncoder) -> list[Code]:
    """The codes that users choose from: those of a quantizer only if the encoder has one."""
    return [code for code in CODES.values() if encoder.quantizer is not None or not code.learned]


def costs_of(found: Search, documents: int) -> str:
    costs = {
        "encode": f"{found.encode_ms:.1f} ms",
        "search": f"{found.search_ms:.2f} ms",
        "vector": size(found.bytes_per_vector),
        f"all {documents:,}": size(found.index_bytes),
    }
    return f"<dl>{''.join(f'<div><dt>{name}</dt><dd>{value}</dd></div>' for name, value in costs.items())}</dl>"


def items_of(corpus: Corpus, found: Search, shared: set[int]) -> Iterator[str]:
    for row, score in zip(found.rows, found.scores, strict=True):
        name, text = escape(corpus.names[row]).replace(".", ".<wbr>"), corpus.texts[row]
        shown = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}\u2026"
        yield (
            f'<li class="{"shared" if row in shared else "other"}"><span class="score">{score:.3f}</span>'
            f"<span><b>{name}</b> {escape(shown)}</span></li>"
        )


def size(count: int) -> str:
    """Bytes, kB or MB."""
    if count < 10_000:
        return f"{count:,} bytes"
    return f"{count / 1e3:.0f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"


def build_demo(encoder: GridEncoder, corpus: Corpus) -> gradio.Blocks:
    """
    The page. For an encoder with exits, users choose the layers of the query, and documents are searched at the
    deepest layer of the grid.

    Args:
        encoder ([`GridEncoder`]): The encoder; users choose from its grid.
        corpus ([`Corpus`]): The documents to start with, embedded by this encoder.

    Returns:
        `gradio.Blocks`: to launch with [`serve`].
    """
    gr = require_extra("gradio", "demo", "The page")
    dims, depths = encoder.grid.dims, query_layers(encoder)
    layers = depths or encoder.grid.layers
    encode_own = lru_cache(KEPT_CORPORA)(lambda text: own_corpus(encoder, text))

    def label(name: str, values: list[int], position: int) -> str:
        return f"{name}: {values[position - 1]} of {values[-1]}"

    def slider(name: str, values: list[int], elem_id: str, position: int) -> Any:
        # Depths and widths are not evenly spaced, so the slider holds positions and its label shows the value.
        first = 1 if len(values) > 1 else 0
        control = gr.Slider(
            first,
            len(values),
            position,
            step=1,
            precision=0,
            label=label(name, values, position),
            interactive=len(values) > 1,
            elem_id=elem_id,
            buttons=[],
        )
        control.change(
            lambda position: gr.Slider(label=label(name, values, position)),
            control,
            control,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
        return control

    def setting_at(layer: int, dim: int, code: str) -> Setting:
        if depths:
            return Setting(Granularity(depths[-1], dim, code), query_layer=layer)
        return Setting(Granularity(layer, dim, code))

    def compare(
        source: str, texts: str, query: str, layer: int, dim: int, code: str, full_layer: int | None = None
    ) -> str:
        try:
            searched = encode_own(texts) if source == OWN else corpus
            setting = setting_at(layers[layer - 1], dims[dim - 1], code)
            return answer(encoder, searched, query, setting, full_layer and depths[full_layer - 1])
        except ValueError as error:
            return f'<p class="problem">{escape(str(error))}</p>'

    with gr.Blocks(title="An elastic encoder", analytics_enabled=False) as demo:
        gr.Markdown(INTRODUCTION)
        query = gr.Textbox(EXAMPLE, label="Query", elem_id="query")
        with gr.Row():
            layer = slider(
                "Query layers, chosen" if depths else "Layers", layers, "layer", position=(len(layers) + 1) // 2
            )
            dim = slider("Dims", dims, "dim", position=(len(dims) + 1) // 2)
            choices = [(with_bits(code), code.name) for code in codes_of(encoder)]
            code = gr.Radio(choices, value="int8", label="Precision (stored bits per dim)", elem_id="code")
            controls = [layer, dim, code]
            if depths:
                controls.append(slider("Query layers, full index", depths, "full_layer", position=len(depths)))
        source = gr.Radio(
            [(f"{LIBRARY} ({len(corpus.names):,})", LIBRARY), OWN], value=LIBRARY, label="Documents", elem_id="source"
        )
        texts = gr.Textbox(
            label="Texts", lines=6, max_lines=12, visible=False, elem_id="texts", placeholder="One text per line"
        )
        button = gr.Button("Compare", variant="primary", elem_id="compare")
        result = gr.HTML(css_template=RESULT_CSS, elem_id="result")
        about_quantizer = ABOUT_QUANTIZER if encoder.quantizer is not None else ""
        gr.Markdown(EXPLANATION + about_quantizer + (ABOUT_EXITS if depths else ""))
        source.change(
            lambda chosen: gr.Textbox(visible=chosen == OWN),
            source,
            texts,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
        gr.on(
            [
                demo.load,
                button.click,
                query.submit,
                *(control.input if control is code else control.release for control in controls),
            ],
            compare,
            [source, texts, query, *controls],
            result,
            trigger_mode="always_last",
        )
    return demo


def serve(demo: gradio.Blocks, options: DemoArguments, **launch: Any) -> None:
    """Serve a page. It uses system fonts, so that a browser loads nothing from other servers."""
    import gradio as gr

    demo.launch(
        server_name=options.host,
        server_port=options.port,
        share=options.share,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css=PAGE_CSS,
        footer_links=[],
        run_history=False,
        state_session_capacity=SESSIONS,
        **launch,
    )


def load(encoding: EncoderArguments) -> tuple[GridEncoder, Corpus]:
    """
    The encoder that the options name, by default the quickstart's, and its documents.

    Raises:
        ValueError: if no encoder is named and there is no run of the quickstart.
    """
    is_kept = replace(encoding, **vars(ComputeArguments())) == EncoderArguments()
    if encoding.model_name_or_path is None:
        if not (QUICKSTART / "index.safetensors").is_file():
            raise ValueError(
                f"{QUICKSTART} holds no finished run: run `m3bert quickstart`, or pass --model_name_or_path HUB_ID."
            )
        encoding = replace(encoding, model_name_or_path=str(QUICKSTART / "model"))
    encoder = load_encoder(encoding)
    full = default_grid(unwrap_encoder(encoder.model).config, encoder.projection).full
    encoder = replace(encoder, grid=Grid(tuple({*encoder.grid, full})))  # a given grid may lack it
    if query_layers(encoder):
        encoder = replace(encoder, grid=Grid.product([full.layer], encoder.grid.dims))  # documents at one layer
    return encoder, kept_corpus(QUICKSTART, encoder.grid) if is_kept else library_corpus(encoder)


def main(arguments: list[str]) -> None:
    encoding, options = parse_options((EncoderArguments, DemoArguments), __doc__, arguments)
    require_extra("gradio", "demo", "The page")
    require_sentence_transformers("The page")
    if options.space:
        write_space(Path(options.space), encoding)
        print(f"{options.space}: publish it with `hf upload user/name {options.space} --repo-type space`.")
        return
    serve(build_demo(*load(encoding)), options)


if __name__ == "__main__":
    run_command(main)
