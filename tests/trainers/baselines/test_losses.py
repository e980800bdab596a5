"""Alignment losses against naive references written here; teachers get no gradient."""

from __future__ import annotations

import pytest
import torch

from m3bert.trainers.baselines.losses import compression_alignment, embedding_kl, principal_map
from tests.conftest import assert_close
from tests.trainers.naive import divergence


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
