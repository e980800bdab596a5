"""
Build an index from the plan of `m3bert choose --output_file plan.json`, in one pass over the documents:

    m3bert index plan.json --model runs/elastic --files corpus.jsonl --vector_store faiss --output_dir runs/index
    m3bert index runs/index --add new.jsonl
    m3bert index runs/index --delete doc-17 doc-18

An interrupted run starts again from its first document. `m3bert search runs/index "a question"` searches the index.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..evaluation import GridEncoder
from ..index import ENGINES, Corpus, Index, Plan
from ..index.engine import KINDS, find_engine
from ..index.index import read_manifest
from ..trainers.data.collators import separator_for
from .command import parse_options
from .encoder import EncoderArguments, load_as
from .sources import default_base


@dataclass
class IndexArguments:
    """The documents to index, and the vector store."""

    files: list[str] = field(
        default_factory=list, metadata={"help": "Documents: .jsonl, .csv, .tsv, .parquet or .txt files, also gzipped."}
    )
    vector_store: str | None = field(
        default=None, metadata={"help": f"{', '.join(ENGINES)}. Each is an extra: pip install 'm3bert[faiss]'."}
    )
    output_dir: Path | None = field(default=None, metadata={"help": "Folder for the index."})
    index_type: str | None = field(
        default=None,
        metadata={"help": f"{', '.join(KINDS)}: compare all vectors, or those of near clusters, or follow a graph."},
    )
    url: str | None = field(default=None, metadata={"help": "Address of a Qdrant server. Default: in the folder."})
    text_column: str = field(
        default="text",
        metadata={"help": "Column with the text; title+text joins two columns with the separator, as in training."},
    )
    id_column: str = field(
        default="id", metadata={"help": "Column with the ids. Without such a column, documents are numbered."}
    )
    metadata_columns: list[str] | None = field(
        default=None, metadata={"help": "Columns to keep as metadata. Default: all others."}
    )
    add: list[str] = field(default_factory=list, metadata={"help": "Files with documents to add to an index."})
    delete: list[str] = field(default_factory=list, metadata={"help": "Ids of documents to delete from an index."})


def build(file: Path, encoding: EncoderArguments, options: IndexArguments) -> None:
    """Build the index of a plan. ValueError if an option is missing, or as [`Index.build`]."""
    if not options.files or options.vector_store is None or options.output_dir is None:
        raise ValueError("Building an index needs --files, --vector_store and --output_dir.")
    plan = Plan.load(file)
    find_engine(options.vector_store).library()
    name = encoding.model_name_or_path = encoding.model_name_or_path or plan.model or default_base()
    encoder = load_as(encoding, plan.encoder, plan.grid())
    corpus = Corpus(
        options.files,
        options.text_column,
        options.id_column,
        options.metadata_columns,
        separator_for([options.text_column], encoder.tokenizer),
    )
    model = str(Path(name).resolve()) if Path(name).is_dir() else name
    with Index.build(
        options.output_dir, options.vector_store, plan, encoder, corpus,
        kind=options.index_type, url=options.url, model=model, verbose=True,
    ) as index:  # fmt: skip
        print(summary(index))
        print(f'Search it: m3bert search {index.folder} "your question"')


def summary(index: Index) -> str:
    """An index in one line."""
    layout, plan = index.layout, index.plan
    size = sum(path.stat().st_size for path in index.folder.rglob("*") if path.is_file())
    queries = "" if plan.query == plan.documents else f", queries at {plan.query.layer} layers"
    return (
        f"{index.folder}: {len(index):,} documents at {plan.documents}{queries}, in {index.engine.name} "
        f"({layout.kind}), {layout.bytes_per_document} bytes per document for vectors, "
        f"{size / 1e6:.3g} MB in the folder."
    )


def change(folder: Path, encoding: EncoderArguments, options: IndexArguments) -> None:
    """Delete documents from an index, then add some. Raises as [`Index.add`] and [`Index.delete`]."""
    if options.delete:
        with Index.open(folder) as index:
            index.delete(options.delete)
            print(f"Deleted {len(set(options.delete)):,} documents.")
            if not options.add:
                print(summary(index))
    if options.add:
        encoder = encoder_of(folder, encoding)
        with Index.open(folder, encoder) as index:
            count = index.add(Corpus(options.add, **index.manifest["corpus"]), verbose=True)
            print(f"Added {count:,} documents.\n{summary(index)}")


def encoder_of(folder: Path, encoding: EncoderArguments) -> GridEncoder:
    """The encoder of an index, from where the index was told, unless the options name another place."""
    manifest = read_manifest(folder)
    encoding.model_name_or_path = encoding.model_name_or_path or manifest["model"]
    return load_as(encoding, manifest["encoder"], Plan.from_dict(manifest["plan"]).grid())


def main(arguments: list[str]) -> None:
    plan = {
        "type": Path,
        "help": "plan.json of `m3bert choose --output_file`; or the folder of an index, to change it",
    }
    options, encoding, place = parse_options((IndexArguments, EncoderArguments), __doc__, arguments, plan=plan)
    if options.add or options.delete:
        change(place.plan, encoding, options)
    else:
        build(place.plan, encoding, options)
