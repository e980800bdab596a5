"""
Loading a third of a checkpoint's layers: against loading all of them, and with exits against without.

    python -m benchmarks.elastic_loading              # a minute, and 3 GB
    python -m benchmarks.elastic_loading --quick      # width 384, vocabulary 8,000

The model has the size of the paper's base model (12 layers, width 768), with a vocabulary of 32,000 so that the
embeddings do not dominate the layers. Memory is what loading and one forward pass add to a process of its own. Bytes
are those of the tensors that were read. The checkpoint with exits has one at every layer. The last line printed is a
JSON object.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most, in_new_process, resident_megabytes
from m3bert.commands.command import run_command
from m3bert.modeling import M3BertConfig, M3BertModel


BOUNDS: Bounds = {
    "memory_vs_full": at_most(0.60),
    "memory_with_exits": at_most(1.02),
    "bytes_with_exits": at_most(1.02),
}
FULL: dict[str, int] = {"vocab_size": 32_000}
QUICK = {"vocab_size": 8000, "hidden_size": 384, "intermediate_size": 1536}
# Name -> (checkpoint, arguments of from_pretrained).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("plain", {}),
    "4 layers": ("plain", {"output_layer": 4}),
    "4 layers, exits": ("exits", {"output_layer": 4}),
}


def added_megabytes(folder: str, name: str) -> tuple[float, float]:
    """The memory, in megabytes, that loading one variant and running it once add to this process, and the megabytes
    of its tensors."""
    checkpoint, arguments = VARIANTS[name]
    before = resident_megabytes()
    model = M3BertModel.from_pretrained(Path(folder, checkpoint), **arguments)
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long))  # touches every page of the layers
    added = resident_megabytes() - before
    return added, sum(tensor.nbytes for tensor in model.state_dict().values()) / 2**20


def measure(sizes: dict[str, int] = FULL) -> dict[str, tuple[float, float]]:
    """The memory that each variant adds in a process of its own, and the bytes that it reads, in megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(SEED)
        model = M3BertModel(M3BertConfig(**sizes))
        model.save_pretrained(Path(folder, "plain"))
        width = model.config.hidden_size
        model.set_depths(exits={layer: (torch.eye(width), torch.zeros(width)) for layer in range(1, 13)})
        model.save_pretrained(Path(folder, "exits"))
        return {
            name: in_new_process(partial(added_megabytes, folder, name), torch.get_num_threads()) for name in VARIANTS
        }


def figures(run: Run) -> dict[str, float]:
    measured = measure(QUICK if run.quick else FULL)
    added = {name: memory for name, (memory, _) in measured.items()}
    run.record("added by loading and one forward pass", added, "megabytes")
    (full, _), (cut, cut_bytes), (exits, exit_bytes) = measured.values()
    return {
        "memory_vs_full": cut / full,
        "memory_with_exits": exits / cut,
        "bytes_with_exits": exit_bytes / cut_bytes,
    }


BENCHMARK = Benchmark("elastic_loading", __doc__, BOUNDS, figures)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
