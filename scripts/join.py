"""
Search an index with another model than its own, without embedding the documents again. From rows of text and vector,
in Parquet or JSON Lines, the model gets a Dense module that maps its queries into the space of the index:

    m3bert join sentence-transformers/all-MiniLM-L6-v2 runs/joined --vectors rows.parquet

First it says what this keeps of the search, measured on held-out rows, and how much more rows would bring. Then it
writes a plain model, and `from_index.npy`, the map from vectors of the index to the space of the model. `--dry_run`
writes neither. An interrupted call continues.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..data.formats import check_files
from ..models.repository import MODEL_FILES
from .command import add_compute_options, argument_parser, check_overwriting, compute_of, next_step


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", help="folder or Hub id of the encoder for queries")
    parser.add_argument("output_dir", help="folder for the joined model")
    parser.add_argument("--vectors", nargs="+", required=True, help="files with rows of text and vector of the index")
    parser.add_argument("--text_column", default="text", help="text column (default: %(default)s)")
    parser.add_argument("--vector_column", default="vector", help="vector column (default: %(default)s)")
    parser.add_argument("--dry_run", action="store_true", help="say what the search keeps, and write no model")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that output_dir holds")
    parser.add_argument("--revision", help="branch, tag or commit of the model")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    add_compute_options(parser)
    options = parser.parse_args(arguments)
    check_overwriting(options.output_dir, MODEL_FILES, options.overwrite, options.model)
    for file in options.vectors:  # before anything heavy is imported
        check_files([file], [options.text_column, options.vector_column])
    compute = compute_of(options)
    from ..data.target_vectors import read_target_vectors
    from ..exits.join import join

    sources, vectors = read_target_vectors(options.vectors, options.text_column, options.vector_column)
    texts, cache = [text for lines in sources.values() for text in lines], f"{options.output_dir}.join"
    hub = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    said = "Embedding rows"
    joined = join(options.model, texts, vectors, compute=compute, cache_dir=cache, description=said, **hub)
    print(f"Read {len(texts):,} rows; their vectors have {vectors.width} dims.\n{joined.report()}")
    if options.dry_run:
        return
    joined.save(options.output_dir, overwrite=options.overwrite)
    shutil.rmtree(cache)
    print(f"Saved to {options.output_dir}. For vectors of the index in the space of the model:")
    print(f"back = numpy.load({str(Path(options.output_dir, 'from_index.npy'))!r}); vectors @ back[1:] + back[0]")
    next_step(model=options.output_dir, trust_remote_code=options.trust_remote_code)
