"""
Loading a third of a checkpoint's layers: against loading all of them, and with exits against without.

    python -m benchmarks.elastic_loading

The model has the size of the paper's base model (12 layers, width 768), with a vocabulary of 32,000 so that the
embeddings do not dominate the layers. Memory is what loading and one forward pass add to a process of its own. Bytes
are those of the tensors that were read. The checkpoint with exits has one at every layer. The last line printed is a
JSON object. Takes a minute, and 3 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks._measure import about, resident_megabytes
from modeling_m3bert import M3BertConfig, M3BertModel


SEED = 0
# Name -> (checkpoint, arguments of from_pretrained).
VARIANTS = {
    "full": ("plain", {}),
    "4 layers": ("plain", {"output_layer": 4}),
    "4 layers, exits": ("exits", {"output_layer": 4}),
}


def report_added(folder: str, name: str) -> None:
    """Print the memory, in megabytes, that loading one variant and running it once add to this process, and the
    megabytes of its tensors."""
    checkpoint, arguments = VARIANTS[name]
    before = resident_megabytes()
    model = M3BertModel.from_pretrained(Path(folder, checkpoint), **arguments)
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long))  # touches every page of the layers
    print(resident_megabytes() - before, sum(tensor.nbytes for tensor in model.state_dict().values()) / 2**20)


def added_megabytes(folder: str, name: str) -> tuple[float, float]:
    """The same, measured in a separate process."""
    command = [sys.executable, "-m", "benchmarks.elastic_loading", "--folder", folder, "--memory", name]
    memory, read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:]
    return float(memory), float(read)


def measure() -> dict[str, tuple[float, float]]:
    """The memory that each variant adds, and the bytes that it reads, in megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(SEED)
        model = M3BertModel(M3BertConfig(vocab_size=32_000))
        model.save_pretrained(Path(folder, "plain"))
        width = model.config.hidden_size
        model.set_exits({layer: (torch.eye(width), torch.zeros(width)) for layer in range(13)})
        model.save_pretrained(Path(folder, "exits"))
        return {name: added_megabytes(folder, name) for name in VARIANTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder of the checkpoints, for --memory")
    parser.add_argument("--memory", choices=list(VARIANTS), help="print the memory of one variant only")
    options = parser.parse_args()
    if options.memory:
        report_added(options.folder, options.memory)
        return
    measured = measure()
    print("added memory, MB:", {name: round(memory) for name, (memory, _) in measured.items()})
    (full, _), (cut, cut_bytes), (exits, exit_bytes) = measured.values()
    ratios = {
        "memory_vs_full": round(cut / full, 3),
        "memory_with_exits": round(exits / cut, 3),
        "bytes_with_exits": round(exit_bytes / cut_bytes, 3),
    }
    print(json.dumps(ratios | about(SEED)))


if __name__ == "__main__":
    main()
