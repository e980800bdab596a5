"""
Embed texts at every granularity of a grid, once, into files:

    python -m scripts.embed --files corpus.jsonl --grid "2,4,6x64,384" --output_dir runs/vectors
    accelerate launch --num_processes 2 --cpu -m scripts.embed ...          # several processes fill the same arrays

A layer has one vector a text, as wide as its widest dim; every dim is a prefix of it. An interrupted run goes on where
it stopped when it is started again.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, Features, List, Value
from transformers import HfArgumentParser

from scripts._command import HelpFormatter, run_command
from scripts._encoder import EncoderArguments, load_encoder
from trainers import Granularity, prefix
from trainers.collators import fields_of, joined_text, separator_for
from trainers.data import load_files, require_columns
from trainers.evaluation import GridEmbeddings


FORMATS = ("npy", "datasets", "parquet")
DTYPES = {"float32": torch.float32, "float16": torch.float16}
ROWS_AT_ONCE = 1000


@dataclass
class EmbeddingArguments:
    """What to embed, and where to write it."""

    files: list[str] = field(default_factory=list, metadata={"help": ".txt, .jsonl, .csv or .parquet, also .gz."})
    text_column: str = field(
        default="text",
        metadata={"help": "Column with the text; title+text joins two with the separator, as training does."},
    )
    output_dir: str = field(default="runs/vectors", metadata={"help": "Where the vectors go."})
    format: str = field(
        default="npy",
        metadata={
            "help": "npy: an array a layer, to be memory-mapped. datasets, parquet: the rows of the files with a "
            "column a layer."
        },
    )
    dtype: str = field(default="float32", metadata={"help": "float32 or float16."})
    document: bool = field(default=False, metadata={"help": "The texts are documents: use --document_prompt."})
    normalize: bool = field(
        default=False,
        metadata={"help": "L2-normalise. Only with one dim a layer: a prefix is normalised after cutting."},
    )


def check(options: EmbeddingArguments) -> None:
    """
    Refuse what cannot be, before any work is done.

    Raises:
        ValueError: names the option and its legal values.
    """
    if not options.files:
        raise ValueError("Name what to embed: --files FILE ...")
    if options.format not in FORMATS:
        raise ValueError(f"--format {options.format} is unknown; legal values: {', '.join(FORMATS)}.")
    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype {options.dtype} is unknown; legal values: {', '.join(DTYPES)}.")
    if options.normalize and options.format == "npy":
        raise ValueError("--normalize needs --format datasets or parquet: arrays are kept as they come.")


def with_vectors(dataset: Dataset, embeddings: GridEmbeddings, normalize: bool, dtype: str) -> Dataset:
    """The rows with a column `layer_{l}` a layer; nothing is held in memory whole."""
    widest = {layer: Granularity(layer, embeddings.grid.dims_of(layer)[-1]) for layer in embeddings.grid.layers}
    features = Features(
        {**dataset.features, **{f"layer_{layer}": List(Value(dtype), length=g.dim) for layer, g in widest.items()}}
    )

    def add(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
        return {
            f"layer_{layer}": prefix(embeddings.at(g, rows), g.dim, normalize).numpy().astype(dtype)
            for layer, g in widest.items()
        }

    return dataset.map(
        add, with_indices=True, batched=True, batch_size=ROWS_AT_ONCE, features=features, load_from_cache_file=False
    )


def main(arguments: list[str]) -> None:
    parser = HfArgumentParser(
        (EncoderArguments, EmbeddingArguments), description=__doc__, formatter_class=HelpFormatter
    )
    encoding, options = parser.parse_args_into_dataclasses(arguments)
    check(options)
    state = PartialState(cpu=not torch.cuda.is_available())
    with state.main_process_first():
        dataset = load_files(options.files)
    require_columns(dataset, fields_of(options.text_column))
    encoder = load_encoder(encoding, DTYPES[options.dtype])
    if options.normalize and any(len(encoder.grid.dims_of(layer)) > 1 for layer in encoder.grid.layers):
        raise ValueError(f"--normalize needs one dim a layer; the grid is {encoder.grid}.")
    separator = separator_for([options.text_column], encoder.tokenizer)
    texts = [joined_text(row, options.text_column, separator) for row in dataset]
    folder = Path(options.output_dir)
    arrays = folder if options.format == "npy" else folder / "arrays"
    embeddings = encoder.encode(
        texts, role="document" if options.document else "query", folder=arrays, description="Embedding"
    )
    if not state.is_main_process:
        return
    if options.format != "npy":
        dataset = with_vectors(dataset, embeddings, options.normalize, options.dtype)
        if options.format == "datasets":
            dataset.save_to_disk(str(folder / "dataset"))
        else:
            dataset.to_parquet(str(folder / "embeddings.parquet"))
        shutil.rmtree(arrays)
    print(f"{folder}: {len(texts):,} texts at {encoder.grid}")


if __name__ == "__main__":
    run_command(main)
    PartialState().destroy_process_group()
