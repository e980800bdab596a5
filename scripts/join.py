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
from dataclasses import MISSING, dataclass
from pathlib import Path

from ..data.formats import check_files
from ..encode.device import ComputeArguments
from ..models.repository import MODEL_FILES
from ..utils.help_texts import option
from .command import check_overwriting, next_step, parse_options


@dataclass
class JoinArguments:
    """The rows of the index, and how to read the model."""

    vectors: list[str] = option(MISSING, "Files with rows of text and vector of the index.")
    text_column: str = option("text", "Text column.")
    vector_column: str = option("vector", "Vector column.")
    dry_run: bool = option(False, "Say what the search keeps, and write no model.")
    overwrite: bool = option(False, "Replace a model that output_dir holds.")
    revision: str | None = option(None, "Branch, tag or commit of the model.")
    trust_remote_code: bool = option(False, "Run code that comes with the model.")


def main(arguments: list[str]) -> None:
    options, compute, place = parse_options(
        (JoinArguments, ComputeArguments),
        __doc__,
        arguments,
        model={"help": "folder or Hub id of the encoder for queries"},
        output_dir={"help": "folder for the joined model"},
    )
    check_overwriting(place.output_dir, MODEL_FILES, options.overwrite, place.model)
    for file in options.vectors:  # before anything heavy is imported
        check_files([file], [options.text_column, options.vector_column])
    from ..data.target_vectors import read_target_vectors
    from ..exits.join import join

    sources, vectors = read_target_vectors(options.vectors, options.text_column, options.vector_column)
    texts, cache = [text for lines in sources.values() for text in lines], f"{place.output_dir}.join"
    hub = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    said = "Embedding rows"
    joined = join(place.model, texts, vectors, compute=compute, cache_dir=cache, description=said, **hub)
    print(f"Read {len(texts):,} rows; their vectors have {vectors.width} dims.\n{joined.report()}")
    if options.dry_run:
        return
    joined.save(place.output_dir, overwrite=options.overwrite)
    shutil.rmtree(cache)
    print(f"Saved to {place.output_dir}. For vectors of the index in the space of the model:")
    print(f"back = numpy.load({str(Path(place.output_dir, 'from_index.npy'))!r}); vectors @ back[1:] + back[0]")
    next_step(model=place.output_dir, trust_remote_code=options.trust_remote_code)
