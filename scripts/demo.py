"""
A page to try an elastic encoder: what depth, width and bits cost, and what they give.

    python -m scripts.demo                                        # the quickstart's encoder, documents and vectors
    python -m scripts.demo --model_name_or_path user/model        # any other, which encodes 800 documents first
    python -m scripts.demo --model_name_or_path user/model --space runs/space     # a folder to publish as a Space

Needs the extra `demo`. Documents are those of Python's standard library, or what is written on the page.
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
from transformers import HfArgumentParser

from scripts._command import HelpFormatter, run_command
from scripts._encoder import EncoderArguments, grid_of, load_encoder
from scripts._space import write_space
from scripts.stdlib_docs import split_by_module, stdlib_pairs
from trainers import Granularity, Grid
from trainers.evaluation import GridEmbeddings, GridEncoder
from trainers.evaluation.encoding import Role
from trainers.evaluation.precision import BITS, Search, Setting, search_at
from trainers.nested import unwrap_encoder
from trainers.teacher import require_sentence_transformers


if TYPE_CHECKING:
    import gradio

QUICKSTART = Path("runs/quickstart")
LIBRARY, OWN = "Python's standard library", "My own texts"
EXAMPLE = "measure how long a small piece of code takes"
SHOWN = 5  # documents on each side
LONGEST_SHOWN = 300  # characters of a document
MOST_LINES = 1000
KEPT_CORPORA = 8  # of texts from the page
PAGE_CSS = """
:is(#layer, #dim) :is(.tab-like-container, .min_value, .max_value) { display: none; }
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
A coloured line marks what both sides found. Scores are cosines: with 32 bits, of the vectors as they are; with 8 bits,
of the query as it is and documents that are rounded; with 1 bit, of the signs of both, by Hamming distance. A search
compares all documents. Times are of one query on this machine, medians of five.
"""


@dataclass
class DemoArguments:
    """The page."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to serve at; 0.0.0.0 lets other machines in."})
    port: int = field(default=7860, metadata={"help": "Port to serve at."})
    share: bool = field(default=False, metadata={"help": "Make a public link, through gradio's servers."})
    space: str | None = field(
        default=None, metadata={"help": "Serve nothing; write a new folder to publish as a Space of the Hub."}
    )


@dataclass(frozen=True)
class Corpus:
    """
    Documents to search.

    Args:
        names (`list[str]`): What each is called.
        texts (`list[str]`): What is shown of each.
        embeddings ([`GridEmbeddings`]): At every granularity.
        notes (`list[str]`): What a reader has to know of them.
    """

    names: list[str]
    texts: list[str]
    embeddings: GridEmbeddings
    notes: list[str] = field(default_factory=list)


def kept_corpus(run: Path, grid: Grid) -> Corpus:
    """
    The documents of a run of the quickstart, with the vectors that it kept.

    Raises:
        ValueError: if it kept none at some granularity.
    """
    with open(run / "documents.jsonl", encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    kept = {
        int(name.removeprefix("layer_")): vectors for name, vectors in load_file(run / "index.safetensors").items()
    }
    missing = [str(g) for g in grid if g.layer not in kept or g.dim > kept[g.layer].shape[1]]
    if missing:
        raise ValueError(
            f"{run} keeps no vectors at {', '.join(missing)}. To encode documents anew, name its model: "
            f"--model_name_or_path {run / 'model'}"
        )
    names, texts = ([document[key] for document in documents] for key in ("name", "summary"))
    return Corpus(names, texts, GridEmbeddings(grid, kept))


def library_corpus(encoder: GridEncoder) -> Corpus:
    """The documentation of Python's standard library that the quickstart measures with, encoded now."""
    _, pairs = split_by_module(stdlib_pairs())
    texts = [f"{pair.summary} {pair.body}" for pair in pairs]
    embeddings = encoder.encode(texts, role="document", description="Encoding the library").require_finite()
    return Corpus([pair.name for pair in pairs], [pair.summary for pair in pairs], embeddings)


def own_corpus(encoder: GridEncoder, text: str) -> Corpus:
    """
    The lines of a text as documents, each once.

    Raises:
        ValueError: if there is none, or too many to wait for.
    """
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), start=1) if line.strip()}
    if not lines:
        raise ValueError("There is no document: write some texts, one a line.")
    if len(lines) > MOST_LINES:
        raise ValueError(f"{len(lines):,} lines are more than this page encodes: {MOST_LINES:,} at most.")
    first: dict[str, int] = {}
    for number, line in lines.items():
        first.setdefault(line, number)
    texts, repeated = list(first), len(lines) - len(first)
    notes = cut_notes(encoder, texts, "document")
    if repeated:
        notes.append(f"Lines that repeat another are left out: {repeated}.")
    embeddings = encoder.encode(texts, role="document").require_finite()
    return Corpus([f"line {number}" for number in first.values()], texts, embeddings, notes)


