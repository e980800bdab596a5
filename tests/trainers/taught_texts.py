"""Pooled embeddings of two text columns with a teacher's embeddings of each, and how a loss of them is compared."""

from collections.abc import Callable

import torch

from m3bert.encode.states import PooledStates
from m3bert.trainers import Grid, NestedBatch, Objective
from m3bert.trainers.core.objective import Terms


Make = Callable[[], Objective]


GRID = Grid.parse("2x4,3x8")
WIDTH, TEACHER, ROWS = 8, 6, 7
COLUMNS = ("first", "second")


def make_batch(dtype: torch.dtype = torch.float64, repeats: bool = False, rows: int = ROWS) -> NestedBatch:
    """Two columns of pooled texts at three layers and the embedding layer, with a teacher's embeddings of each."""
    torch.manual_seed(11)
    texts = {
        name: PooledStates(
            {layer: torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True) for layer in range(4)}, "mean"
        )
        for name in COLUMNS
    }
    teacher = {name: torch.randn(rows, TEACHER, dtype=dtype, requires_grad=True) for name in COLUMNS}
    ids = torch.arange(2 * rows).view(2, rows)
    if repeats:
        ids[1, 0], ids[0, 4] = ids[0, 2], ids[0, 3]
    return NestedBatch(texts=texts, text_ids=dict(zip(COLUMNS, ids, strict=True)), teacher=teacher)


def students_and_teachers(batch: NestedBatch, layer: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    students = torch.cat([batch.texts[name].layers[layer] for name in COLUMNS])
    teachers = torch.cat([batch.teacher[name] for name in COLUMNS]).detach()
    return students, teachers, torch.cat([batch.text_ids[name] for name in COLUMNS]).tolist()


def gradients(terms: Terms, objective: Objective, batch: NestedBatch) -> list[torch.Tensor | None]:
    """Of all embeddings of texts and of teachers, and of the objective's own parameters."""
    leaves = [vectors for text in batch.texts.values() for vectors in text.layers.values()]
    leaves += [*batch.teacher.values(), *objective.parameters()]
    return list(torch.autograd.grad(sum(terms.values()), leaves, allow_unused=True))


def assert_same_as_a_loop(make: Make, naive: Callable[..., torch.Tensor], repeats: bool) -> None:
    """Terms and gradients of an objective are those of a naive loop, also where texts repeat. A teacher has none."""
    torch.manual_seed(0)
    objective, batch = make().double(), make_batch(repeats=repeats)
    terms = objective(batch)
    assert list(map(str, terms)) == [f"{objective.name}_{g}" for g in objective.grid]
    expected = {term: naive(objective, batch, term.granularity.layer, term.granularity.dim) for term in terms}
    for term, value in expected.items():
        torch.testing.assert_close(terms[term], value, msg=lambda text, term=term: f"{term}: {text}")
    torch.testing.assert_close(objective.total(terms), sum(expected.values()))
    for actual, value in zip(gradients(terms, objective, batch), gradients(expected, objective, batch), strict=True):
        assert (actual is None) == (value is None)
        if value is not None:
            torch.testing.assert_close(actual, value, atol=1e-10, rtol=1e-8)


def assert_autocast_stays_close(make: Make) -> None:
    """Under autocast to bfloat16 the terms are still computed in float32."""
    torch.manual_seed(0)
    expected = make()(make_batch(torch.float32))
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = make()(make_batch(torch.float32))
    for term, value in expected.items():
        torch.testing.assert_close(cast[term], value, atol=1e-4, rtol=1e-3)
        assert cast[term].dtype == torch.float32
