"""
Embed texts at every granularity of a grid, in one pass, to files:

    m3bert embed --files corpus.jsonl --grid "2,4,6x64,384" --output_dir runs/vectors
    accelerate launch --num_processes 2 --cpu -m m3bert embed ...           # several processes fill the same arrays

There is one vector per text and layer, as wide as the layer's widest dim; smaller dims are prefixes of it. To resume
an interrupted run, start it again.

Collections that do not fit into memory are embedded file by file, by any number of machines:

    m3bert embed --files parts/*.parquet --shard 0/4 --output_dir runs/parts                # and 1/4, 2/4, 3/4

Start a share again after it was interrupted: files that are complete are skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, Features, List, Value

from trainers import Granularity, truncate
from trainers.core.dataset_checks import require_columns
from trainers.core.durable import only_writer, replacing
from trainers.core.streams.stream import Stream
from trainers.data.collators import fields_of, joined_text, separator_for
from trainers.data.files import load_files, stream_files
from trainers.evaluation import GridEmbeddings
from trainers.evaluation.bulk import GridEmbedder, embed_part, is_embedded, keep_memory_flat, share_of

from .command import parse_options, run_command
from .encoder import EncoderArguments, ReadingArguments, load_encoder


FORMATS = ("npy", "datasets", "parquet")
DTYPES = {"float32": torch.float32, "float16": torch.float16}
ROWS_AT_ONCE = 1000


@dataclass
class EmbeddingArguments:
    """What to embed, and where to."""

    files: list[str] = field(
        default_factory=list, metadata={"help": "Texts: .txt, .jsonl, .csv or .parquet files, also gzipped."}
    )
    text_column: str = field(
        default="text",
        metadata={"help": "Column with the text; title+text joins two columns with the separator, as in training."},
    )
    output_dir: str = field(default="runs/vectors", metadata={"help": "Folder for the vectors."})
    format: str | None = field(
        default=None,
        metadata={
            "help": "npy: one array per layer, for memory-mapping. datasets, parquet: the rows of the files, with one "
            "column per layer added. Default: npy, or parquet with --shard."
        },
    )
    dtype: str = field(default="float32", metadata={"help": "float32 or float16."})
    document: bool = field(default=False, metadata={"help": "Treat the texts as documents: use --document_prompt."})
    shard: str | None = field(
        default=None,
        metadata={
            "help": "i/n: embed one of n shares of the files as a stream, each file into a Parquet file of the same "
            "name. Files that are there already are skipped."
        },
    )
    id_column: str | None = field(
        default=None,
        metadata={"help": "With --shard: the column with the ids, which every row must have. Default: none."},
    )
    normalize: bool = field(
        default=False,
        metadata={"help": "L2-normalise the vectors. Needs a grid with one dim per layer, and datasets or parquet."},
    )

    def __post_init__(self) -> None:
        if self.format is None:
            self.format = "npy" if self.shard is None else "parquet"


def check(options: EmbeddingArguments) -> None:
    """
    Check the options before any work is done.

    Raises:
        ValueError: names the option and its legal values.
    """
    if not options.files:
        raise ValueError("Nothing to embed: pass --files FILE ...")
    if options.format not in FORMATS:
        raise ValueError(f"--format {options.format} is unknown; legal values: {', '.join(FORMATS)}.")
    if options.dtype not in DTYPES:
        raise ValueError(f"--dtype {options.dtype} is unknown; legal values: {', '.join(DTYPES)}.")
    if options.shard is not None:
        if options.format != "parquet":
            raise ValueError("--shard needs --format parquet.")
        share_of(options.files, options.shard)
        check_outputs(options.files, Path(options.output_dir))
    elif options.id_column is not None:
        raise ValueError("--id_column needs --shard.")
    if options.normalize and options.format == "npy":
        raise ValueError("--normalize needs --format datasets or --format parquet.")


def check_outputs(files: Sequence[str], folder: Path) -> None:
    """
    Check that each input file has an output file of its own.

    Raises:
        ValueError: names two files with the same output, or a file that would be its own output.
    """
    inputs: dict[str, str] = {}
    for file in files:
        name = output_name(file)
        if name in inputs:
            raise ValueError(
                f"--shard writes a file per input file, but two would have the name {name}: {inputs[name]} and {file}."
            )
        inputs[name] = file
        if (folder / name).resolve() == Path(file).resolve():
            raise ValueError(f"--shard would replace its input {file}: choose another --output_dir.")


def with_vectors(dataset: Dataset, embeddings: GridEmbeddings, normalize: bool, dtype: str) -> Dataset:
    """The rows with one column `layer_{l}` per layer, made in batches so that little memory is used."""
    widest = {layer: Granularity(layer, embeddings.grid.dims_of(layer)[-1]) for layer in embeddings.grid.layers}
    features = Features(
        {**dataset.features, **{f"layer_{layer}": List(Value(dtype), length=g.dim) for layer, g in widest.items()}}
    )

    def add(batch: dict[str, Any], rows: list[int]) -> dict[str, Any]:
        return {
            f"layer_{layer}": truncate(embeddings.at(g, rows), g.dim, normalize).numpy().astype(dtype)
            for layer, g in widest.items()
        }

    return dataset.map(
        add, with_indices=True, batched=True, batch_size=ROWS_AT_ONCE, features=features, load_from_cache_file=False
    )


def embed(encoding: EncoderArguments, options: EmbeddingArguments, state: PartialState) -> None:
    """
    Embed the texts of all files, by all processes together.

    Raises:
        ValueError: if the encoder or the texts do not suit the options.
    """
    with state.main_process_first():
        dataset = load_files(options.files)
    require_columns(dataset, fields_of(options.text_column))
    encoder = load_encoder(encoding, DTYPES[options.dtype])
    if options.normalize and any(len(encoder.grid.dims_of(layer)) > 1 for layer in encoder.grid.layers):
        raise ValueError(f"--normalize needs a grid with one dim per layer; this grid is {encoder.grid}.")
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
            draft = folder / "dataset.draft"
            shutil.rmtree(draft, ignore_errors=True)  # of a killed process
            dataset.save_to_disk(str(draft))
            shutil.rmtree(folder / "dataset", ignore_errors=True)
            os.replace(draft, folder / "dataset")
        else:
            with replacing(folder / "embeddings.parquet") as draft:
                dataset.to_parquet(str(draft))
        shutil.rmtree(arrays)
    print(f"{folder}: {len(texts):,} texts at {encoder.grid}")


def output_name(file: str) -> str:
    """Name of the output of an input file: that of `rows.jsonl.gz` is `rows.parquet`."""
    return Path(file.removesuffix(".gz")).with_suffix(".parquet").name


def embed_share(encoding: EncoderArguments, options: EmbeddingArguments) -> None:
    """
    Embed one share of the files, a file at a time.

    Raises:
        ValueError: if the encoder or a text does not suit the options, or a file that is there already was made from
            other data or with other settings.
    """
    keep_memory_flat()
    reading = {name: getattr(encoding, name) for name in ReadingArguments.__dataclass_fields__ if name != "batch_size"}
    chosen = {name: getattr(options, name) for name in ("text_column", "dtype", "document", "normalize")}
    settings = {**reading, **chosen, "compute_dtype": encoding.compute_dtype}
    load = partial(load_encoder, encoding, DTYPES[options.dtype])
    embedder = GridEmbedder(load, options.text_column, "document" if options.document else "query", options.normalize)
    ids = [] if options.id_column is None else [options.id_column]
    for part in stream_files(share_of(options.files, options.shard or "0/1")).shards:
        file = Path(options.output_dir) / output_name(part.name)
        if is_embedded(part, file, settings):
            print(f"{file}: is there already")
            continue
        try:
            require_columns(Stream([part]), [*fields_of(options.text_column), *ids])
        except ValueError as error:
            raise ValueError(f"{part.name}: {error}") from error
        if options.normalize and any(len(embedder.encoder.grid.dims_of(n)) > 1 for n in embedder.encoder.grid.layers):
            raise ValueError(f"--normalize needs a grid with one dim per layer; not {embedder.encoder.grid}.")
        rows = embed_part(part, file, embedder, settings, options.id_column)
        print(f"{file}: {rows:,} texts", flush=True)


def main(arguments: list[str]) -> None:
    encoding, options = parse_options((EncoderArguments, EmbeddingArguments), __doc__, arguments)
    check(options)
    if options.shard is not None:
        embed_share(encoding, options)
        return
    is_ours = not torch.distributed.is_initialized()
    state = PartialState(cpu=encoding.uses_cpu)
    try:
        # The arrays of npy have a lock of their own.
        locked = options.format != "npy" and state.is_main_process
        with only_writer(Path(options.output_dir)) if locked else nullcontext():
            embed(encoding, options, state)
    finally:
        if is_ours:  # a process group that is left over ends some runs with warnings or an abort
            state.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