def cut_notes(encoder: GridEncoder, texts: Sequence[str], role: Role) -> list[str]:
    """A line that says how many texts are longer than the encoder reads, where some are."""
    prompted = [encoder.prompts.get(role, "") + text for text in texts]
    limit: int = encoder.max_length  # type: ignore[assignment]  # an encoder has one, also where none was named
    cut = sum(len(ids) > limit for ids in encoder.tokenizer(prompted, verbose=False)["input_ids"])
    what = "The query is" if role == "query" else f"Documents: {cut} of {len(texts)} are"
    return [f"{what} longer than {limit} tokens; what is beyond was not read."] if cut else []


def answer(encoder: GridEncoder, corpus: Corpus, query: str, setting: Setting) -> str:
    """
    What a query finds and costs at a setting, beside the full size at 32 bits.

    Args:
        encoder ([`GridEncoder`]): Its deepest layer's widest dim is the full size.
        corpus ([`Corpus`]): Encoded by it.
        query (`str`): Text.
        setting ([`Setting`]): Granularity and bits.

    Returns:
        `str`: HTML.

    Raises:
        ValueError: if there is no query, or the granularity is not in the grid.
    """
    query = query.strip()
    if not query:
        raise ValueError("There is no query: write what to look for.")
    full = Setting(encoder.grid.granularities[-1], 32)
    chosen, largest = search_at(encoder, corpus.embeddings, query, [setting, full], k=SHOWN)
    notes = [*corpus.notes, *cut_notes(encoder, [query], "query")]
    padding = -setting.granularity.dim % 8
    if setting.bits == 1 and padding:
        notes.append(f"{setting.granularity.dim} dims do not fill whole bytes: {padding} bits a vector are empty.")
    return render(corpus, chosen, largest, notes)


def render(corpus: Corpus, chosen: Search, full: Search, notes: Sequence[str] = ()) -> str:
    """Two searches side by side, and what they have in common, as HTML."""
    shared = set(chosen.rows) & set(full.rows)
    bytes_share = chosen.index_bytes / full.index_bytes
    time_share = (chosen.encode_ms + chosen.search_ms) / (full.encode_ms + full.search_ms)
    summary = (
        f"Finds <b>{len(shared)} of the {len(full.rows)}</b> documents that the full size finds, with "
        f"<b>{bytes_share:.1%}</b> of its bytes and <b>{time_share:.0%}</b> of its time."
    )
    lines = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    sides = "".join(
        f'<section class="{side}"><h3>{title}: {named(found.setting)}</h3>{costs_of(found, len(corpus.names))}'
        f"<ol>{''.join(items_of(corpus, found, shared))}</ol></section>"
        for side, title, found in (("chosen", "Chosen", chosen), ("full", "Full size", full))
    )
    return f'<p class="summary">{summary}</p>{lines}<div class="sides">{sides}</div>'


def named(setting: Setting) -> str:
    g, bits = setting.granularity, setting.bits
    return f"{g.layer} layers, {g.dim} dims, {bits} bit{'s' if bits > 1 else ''}"


