"""
Memory of `m3bert embed --shard` on a part with ten times the documents.

    python -m benchmarks.bulk_embedding             # ten minutes on two cores
    python -m benchmarks.bulk_embedding --quick     # fewer documents

Documents are 4 to 40 random words. They are in one Parquet file, in row groups of 1,024, and so embedded in one part,
by the encoder of the extra `quickstart` at three layers. What is counted is the highest resident memory of a process
that runs the command, with Python and the encoder: `peak_ratio` is that with ten times the documents over that with
the smaller number, which already fills every buffer several times (once in a quick run). `added_ratio` is the same for
the memory that the command adds to a process with torch imported.

The last line printed is a JSON object.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from os import devnull
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most, in_new_process, resident_megabytes
from scripts import embed
from scripts.command import run_command
from trainers.evaluation.bulk import ROWS_AT_ONCE


BOUNDS: Bounds = {"peak_ratio": at_most(1.05), "added_ratio": None}
TIMES = 10
WORDS = "the a of to open read write file list name text is are not can from one two three path tree value".split()
SCHEMA = pa.schema({"id": pa.string(), "text": pa.string()})


def documents(count: int) -> Iterator[dict[str, list[str]]]:
    """Ids and texts, as many at a time as the command takes."""
    draw = random.Random(SEED)
    for start in range(0, count, ROWS_AT_ONCE):
        rows = range(start, min(count, start + ROWS_AT_ONCE))
        yield {
            "id": [f"d{row}" for row in rows],
            "text": [" ".join(draw.choices(WORDS, k=draw.randint(4, 40))) for _ in rows],
        }


def peaks(file: Path, output: Path) -> tuple[float, float]:
    """Highest resident megabytes of this process after embedding a file, and how many of them this added."""
    before = resident_megabytes()
    with open(devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        options = ["--grid", "2,4,6x64,384", "--format", "parquet", "--shard", "0/1", "--id_column", "id"]
        embed.main(["--files", str(file), "--output_dir", str(output), *options])
    peak = resident_megabytes("VmHWM")
    return peak, peak - before


def measure(run: Run) -> dict[str, float]:
    count = (1 if run.quick else 4) * ROWS_AT_ONCE
    found = {}
    with TemporaryDirectory() as folder:
        for documents_ in (count, TIMES * count):
            file = Path(folder, f"{documents_}.parquet")
            with pq.ParquetWriter(file, SCHEMA) as writer:
                for batch in documents(documents_):
                    writer.write_table(pa.table(batch, schema=SCHEMA))
            peak, added = in_new_process(partial(peaks, file, Path(folder, "parts")), run.threads)
            if (rows := pq.read_metadata(Path(folder, "parts", file.name)).num_rows) != documents_:
                raise ValueError(f"{rows:,} of {documents_:,} documents were embedded.")
            found[documents_] = run.record(f"{documents_:,} documents", {"peak": peak, "added": added}, "megabytes")
    few, many = found.values()
    return {f"{name}_ratio": many[name] / few[name] for name in few}


BENCHMARK = Benchmark("bulk_embedding", __doc__, BOUNDS, measure, packages=("pyarrow", "datasets"))


if __name__ == "__main__":
    run_command(BENCHMARK.main)
