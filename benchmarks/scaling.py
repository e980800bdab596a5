"""
The calculator of `m3bert scaling` beside what it predicts: memory and bytes sent of a training step of stage 3.

    python -m benchmarks.scaling             # four minutes on two cores
    python -m benchmarks.scaling --quick     # smaller batches

1. One process: steps of a small m3BERT with the stage's 12 layers, grid (layers 4 and 12, dims 32, 64, 128), pairs,
   cached gradients and AdamW. Each case has its peak in another part of the step. What is counted is all that torch's
   allocator hands out in the second step and what is kept from the first: parameters, moments, gradients, inputs,
   activations. Work space inside of kernels is not in it. `memory_error` is the largest relative error of the cases.
2. Two processes with DDP, candidates gathered and in a ring: the same memory per process, and the bytes that the
   kernel counts on the TCP connections of a process in one step.

The last line printed is a JSON object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    in_new_process,
    in_new_processes,
    sent_bytes,
)
from modeling_m3bert import M3BertConfig, M3BertModel
from scripts.command import run_command
from trainers import Contrastive, Grid, NestedModel
from trainers.core.scaling_step import CANDIDATES, RING, STAGES, Stage, Step
from trainers.losses.candidates import TILE_SIZES


BOUNDS: Bounds = {
    "memory_error": at_most(0.10),
    "two_processes_memory_error": at_most(0.10),
    "two_processes_sent_error": at_most(0.10),
}
PROCESSES = 2
WARM_UP = 4  # pairs of a first step, which makes the optimizer's moments


@dataclass(frozen=True)
class Case:
    """A step: rows per process, tokens per text, and texts at a time; entries of the vocabulary, and switches."""

    pairs: int
    length: int
    mini_batch: int
    vocabulary: int = 8000
    checkpointing: bool = False
    cached: bool = True
    bfloat16: bool = False

    @property
    def config(self) -> M3BertConfig:
        """A narrow m3BERT without dropout, whose masks are not counted."""
        return M3BertConfig(
            vocab_size=self.vocabulary,
            hidden_size=128,
            intermediate_size=512,
            num_attention_heads=4,
            max_position_embeddings=64,
            embedding_dropout=0.0,
            attention_dropout=0.0,
        )

    def predicted(self, gpus: int, candidates: str) -> Step:
        """The step as the calculator sees it."""
        paper = STAGES[3]
        stage = Stage(self.pairs * gpus, paper.columns, paper.layers, paper.dims, self.length, self.length)
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
    pairs = 64 if quick else 256
    return {
        "cached gradients": Case(pairs, 32, 32),
        "cached, with checkpointing": Case(pairs, 32, 32, checkpointing=True),
        "cached, bfloat16": Case(pairs // 2, 32, 32, bfloat16=True),
        "all texts at once": Case(pairs // 4, 32, pairs, cached=False),
        "large vocabulary": Case(pairs, 16, 4, vocabulary=40_000),
        "many short pairs": Case(8 * pairs, 4, 16, vocabulary=500),
    }


def columns(case: Case, pairs: int) -> dict[str, dict[str, torch.Tensor]]:
    shape = (pairs, case.length)
    return {
        name: {
            "input_ids": torch.randint(3, case.vocabulary, shape),
            "attention_mask": torch.ones(shape, dtype=torch.long),
        }
        for name in ("query", "document")
    }


def train(case: Case, candidates: str = "gather", between: Callable[[], None] = lambda: None) -> None:
    """Two steps of a new model; `between` is called after the first and after the second."""
    torch.manual_seed(SEED)
    paper = STAGES[3]
    model = M3BertModel(case.config).train()
    if case.checkpointing:
        model.activation_checkpointing_enable(use_reentrant=False)
    objective = Contrastive(Grid.product(paper.layers, paper.dims), ring=candidates == RING)
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


def peak_megabytes(case: Case, candidates: str = "gather") -> float:
    return allocated_peak(partial(train, case, candidates))


def peak_and_sent(case: Case, candidates: str) -> tuple[float, int]:
    """Peak megabytes of a process, and the bytes that it sends in the second step."""
    counts: list[int] = []
    peak = allocated_peak(partial(train, case, candidates, lambda: counts.append(sent_bytes())))
    return peak, counts[1] - counts[0]


def megabytes(step: Step) -> float:
    return sum(step.memory().values()) / 2**20


def error(predicted: float, measured: float) -> float:
    """Relative error of a prediction."""
    return abs(predicted / measured - 1)


def measure(run: Run) -> dict[str, float]:
    errors = {}
    for name, case in cases(run.quick).items():
        found = in_new_process(partial(peak_megabytes, case), run.threads)
        expected = megabytes(case.predicted(1, "gather"))
        run.record(name, {"measured": found, "predicted": expected}, "megabytes")
        errors[name] = error(expected, found)
    memory_errors, sent_errors = [], []
    pairs = 256 if run.quick else 1024
    case = Case(pairs, 4, 16, vocabulary=500)
    for candidates in CANDIDATES:
        step = case.predicted(PROCESSES, candidates)
        sent = sum(step.communication().values())
        for found, counted in in_new_processes(partial(peak_and_sent, case, candidates), PROCESSES, threads=1):
            memory_errors.append(error(megabytes(step), found))
            sent_errors.append(error(sent, counted))
        name = f"two processes, {candidates}"
        run.record(name, {"measured": found, "predicted": megabytes(step)}, "megabytes")
        run.record(name, {"measured": counted, "predicted": sent}, "bytes sent")
    return {
        "memory_error": max(errors.values()),
        "two_processes_memory_error": max(memory_errors),
        "two_processes_sent_error": max(sent_errors),
    }


BENCHMARK = Benchmark("scaling", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