def costs_of(found: Search, documents: int) -> str:
    costs = {
        "encode": f"{found.encode_ms:.1f} ms",
        "search": f"{found.search_ms:.2f} ms",
        "vector": size(found.bytes_a_vector),
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


def require_gradio() -> Any:
    """
    The library, which is an extra, told to report nothing to its makers.

    Raises:
        ValueError: if it is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError as error:
        raise ValueError("The page needs gradio: pip install 'm3bert[demo]'.") from error
    return gradio


def build_demo(encoder: GridEncoder, corpus: Corpus) -> gradio.Blocks:
    """
    The page.

    Args:
        encoder ([`GridEncoder`]): Its grid is what can be chosen.
        corpus ([`Corpus`]): Documents to begin with, encoded by it.

    Returns:
        `gradio.Blocks`: to be launched, see [`serve`].
    """
    gr = require_gradio()
    layers, dims = encoder.grid.layers, encoder.grid.dims
    encode_own = lru_cache(KEPT_CORPORA)(lambda text: own_corpus(encoder, text))

    def label(name: str, values: list[int], position: int) -> str:
        return f"{name}: {values[position - 1]} of {values[-1]}"

    def slider(name: str, values: list[int], elem_id: str) -> Any:
        # Depths and widths do not lie at equal distances: the slider counts them, its label says which one it is.
        position = (len(values) + 1) // 2
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

    def compare(source: str, texts: str, query: str, layer: int, dim: int, bits: int) -> str:
        try:
            searched = encode_own(texts) if source == OWN else corpus
            return answer(encoder, searched, query, Setting(Granularity(layers[layer - 1], dims[dim - 1]), bits))
        except ValueError as error:
            return f'<p class="problem">{escape(str(error))}</p>'

    with gr.Blocks(title="An elastic encoder", analytics_enabled=False) as demo:
        gr.Markdown(
            "# One encoder, many sizes\nThe same query at a depth, width and precision that you choose, and at the "
            "full size: what both find, and what that takes."
        )
        query = gr.Textbox(EXAMPLE, label="Query", elem_id="query")
        with gr.Row():
            layer = slider("Layers", layers, "layer")
            dim = slider("Dims", dims, "dim")
            bits = gr.Radio(list(BITS), value=8, label="Bits a number", elem_id="bits")
        source = gr.Radio(
            [(f"{LIBRARY} ({len(corpus.names):,})", LIBRARY), OWN], value=LIBRARY, label="Documents", elem_id="source"
        )
        texts = gr.Textbox(
            label="Texts, one a line", lines=6, max_lines=12, visible=False, elem_id="texts", placeholder="One a line"
        )
        button = gr.Button("Compare", variant="primary", elem_id="compare")
        result = gr.HTML(css_template=RESULT_CSS, elem_id="result")
        gr.Markdown(EXPLANATION)
        source.change(
            lambda chosen: gr.Textbox(visible=chosen == OWN),
            source,
            texts,
            queue=False,
            show_progress="hidden",
            api_visibility="private",
        )
        gr.on(
            [demo.load, button.click, query.submit, layer.release, dim.release, bits.input],
            compare,
            [source, texts, query, layer, dim, bits],
            result,
            trigger_mode="always_last",
        )
    return demo


def serve(demo: gradio.Blocks, options: DemoArguments, **launch: Any) -> None:
    """Serve a page with the fonts of the reader's system: nothing is loaded from elsewhere."""
    gr = require_gradio()
    demo.launch(
        server_name=options.host,
        server_port=options.port,
        share=options.share,
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        css=PAGE_CSS,
        footer_links=[],
        run_history=False,
        **launch,
    )


def load(encoding: EncoderArguments) -> tuple[GridEncoder, Corpus]:
    """
    The encoder that the options name, by default the quickstart's, and documents for it.

    Raises:
        ValueError: if there is no run of the quickstart to take by default.
    """
    is_kept = encoding == EncoderArguments()
    if encoding.model_name_or_path is None:
        if not (QUICKSTART / "index.safetensors").is_file():
            raise ValueError(f"{QUICKSTART} holds no finished run: `make quickstart`, or --model_name_or_path HUB_ID.")
        encoding = replace(encoding, model_name_or_path=str(QUICKSTART / "model"))
    encoder = load_encoder(encoding)
    full = grid_of(None, unwrap_encoder(encoder.model).config, encoder.projection).full
    encoder = replace(encoder, grid=Grid(tuple({*encoder.grid, full})))  # a grid that was named may lack it
    return encoder, kept_corpus(QUICKSTART, encoder.grid) if is_kept else library_corpus(encoder)


def main(arguments: list[str]) -> None:
    parser = HfArgumentParser((EncoderArguments, DemoArguments), description=__doc__, formatter_class=HelpFormatter)
    encoding, options = parser.parse_args_into_dataclasses(arguments)
    require_gradio()
    require_sentence_transformers("The page")
    if options.space:
        write_space(Path(options.space), encoding)
        print(f"{options.space}: publish it with `hf upload user/name {options.space} --repo-type space`")
        return
    serve(build_demo(*load(encoding)), options)


if __name__ == "__main__":
    run_command(main)
