"""
The multigranular masked-LM head against the double loop over (layer, dim) that it replaces, and against a plain head
of full width: time, peak memory, and equality of losses and gradients. Then whole training steps of the base model.

    python -m benchmarks.masked_lm_head

Sizes are the paper's: vocabulary 250,002, width 768, layers 4, 8, 12, dims 32, 64, 128, 768; 1,024 tokens, 15% masked.
The last line printed is a JSON object. Takes about ten minutes on two cores, and 12 GB.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import nn
from torch.nn import functional

from benchmarks._measure import about, peak_megabytes, report_peak
from modeling_m3bert import M3BertConfig, M3BertForMaskedLM
from trainers import Grid, MultigranularMLM, NestedModel
from trainers.evaluation.latency import seconds_in_turn
from trainers.losses import nested_cross_entropy


GRID = Grid.parse("4,8,12x32,64,128,768")
VOCABULARY, WIDTH, TOKENS = 250_002, 768, 1024
MASKED = round(0.15 * TOKENS)
SEED = 0


class Head:
    """The inputs of a head, and three ways to compute its losses and gradients."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.weight = torch.empty(VOCABULARY, WIDTH).normal_(std=0.02).requires_grad_()
        self.bias = torch.zeros(VOCABULARY, requires_grad=True)
        self.states = torch.randn(len(GRID.layers), MASKED, WIDTH, requires_grad=True)
        self.targets = torch.randint(VOCABULARY, (MASKED,))

    def gradients(self, losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (losses.detach(), *torch.autograd.grad(losses.sum(), (self.states, self.weight, self.bias)))

    def nested(self) -> tuple[torch.Tensor, ...]:
        rows, targets = self.states.flatten(0, 1), self.targets.repeat(len(GRID.layers))
        losses = nested_cross_entropy(rows, self.weight, self.bias, targets, dims=GRID.dims)
        return self.gradients(losses.view(len(GRID.layers), MASKED, len(GRID.dims)).mean(dim=1).flatten())

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


def check_equal(head: Head) -> float:
    """The largest difference from the double loop's losses and gradients, relative to the largest entry of each."""
    worst = 0.0
    for ours, reference in zip(head.nested(), head.double_loop(), strict=True):
        worst = max(worst, ((ours - reference).abs().max() / reference.abs().max()).item())
    return worst


def time_steps(rounds: int) -> dict[str, float]:
    """Seconds per training step of the base model: forward, backward, AdamW."""
    torch.manual_seed(SEED)
    model = M3BertForMaskedLM(M3BertConfig(sparse_prediction=True)).train()
    multigranular = NestedModel(model, MultigranularMLM(GRID))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(5, VOCABULARY, (8, TOKENS // 8))
    labels = torch.full_like(ids, -100).flatten()
    labels[torch.randperm(TOKENS)[:MASKED]] = torch.randint(VOCABULARY, (MASKED,))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels.view_as(ids)}

    def step(module: nn.Module) -> None:
        module(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds_in_turn({"multigranular": lambda: step(multigranular), "plain": lambda: step(model)}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timings of each variant")
    parser.add_argument(
        "--memory", choices=["nested", "double_loop", "plain"], help="print the peak memory of one variant only"
    )
    options = parser.parse_args()
    if options.memory:
        report_peak(lambda: getattr(Head(), options.memory)())
        return

    memory = {name: peak_megabytes("benchmarks.masked_lm_head", name) for name in ("nested", "double_loop", "plain")}
    print("peak memory, MB:", {name: round(value) for name, value in memory.items()}, flush=True)
    head = Head()
    difference = check_equal(head)
    print(f"largest relative difference from the double loop: {difference:.1e}", flush=True)
    if difference > 1e-5:
        raise ValueError(f"The nested head differs from the double loop by {difference:.1e}, more than 1e-5.")
    variants = {"nested": head.nested, "double_loop": head.double_loop, "plain": head.plain}
    seconds = seconds_in_turn(variants, options.rounds)
    print("head, median seconds:", {name: round(value, 2) for name, value in seconds.items()}, flush=True)
    del head, variants
    steps = time_steps(options.rounds)
    print("step, median seconds:", {name: round(value, 2) for name, value in steps.items()}, flush=True)
    result = {
        "time_vs_double_loop": seconds["nested"] / seconds["double_loop"],
        "memory_vs_double_loop": memory["nested"] / memory["double_loop"],
        "memory_vs_plain_head": memory["nested"] / memory["plain"],
        "step_vs_plain_mlm": steps["multigranular"] / steps["plain"],
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()} | about(SEED)))


if __name__ == "__main__":
    main()
