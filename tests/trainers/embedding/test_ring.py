"""Candidates in a ring are candidates that are gathered: losses, gradients, masks; and memory that does not grow."""

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile

from m3bert.encode.ranks import RankRows, rank, world_size
from m3bert.encode.states import PooledStates
from m3bert.trainers import Grid, NestedBatch
from m3bert.trainers.contrastive.contrastive import Contrastive
from m3bert.trainers.embedding.info_nce import nested_info_nce


ROWS, DIMS, TILE = 13, (2, 5, 8), (2, 3)
# Number of processes -> rows of each.
SPLITS = {2: (5, 8), 4: (4, 1, 2, 6)}
WITH_AN_EMPTY_RANK = {2: (13, 0), 4: (4, 1, 0, 8)}
CASES = [
    (columns, masked, dtype, autocast)
    for columns in (1, 2)
    for masked in (False, True)
    for dtype, autocast in ((torch.float64, False), (torch.float32, True), (torch.bfloat16, False))
]


def inputs(columns: int, masked: bool, dtype: torch.dtype) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """Anchors, candidates and ids of the whole batch; every id occurs several times."""
    generator = torch.Generator().manual_seed(3)
    vectors = [torch.randn(ROWS, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(columns + 1)]
    ids = [torch.randint(9, (ROWS, 2), generator=generator) for _ in range(columns)]
    weights = torch.randn(ROWS, len(DIMS), generator=generator, dtype=torch.float64)
    return {"anchors": vectors[0], "columns": vectors[1:], "ids": ids if masked else [], "weights": weights}


def rows_of(counts: tuple[int, ...], rank: int) -> slice:
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def part(rows: slice, case: tuple) -> dict[str, torch.Tensor]:
    """Losses and gradients for some rows of the batch: of the ring if they are those of a rank."""
    columns, masked, dtype, autocast = case
    whole = inputs(columns, masked, dtype)
    anchors = whole["anchors"][rows].clone().requires_grad_()
    candidates = [column[rows].clone().requires_grad_() for column in whole["columns"]]
    ids = [column[rows] for column in whole["ids"]]
    temperature = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    arguments = {"dims": DIMS, "temperature": temperature, "tile_size": TILE}
    if masked:
        arguments |= {"anchor_ids": ids[0], "candidate_ids": torch.cat(ids)}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if world_size() == 1:
            losses = nested_info_nce(anchors, torch.cat(candidates), **arguments)
        else:
            where = RankRows.of(len(anchors), anchors.device)
            losses = nested_info_nce(anchors, torch.cat(candidates), ring=where.ring(columns), **arguments)
    (losses * whole["weights"][rows]).sum().backward()
    found = {"losses": losses.detach(), "anchors": anchors.grad, "temperature": temperature.grad}
    return found | {f"column {index}": column.grad for index, column in enumerate(candidates)}


def in_new_processes(function: Callable[[], Any], number: int) -> list[Any]:
    """What a function returns in each of several new processes, which speak to each other with gloo over TCP."""
    with TemporaryDirectory() as folder, ProcessPoolExecutor(number, get_context("forkserver")) as pool:
        running = [pool.submit(as_rank, function, rank, number, f"file://{folder}/store") for rank in range(number)]
        return [process.result() for process in running]


def as_rank(function: Callable[[], Any], rank: int, number: int, store: str) -> Any:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=number)
    result = function()
    distributed.barrier()
    distributed.destroy_process_group()
    return result


def of_one_rank(folder: Path) -> None:
    """Everything for the rows of this rank."""
    rows, few = (rows_of(splits[world_size()], rank()) for splits in (SPLITS, WITH_AN_EMPTY_RANK))
    found = [part(few if case is CASES[-1] else rows, case) for case in CASES]
    torch.save(found, folder / f"{rank()}.pt")


@pytest.fixture(scope="module", params=list(SPLITS))
def ranks(request, tmp_path_factory) -> list[list[dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("ring")
    in_new_processes(partial(of_one_rank, folder), request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_losses_and_gradients_are_those_of_all_candidates_at_once(ranks, case):
    expected = part(slice(None), CASES[case])
    found = [rank[case] for rank in ranks]
    for name, value in expected.items():
        if name == "temperature":
            actual = sum(own[name] for own in found)
        else:
            actual = torch.cat([own[name] for own in found])
        assert actual.dtype == value.dtype
        # A gradient is rounded to the precision of its embedding once, after the sum.
        tolerance = 1e-2 if value.dtype == torch.bfloat16 else 1e-6
        largest = value.abs().max().item()
        torch.testing.assert_close(
            actual, value, atol=tolerance * largest, rtol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def peak_of_loss(ring: bool) -> float:
    """The peak memory, in megabytes of torch's allocator, of embeddings, a loss and its gradients on this rank."""

    def step() -> None:
        texts = {name: torch.randn(512, 1024).requires_grad_() for name in ("anchor", "positive")}
        objective = Contrastive(Grid.parse("1x8,1024"), ring=ring)
        batch = NestedBatch({name: PooledStates({1: vectors}, "mean") for name, vectors in texts.items()})
        objective.total(objective(batch)).backward()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    with TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    return max(itertools.accumulate((size for _, size in changes), initial=0)) / 2**20


@pytest.mark.slow
def test_a_ring_takes_less_memory_the_more_ranks_there_are():
    """512 candidates of 1,024 dims take 2 MB. In a ring of more than two ranks, a second block is on its way."""
    peaks = {
        (ring, ranks): max(in_new_processes(partial(peak_of_loss, ring), ranks))
        for ring in (False, True)
        for ranks in (2, 4)
    }
    assert peaks[True, 4] < peaks[True, 2] + 1.1 * 2
    # Two more ranks are two more blocks, gathered and as gradients.
    assert peaks[False, 4] > peaks[False, 2] + 0.9 * 2 * 2 * 2
    assert peaks[True, 4] < 0.5 * peaks[False, 4]
