"""
The multigranular masked-LM head against the double loop over (layer, dim) that it replaces, and against a plain head
of full width: time, peak memory, and equality of losses and gradients. Then whole training steps of the base model.

    python -m benchmarks.masked_lm_head               # ten minutes on two cores, and 12 GB
    python -m benchmarks.masked_lm_head --quick       # vocabulary 32,000, 256 tokens

Sizes are the paper's: vocabulary 250,002, width 768, layers 4, 8, 12, dims 32, 64, 128, 768; 1,024 tokens, 15% masked.
The last line printed is a JSON object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from benchmarks._measure import SEED, Benchmark, Bounds, Run, added_peak, at_most
from m3bert.commands.command import run_command
from m3bert.modeling import M3BertConfig, M3BertForMaskedLM
from m3bert.trainers import Grid, MultigranularMLM, NestedModel
from m3bert.trainers.m3bert_mlm.losses import nested_cross_entropy


BOUNDS: Bounds = {
    "time_vs_double_loop": at_most(0.33, one_thread=0.40),
    "memory_vs_double_loop": at_most(0.34),
    "memory_vs_plain_head": at_most(0.87),
    "step_vs_plain_mlm": at_most(1.7),
}
GRID = Grid.parse("4,8,12x32,64,128,768")
WIDTH = 768


@dataclass(frozen=True)
class Sizes:
    """Vocabulary, tokens of a batch, texts of a batch, and timings of each variant."""

    vocabulary: int
    tokens: int
    texts: int
    rounds: int

    @property
    def masked(self) -> int:
        return round(0.15 * self.tokens)


FULL, QUICK = Sizes(250_002, 1024, 8, 5), Sizes(32_000, 256, 2, 2)


class Head:
    """The inputs of a head, and three ways to compute its losses and gradients."""

    def __init__(self, sizes: Sizes) -> None:
        torch.manual_seed(SEED)
        self.masked = sizes.masked
        self.weight = torch.empty(sizes.vocabulary, WIDTH).normal_(std=0.02).requires_grad_()
        self.bias = torch.zeros(sizes.vocabulary, requires_grad=True)
        self.states = torch.randn(len(GRID.layers), self.masked, WIDTH, requires_grad=True)
        self.targets = torch.randint(sizes.vocabulary, (self.masked,))

    def gradients(self, losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (losses.detach(), *torch.autograd.grad(losses.sum(), (self.states, self.weight, self.bias)))

    def nested(self) -> tuple[torch.Tensor, ...]:
        rows, targets = self.states.flatten(0, 1), self.targets.repeat(len(GRID.layers))
        losses = nested_cross_entropy(rows, self.weight, self.bias, targets, dims=GRID.dims)
        return self.gradients(losses.view(len(GRID.layers), self.masked, len(GRID.dims)).mean(dim=1).flatten())

    def double_loop(self) -> tuple[torch.Tensor, ...]:
        losses = []
        for state in self.states:
            for dim in GRID.dims:
                logits = functional.linear(state[:, :dim], self.weight[:, :dim], self.bias)
                losses.append(functional.cross_entropy(logits, self.targets))
        return self.gradients(torch.stack(losses))

    def plain(self) -> tuple[torch.Tensor, ...]:
        logits = functional.linear(self.states[-1], self.weight, self.bias)
        return self.gradients(functional.cross_entropy(logits, self.targets)[None])


VARIANTS: dict[str, Callable[[Head], object]] = {
    "nested": Head.nested,
    "double loop": Head.double_loop,
    "plain": Head.plain,
}


def peak_of(name: str, sizes: Sizes) -> float:
    """The peak memory that one variant adds to its inputs."""
    head = Head(sizes)
    return added_peak(lambda: VARIANTS[name](head))


def check_equal(head: Head) -> None:
    """
    Compare losses and gradients with those of the double loop.

    Raises:
        ValueError: if a difference is above 1e-5 of the largest entry.
    """
    worst = 0.0
    for ours, reference in zip(head.nested(), head.double_loop(), strict=True):
        worst = max(worst, ((ours - reference).abs().max() / reference.abs().max()).item())
    print(f"largest relative difference from the double loop: {worst:.1e}", flush=True)
    if worst > 1e-5:
        raise ValueError(f"The nested head differs from the double loop by {worst:.1e}, more than 1e-5.")


def training_steps(sizes: Sizes) -> dict[str, Callable[[], None]]:
    """Training steps of the base model: forward, backward, AdamW."""
    torch.manual_seed(SEED)
    model = M3BertForMaskedLM(M3BertConfig(vocab_size=sizes.vocabulary, sparse_prediction=True)).train()
    multigranular = NestedModel(model, MultigranularMLM(GRID))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(5, sizes.vocabulary, (sizes.texts, sizes.tokens // sizes.texts))
    labels = torch.full_like(ids, -100).flatten()
    labels[torch.randperm(sizes.tokens)[: sizes.masked]] = torch.randint(sizes.vocabulary, (sizes.masked,))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels.view_as(ids)}

    def step(module: nn.Module) -> None:
        module(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"multigranular": lambda: step(multigranular), "plain": lambda: step(model)}


def measure(run: Run) -> dict[str, float]:
    sizes = QUICK if run.quick else FULL
    memory = run.memory("peak memory of the head", {name: partial(peak_of, name, sizes) for name in VARIANTS})
    head = Head(sizes)
    check_equal(head)
    seconds = run.time("head", {name: partial(variant, head) for name, variant in VARIANTS.items()}, sizes.rounds)
    del head
    steps = run.time("training step of the base model", training_steps(sizes), sizes.rounds)
    return {
        "time_vs_double_loop": seconds["nested"] / seconds["double loop"],
        "memory_vs_double_loop": memory["nested"] / memory["double loop"],
        "memory_vs_plain_head": memory["nested"] / memory["plain"],
        "step_vs_plain_mlm": steps["multigranular"] / steps["plain"],
    }


BENCHMARK = Benchmark("masked_lm_head", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
