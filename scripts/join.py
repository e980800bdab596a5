"""
Search an index with another model than its own, without embedding the documents again. From rows of text and vector,
in Parquet or JSON Lines, the model gets a Dense module that maps its queries into the space of the index:

    m3bert join sentence-transformers/all-MiniLM-L6-v2 runs/joined --vectors rows.parquet

First it says what this keeps of the search, measured on held-out rows, and how much more rows would bring. Then it
writes a plain model, and `from_index.npy`, the map from vectors of the index to the space of the model. `--dry_run`
writes neither. `--depths 4` also writes `4-layers`, a plain model of four layers with maps of its own. An interrupted
call continues.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..data.formats import check_files
from ..models.repository import MODEL_FILES
from ..utils.durable import remove_files
from .command import SIZE_FOLDERS, add_compute_options, argument_parser, check_overwriting, compute_of, next_step
from .fit import depths_of


def sizes_of(options: Namespace, texts: Sequence[str], folder: Path) -> dict[str, Path]:
    """Name of each depth of `--depths` -> the folder of a plain model of its layers, refitted to the texts."""
    from ..exits.plan import FitOptions
    from ..exits.repository import fit
    from ..hub_cards.checkpoint import Checkpoint
    from ..hub_cards.native_export import export_native
    from ..hub_cards.sizes import plain_sizes

    plan = FitOptions(**depths_of(options), static=False, description="Fitting depths")
    hub = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    fit(options.model, folder / "elastic", texts, plan, compute=compute_of(options), overwrite=True, **hub)
    checkpoint = Checkpoint(folder / "elastic")
    for name, size in (sizes := plain_sizes(checkpoint)).items():
        export_native(checkpoint, folder / name, size)
    return {name: folder / name for name in sizes}


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", help="folder or Hub id of the encoder for queries")
    parser.add_argument("output_dir", help="folder for the joined model")
    parser.add_argument("--vectors", nargs="+", required=True, help="files with rows of text and vector of the index")
    parser.add_argument("--text_column", default="text", help="text column (default: %(default)s)")
    parser.add_argument("--vector_column", default="vector", help="vector column (default: %(default)s)")
    parser.add_argument("--depths", nargs="+", metavar="DEPTH", help="depths to write as well, as in m3bert fit")
    parser.add_argument("--dry_run", action="store_true", help="say what the search keeps, and write no model")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that output_dir holds")
    parser.add_argument("--revision", help="branch, tag or commit of the model")
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    add_compute_options(parser)
    options = parser.parse_args(arguments)
    check_overwriting(options.output_dir, (*MODEL_FILES, *SIZE_FOLDERS), options.overwrite, options.model)
    for file in options.vectors:  # before anything heavy is imported
        check_files([file], [options.text_column, options.vector_column])
    depths_of(options)
    shared: dict[str, Any] = {"compute": compute_of(options), "trust_remote_code": options.trust_remote_code}
    from ..data.target_vectors import read_target_vectors
    from ..exits.join import join

    sources, vectors = read_target_vectors(options.vectors, options.text_column, options.vector_column)
    texts = [text for lines in sources.values() for text in lines]
    output, work = Path(options.output_dir), Path(f"{options.output_dir}.join")
    shared["description"] = "Embedding rows"
    joined = {"": join(options.model, texts, vectors, cache_dir=work / "full", revision=options.revision, **shared)}
    print(f"Read {len(texts):,} rows; their vectors have {vectors.width} dims.\n{joined[''].report()}")
    for name, folder in sizes_of(options, texts, work).items() if options.depths else ():
        joined[name] = join(folder, texts, vectors, cache_dir=work / f"of-{name}", **shared)
        print(f"\n{name}:\n{joined[name].report()}")
    if options.dry_run:
        return
    remove_files(output, SIZE_FOLDERS)
    for name, each in joined.items():
        each.save(output / name, overwrite=options.overwrite)
    shutil.rmtree(work)
    print(f"Saved to {output}. Vectors of the index in the space of the model: vectors @ back[1:] + back[0], where")
    print(f"back = numpy.load({str(output / 'from_index.npy')!r}).")
    next_step(model=output, trust_remote_code=options.trust_remote_code)
