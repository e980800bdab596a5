"""
Loading a third of a checkpoint's layers against loading all of them: the memory that loading and one forward pass add.

    python -m benchmarks.elastic_loading

The model has the size of the paper's base model (12 layers, width 768), with a vocabulary of 32,000 so that the
embeddings do not dominate the layers. The last line printed is a JSON object. Takes half a minute, and 2 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile

import torch

from benchmarks._measure import about, resident_megabytes
from modeling_m3bert import M3BertConfig, M3BertModel


SEED = 0
ARGUMENTS = {"full": {}, "4 layers": {"output_layer": 4}}


def report_added(folder: str, name: str) -> None:
    """Print the memory, in megabytes, that loading one variant and running it once add to this process."""
    before = resident_megabytes()
    model = M3BertModel.from_pretrained(folder, **ARGUMENTS[name])
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long))  # touches every page of the layers
    print(resident_megabytes() - before)


def added_megabytes(folder: str, name: str) -> float:
    """The same, measured in a separate process."""
    command = [sys.executable, "-m", "benchmarks.elastic_loading", "--folder", folder, "--memory", name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def measure() -> dict[str, float]:
    """The memory that each variant adds, in megabytes."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(SEED)
        M3BertModel(M3BertConfig(vocab_size=32_000)).save_pretrained(folder)
        return {name: added_megabytes(folder, name) for name in ARGUMENTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="checkpoint to load, for --memory")
    parser.add_argument("--memory", choices=list(ARGUMENTS), help="print the memory of one variant only")
    options = parser.parse_args()
    if options.memory:
        report_added(options.folder, options.memory)
        return
    added = measure()
    print("added memory, MB:", {name: round(value) for name, value in added.items()})
    print(json.dumps({"memory_vs_full": round(added["4 layers"] / added["full"], 3)} | about(SEED)))


if __name__ == "__main__":
    main()
