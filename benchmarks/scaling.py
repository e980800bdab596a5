"""
The calculator of benchmarks/plan.py beside what it predicts: memory and bytes sent of a training step of stage 3.

    python -m benchmarks.scaling             # four minutes on two cores
    python -m benchmarks.scaling --quick     # smaller batches

1. One process: steps of a small m3BERT with the stage's 12 layers, grid (layers 4 and 12, dims 32, 64, 128), pairs,
   cached gradients and AdamW. Each case has its peak in another part of the step. What is counted is all that torch's
   allocator hands out in the second step and what is kept from the first: parameters, moments, gradients, inputs,
   activations. Work space inside of kernels is not in it. `memory_error` is the largest relative error of the cases.
2. Two processes with DDP, candidates gathered and in a ring: the same memory per process, of a step and of the loss
   alone, and the bytes that Linux counts on the TCP connections of a process in one step.

The last line printed is a JSON object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import distributed, nn

from benchmarks._measure import (
    SEED,
    Benchmark,
    Bounds,
    Run,
    allocated_peak,
    at_most,
    in_new_processes,
    sent_bytes,
)
from benchmarks.plan import CANDIDATES, GATHER, PAPER, RING, Step, total
from modeling_m3bert import M3BertConfig, M3BertModel
from scripts.command import run_command
from trainers import Contrastive, Grid, NestedBatch, NestedModel
from trainers.core.states import PooledStates
from trainers.losses.candidates import TILE_SIZES


BOUNDS: Bounds = {
    "memory_error": at_most(0.10),
    "two_processes_memory_error": at_most(0.10),
    "two_processes_sent_error": at_most(0.10),
}
PROCESSES = 2
REPEATS = 3  # of the loss: a tensor that a thread of gloo frees is not seen to be freed, so the smallest peak counts
WARM_UP = 4  # pairs of a first step, which makes the optimizer's moments


@dataclass(frozen=True)
class Case:
    """A step: rows per process, tokens per text, and texts at a time; entries of the vocabulary, and switches."""

    pairs: int
    length: int
    mini_batch: int
    vocabulary: int = 8000
    width: int = 128
    checkpointing: bool = False
    cached: bool = True
    bfloat16: bool = False

    @property
    def config(self) -> M3BertConfig:
        """A narrow m3BERT without dropout, whose masks are not counted."""
        return M3BertConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_attention_heads=4,
            max_position_embeddings=64,
            embedding_dropout=0.0,
            attention_dropout=0.0,
        )

    def predicted(self, gpus: int, candidates: str) -> Step:
        """The step as the calculator sees it."""
        stage = replace(PAPER, batch=self.pairs * gpus, length=self.length, tokens=self.length)
        return Step(
            self.config,
            stage,
            gpus,
            self.mini_batch,
            candidates=candidates,
            checkpointing=self.checkpointing,
            cached=self.cached,
            compute_bytes=2 if self.bfloat16 else 4,
            fused_norms=False,
            tile_size=TILE_SIZES["cpu"],
        )


def cases(quick: bool) -> dict[str, Case]:
    """Name -> case."""
    pairs = 24 if quick else 96
    return {
        "cached gradients": Case(pairs, 32, 32),
        "cached, with checkpointing": Case(pairs, 32, 32, checkpointing=True),
        "cached, bfloat16": Case(pairs // 2, 32, 32, bfloat16=True),
        "all texts at once": Case(32, 32, 32, cached=False),
        "large vocabulary": Case(pairs, 16, 4, vocabulary=40_000),
        "many short pairs": Case(8 * pairs, 4, 16, vocabulary=500),
    }


def two_process_cases(quick: bool) -> tuple[Case, Case]:
    """A step, and a larger batch for the loss alone."""
    pairs = 32 if quick else 256
    return Case(pairs, 4, 16, vocabulary=500), Case(8 * pairs, 4, 16, vocabulary=500, width=256)


def columns(case: Case, pairs: int) -> dict[str, dict[str, torch.Tensor]]:
    shape = (pairs, case.length)
    return {
        name: {
            "input_ids": torch.randint(3, case.vocabulary, shape),
            "attention_mask": torch.ones(shape, dtype=torch.long),
            "text_ids": torch.arange(pairs) // 2,  # every text twice
        }
        for name in ("query", "document")
    }


def train(case: Case, candidates: str = GATHER, between: Callable[[], None] = lambda: None) -> None:
    """Two steps of a new model; `between` is called after the first and after the second."""
    torch.manual_seed(SEED)
    model = M3BertModel(case.config).train()
    if case.checkpointing:
        model.activation_checkpointing_enable()
    objective = Contrastive(Grid.product(PAPER.layers, PAPER.dims), ring=candidates == RING)
    nested: nn.Module = NestedModel(model, objective, case.mini_batch if case.cached else None)
    optimizer = torch.optim.AdamW(nested.parameters(), fused=True)
    if distributed.is_initialized():
        nested = nn.parallel.DistributedDataParallel(nested)
    for pairs in (WARM_UP, case.pairs):
        batch = columns(case, pairs)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bfloat16):
            loss = nested(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        between()


def contrast(case: Case, candidates: str) -> None:
    """The loss of pooled embeddings, forward and backward."""
    width = case.config.hidden_size
    texts = {
        name: PooledStates({layer: torch.randn(case.pairs, width).requires_grad_() for layer in PAPER.layers}, "mean")
        for name in ("query", "document")
    }
    objective = Contrastive(Grid.product(PAPER.layers, PAPER.dims), ring=candidates == RING)
    same = torch.arange(case.pairs) // 2  # every text twice
    objective.total(objective(NestedBatch(texts, dict.fromkeys(texts, same)))).backward()


def of_a_process(step: Case, loss: Case, candidates: str) -> tuple[float, float, int]:
    """Peak megabytes of a step and of a loss, and the bytes that the second step sends."""
    counts: list[int] = []
    peak = allocated_peak(partial(train, step, candidates, lambda: counts.append(sent_bytes())))
    loss_peak = min(allocated_peak(partial(contrast, loss, candidates)) for _ in range(REPEATS))
    return peak, loss_peak, counts[1] - counts[0]


def megabytes(parts: Mapping[str, float]) -> float:
    return total(parts) / 2**20


def error(predicted: float, measured: float) -> float:
    """Relative error of a prediction."""
    return abs(predicted / measured - 1)


def measure(run: Run) -> dict[str, float]:
    errors = {}
    for name, case in cases(run.quick).items():
        found = allocated_peak(partial(train, case))
        expected = megabytes(case.predicted(1, GATHER).memory())
        run.record(name, {"measured": found, "predicted": expected}, "megabytes")
        errors[name] = error(expected, found)
    memory_errors, sent_errors = [], []
    case, loss = two_process_cases(run.quick)
    for candidates in CANDIDATES:
        step, alone = (each.predicted(PROCESSES, candidates) for each in (case, loss))
        processes = in_new_processes(partial(of_a_process, case, loss, candidates), PROCESSES, threads=1)
        peaks, loss_peaks, sent = zip(*processes, strict=True)
        for name, parts, measured in (("a step", step.memory(), peaks), ("the loss", alone.loss_bytes(), loss_peaks)):
            # Both processes do the same, so the smaller peak counts; see REPEATS.
            values = {"measured": min(measured), "predicted": megabytes(parts)}
            run.record(f"two processes, {candidates}: {name}", values, "megabytes")
            memory_errors.append(error(values["predicted"], values["measured"]))
        values = {"measured": max(sent), "predicted": total(step.communication())}
        run.record(f"two processes, {candidates}: a step", values, "bytes sent")
        sent_errors.append(error(values["predicted"], values["measured"]))
    return {
        "memory_error": max(errors.values()),
        "two_processes_memory_error": max(memory_errors),
        "two_processes_sent_error": max(sent_errors),
    }


BENCHMARK = Benchmark("scaling", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
