"""
Build an index from the plan of `m3bert choose --output_file plan.json`, in one pass over the documents:

    m3bert index plan.json --model runs/elastic --files corpus.jsonl --vector_store faiss --output_dir runs/index
    m3bert index runs/index --add new.jsonl
    m3bert index runs/index --delete doc-17 doc-18

An interrupted build starts again from its first document. A change that is refused or interrupted leaves the index as
it was, and so does `--overwrite` until the new index is finished. `m3bert search runs/index "a question"` searches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .. import evaluation, index as indexes
from ..data.formats import check_files
from ..utils.columns import fields_of
from ..utils.help_texts import option
from ..utils.typed import read_json
from .command import next_step, parse_options
from .encoder import EncoderArguments, load_as
from .sources import default_base


@dataclass
class IndexArguments:
    """The documents to index, and the vector store."""

    files: list[str] = option([], "Documents: .jsonl, .csv, .tsv, .parquet or .txt files, also gzipped.")
    vector_store: str | None = option(None, "faiss, qdrant or lancedb. Each is an extra: pip install 'm3bert[faiss]'.")
    output_dir: Path | None = option(None, "Folder for the index.")
    index_type: str | None = option(None, "flat, ivf, hnsw: compare all vectors, near ones, or follow a graph.")
    url: str | None = option(None, "Address of a Qdrant server. Default: in the folder.")
    text_column: str = option("text", "Column with the text; title+text joins two columns, as in training.")
    id_column: str = option("id", "Column with the ids. Without such a column, documents are numbered.")
    metadata_columns: list[str] | None = option(None, "Columns to keep as metadata. Default: all others.")
    overwrite: bool = option(False, "Replace the index of the folder, of other documents or settings.")
    add: list[str] = option([], "Files with documents to add to an index.")
    delete: list[str] = option([], "Ids of documents to delete from an index.")


def build(file: Path, encoding: EncoderArguments, options: IndexArguments) -> None:
    """Build the index of a plan. ValueError if an option is missing, or as [`Index.build`]."""
    if not options.files or options.vector_store is None or options.output_dir is None:
        raise ValueError("Building an index needs --files, --vector_store and --output_dir.")
    read_json(file)
    check_files(options.files, fields_of(options.text_column))
    from ..data.collators import separator_for
    from ..index.engine import find_engine

    plan = indexes.Plan.load(file)
    find_engine(options.vector_store).library()
    name = encoding.model_name_or_path = encoding.model_name_or_path or plan.model or default_base()
    encoder = load_as(encoding, plan.encoder, plan.grid())
    corpus = indexes.Corpus(
        options.files,
        options.text_column,
        options.id_column,
        options.metadata_columns,
        separator_for([options.text_column], encoder.tokenizer),
    )
    model = str(Path(name).resolve()) if Path(name).is_dir() else name
    with indexes.Index.build(
        options.output_dir, options.vector_store, plan, encoder, corpus,
        kind=options.index_type, url=options.url, model=model, overwrite=options.overwrite, verbose=True,
    ) as index:  # fmt: skip
        print(summary(index))
    next_step("m3bert", "search", options.output_dir, "your question")


def summary(index: indexes.Index) -> str:
    layout, plan = index.layout, index.plan
    size = sum(path.stat().st_size for path in index.folder.rglob("*") if path.is_file())
    queries = "" if plan.query == plan.documents else f", queries at {plan.query.layer} layers"
    return (
        f"{index.folder}: {len(index):,} documents at {plan.documents}{queries}, in {index.engine.name} "
        f"({layout.kind}), {layout.bytes_per_document} bytes per document for vectors, "
        f"{size / 1e6:.3g} MB in the folder."
    )


def change(folder: Path, encoding: EncoderArguments, options: IndexArguments) -> None:
    """Delete documents from an index, and add some. Raises as [`Index.change`]."""
    columns = read_json(folder / "index.json")["corpus"]
    if options.add:
        check_files(options.add, fields_of(columns["text_column"]))
    encoder = encoder_of(folder, encoding) if options.add else None
    with indexes.Index.open(folder, encoder) as index:
        added = index.change(
            options.delete, indexes.Corpus(options.add, **columns) if options.add else None, verbose=True
        )
        if options.delete:
            print(f"Deleted {len(set(options.delete)):,} documents.")
        if options.add:
            print(f"Added {added:,} documents.")
        print(summary(index))
    next_step("m3bert", "search", folder, "your question")


def encoder_of(folder: Path, encoding: EncoderArguments) -> evaluation.GridEncoder:
    """The encoder of an index, from the index's manifest unless the options name another place."""
    read_json(folder / "index.json")  # before the imports of an index, which take seconds
    manifest = indexes.read_manifest(folder)
    encoding.model_name_or_path = encoding.model_name_or_path or manifest["model"]
    return load_as(encoding, manifest["encoder"], indexes.Plan.from_dict(manifest["plan"]).grid())


def main(arguments: list[str]) -> None:
    plan = {
        "type": Path,
        "help": "plan.json of `m3bert choose --output_file`; or the folder of an index, to change it",
    }
    options, encoding, place = parse_options((IndexArguments, EncoderArguments), __doc__, arguments, plan=plan)
    if options.add or options.delete:
        of_build = [name for name in vars(options) if name not in ("add", "delete")]
        if clash := [name for name in of_build if getattr(options, name) != getattr(IndexArguments(), name)]:
            raise ValueError(f"--{clash[0]} is for building an index: omit it with --add and --delete.")
        change(place.plan, encoding, options)
    else:
        build(place.plan, encoding, options)
