"""SimCSE, ESE, 2DMSE and Starbucks as their formulas say."""

import math

import pytest
import torch
from torch.nn import functional

from m3bert.trainers import Espresso, Grid, Matryoshka2d, SimCSE, Starbucks
from m3bert.trainers.baselines.losses import compression_alignment, embedding_kl, principal_map
from tests.conftest import assert_close
from tests.trainers.naive import divergence
from tests.trainers.pooled_texts import TAU, WIDTH, assert_same, batch_of, info_nce, kl


@pytest.mark.parametrize("weighting", ["log", "uniform"])
def test_espresso(leaves, weighting):
    def align(columns, dim):
        everything = torch.cat(columns)
        teacher = everything.detach()
        u, s, _ = torch.linalg.svd(torch.softmax(teacher.T @ teacher / math.sqrt(WIDTH), dim=1))
        basis = u @ torch.diag(s)
        basis = basis * torch.sign(basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)))
        target, student = (teacher @ basis)[:, :dim], everything[:, :dim]
        return functional.mse_loss(student, target) + kl(target, student)

    expected = info_nce(leaves[3], 8) + info_nce(leaves[3], 2) + align(leaves[3], 2)
    for layer in (1, 2):
        weight = 1 / (1 + math.log(layer)) if weighting == "log" else 1.0
        one = info_nce(leaves[layer], 2) + align(leaves[layer], 2)
        expected = expected + weight * one / 2
    grid = Grid.parse("1x2,2x2,3x2,3x8")
    assert_same(Espresso(grid, temperature=TAU, layer_weighting=weighting), leaves, expected)


def expected_2dmse(leaves, layer, dim, temperature=0.3):
    student, teacher = torch.cat(leaves[layer]), torch.cat(leaves[3])
    alignment = sum(
        temperature * kl(teacher[:, :width] / temperature, student[:, :width] / temperature) for width in (dim, 8)
    )
    parts = (
        info_nce(leaves[3], 8), info_nce(leaves[3], dim), info_nce(leaves[layer], 8), info_nce(leaves[layer], dim),
    )  # fmt: skip
    return sum(parts) + 2.0 * alignment


def test_2dmse_draws_a_layer_and_a_dim(leaves):
    objective = Matryoshka2d(Grid.parse("1,2,3x2,4,8"), temperature=TAU, kl_weight=2.0).train()
    every = {(layer, dim): expected_2dmse(leaves, layer, dim).item() for layer in (1, 2) for dim in (2, 4)}
    drawn = set()
    for _ in range(40):
        loss = objective.total(objective(batch_of(leaves))).item()
        drawn.add(min(every, key=lambda choice: abs(every[choice] - loss)))
        assert min(abs(value - loss) for value in every.values()) < 1e-9
    assert drawn == set(every)


def test_2dmse_averages_over_all_draws_in_evaluation(leaves):
    objective = Matryoshka2d(Grid.parse("1,2,3x2,4,8"), temperature=TAU, kl_weight=2.0).eval()
    expected = sum(expected_2dmse(leaves, layer, dim) for layer in (1, 2) for dim in (2, 4)) / 4
    assert_same(objective, leaves, expected)


def test_simcse_is_the_loss_of_the_full_size(leaves):
    assert_same(SimCSE(Grid.parse("3x8"), temperature=TAU), leaves, info_nce(leaves[3], 8))


def test_starbucks(leaves):
    expected = torch.zeros((), dtype=torch.float64)

    def scores(columns, dim):
        anchors, *others = (functional.normalize(column[:, :dim], dim=1) for column in columns)
        return anchors @ torch.cat(others).T / TAU

    for layer, dim in ((1, 2), (2, 4), (3, 8)):
        expected = expected + info_nce(leaves[layer], dim)
        if layer < 3:
            expected = expected + 0.5 * kl(scores(leaves[3], 8), scores(leaves[layer], dim))
    assert_same(Starbucks(Grid.parse("1x2,2x4,3x8"), temperature=TAU, kl_weight=0.5), leaves, expected)


def assert_teacher_is_detached(loss, student, *teachers):
    gradients = torch.autograd.grad(loss.sum(), (student, *teachers), allow_unused=True)
    assert gradients[0].abs().sum() > 0
    assert all(gradient is None for gradient in gradients[1:])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_embedding_kl_equals_the_formula(temperature):
    student, teacher = (torch.randn(5, 7, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = torch.stack(
        [
            temperature * divergence(t.detach() / temperature, s / temperature)
            for s, t in zip(student, teacher, strict=True)
        ]
    )
    actual = embedding_kl(student, teacher, temperature=temperature)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), student, retain_graph=True) for x in (actual, expected)))
    assert_teacher_is_detached(actual, student, teacher)
    torch.testing.assert_close(embedding_kl(teacher, teacher, temperature=temperature), torch.zeros(5).double())


@pytest.mark.parametrize(("rows", "width"), [(3, 8), (20, 8), (1, 5)])
def test_principal_map_is_the_singular_value_decomposition(rows, width):
    embeddings = 2 * torch.randn(rows, width, dtype=torch.float64)
    gram = embeddings.T @ embeddings
    u, s, _ = torch.linalg.svd(torch.softmax(gram / width**0.5, dim=1))
    expected = embeddings @ u @ torch.diag(s)
    actual = embeddings @ principal_map(gram)
    signs = torch.sign((actual * expected).sum(dim=0))
    assert (signs[s > 1e-6] != 0).all()
    assert_close(actual, expected * signs)


def test_principal_map_does_not_turn_over_from_batch_to_batch():
    """The sign of a singular vector is anybody's choice: here it does not depend on a disturbance of the batch."""
    embeddings = 2 * torch.randn(20, 8, dtype=torch.float64)
    maps = [
        principal_map(noisy.T @ noisy)
        for noisy in (embeddings + 1e-6 * torch.randn_like(embeddings) for _ in range(10))
    ]
    for other in maps[1:]:
        torch.testing.assert_close(other[:, :3], maps[0][:, :3], atol=1e-3, rtol=1e-3)
    largest = maps[0].gather(0, maps[0].abs().argmax(dim=0, keepdim=True))
    assert (largest > 0).all()


def test_principal_map_carries_no_gradient():
    embeddings = torch.randn(4, 6, requires_grad=True)
    assert not principal_map(embeddings.T @ embeddings).requires_grad


def test_compression_alignment_equals_the_formula():
    student, components = (torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = [
        (s - c).square().sum() / 4 + divergence(c, s) for s, c in zip(student, components.detach(), strict=True)
    ]
    actual = compression_alignment(student, components)
    torch.testing.assert_close(actual, torch.stack(expected))
    assert_teacher_is_detached(actual, student, components)
