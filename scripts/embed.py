"""
Embed texts at every granularity of a grid, in one pass, to files:

    m3bert embed --files corpus.jsonl --document --grid "2,4,6x64,384" --output_dir runs/vectors
    accelerate launch --num_processes 2 --cpu -m m3bert embed ...           # several processes fill the same arrays

There is one vector per text and layer, as wide as the layer's widest dim; smaller dims are prefixes of it. To resume
arrays that were interrupted, start the command again. docs/scale.md is on collections that do not fit into memory.
"""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..data.formats import check_files
from ..utils.columns import Role, fields_of
from ..utils.durable import only_writer, replacing
from ..utils.help_texts import option
from .command import next_step, parse_options
from .encoder import EncoderArguments, load_encoder


ROWS_AT_ONCE = 1000


@dataclass
class EmbeddingArguments:
    """The texts to embed, and the folder to write."""

    files: list[str] = option(MISSING, "Texts: .txt, .jsonl, .csv or .parquet files, also gzipped.")
    text_column: str = option("text", "Column with the text; title+text joins two columns, as in training.")
    output_dir: str = option("runs/vectors", "Folder for the vectors.")
    format: Literal["npy", "datasets", "parquet"] = option(
        "npy", "npy: one array per layer; datasets, parquet: the rows, and a column per layer."
    )
    dtype: Literal["float32", "float16"] = option("float32", "Type of the vectors.")
    document: bool = option(False, "The texts are documents, with their prompt and maximum length. Default: queries.")
    normalize: bool = option(False, "L2-normalise the vectors. Needs one dim per layer, and datasets or parquet.")


def embed(encoding: EncoderArguments, options: EmbeddingArguments, state: Any) -> None:
    """Embed the texts of all files: arrays by all processes together, the others by the first one."""
    import torch

    from ..data.collators import joined_texts, separator_for
    from ..data.dataset_checks import require_columns
    from ..data.files import load_files
    from ..evaluation.bulk import GridEmbedder

    with state.main_process_first():
        dataset = load_files(options.files, text=fields_of(options.text_column))
    require_columns(dataset, fields_of(options.text_column), ", ".join(options.files))
    role: Role = "document" if options.document else "query"
    load = partial(load_encoder, encoding, getattr(torch, options.dtype))
    embedder = GridEmbedder(load, options.text_column, role, options.normalize)
    grid, folder = embedder.encoder.grid, Path(options.output_dir)
    if options.normalize and any(len(grid.dims_of(layer)) > 1 for layer in grid.layers):
        raise ValueError(f"--normalize needs a grid with one dim per layer; this grid is {grid}.")
    if options.format == "npy":
        separator = separator_for([options.text_column], embedder.encoder.tokenizer)
        texts = [*joined_texts(dataset, options.text_column, separator)]
        embedder.encoder.encode(texts, role=role, folder=folder, description="Embedding")
    elif state.is_main_process:
        embedded = dataset.map(embedder, batched=True, batch_size=ROWS_AT_ONCE, load_from_cache_file=False)
        if options.format == "parquet":
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / "embeddings.parquet") as draft:
                embedded.to_parquet(str(draft))
        else:
            draft = folder / "dataset.draft"
            shutil.rmtree(draft, ignore_errors=True)  # of a killed process
            embedded.save_to_disk(str(draft))
            shutil.rmtree(folder / "dataset", ignore_errors=True)
            os.replace(draft, folder / "dataset")
    if state.is_main_process:
        print(f"{folder}: {len(dataset):,} texts at {grid}")
        if options.format == "npy":
            file = str(folder / f"layer_{grid.layers[-1]}.npy")
            next_step("python", "-c", f"import numpy; print(numpy.load({file!r}, mmap_mode='r').shape)")


def main(arguments: list[str]) -> None:
    encoding, options = parse_options((EncoderArguments, EmbeddingArguments), __doc__, arguments)
    if options.normalize and options.format == "npy":
        raise ValueError("--normalize needs --format datasets or --format parquet.")
    check_files(options.files, fields_of(options.text_column))
    import torch
    from accelerate import PartialState

    is_ours = not torch.distributed.is_initialized()
    state = PartialState(cpu=encoding.uses_cpu)
    try:
        # Arrays lock themselves.
        locked = options.format != "npy" and state.is_main_process
        with only_writer(Path(options.output_dir)) if locked else nullcontext():
            embed(encoding, options, state)
    finally:
        if is_ours:  # a process group that is left over ends some runs with warnings or an abort
            state.destroy_process_group()
