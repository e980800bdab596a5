"""Losses on similarities against loops and sentence-transformers, and what learns from similarity distillation."""

import pytest
import torch

from m3bert.trainers.embedding.scored_losses import (
    cosent,
    margin_mse,
    nested_pair_angles,
    nested_pair_cosines,
    nested_pair_products,
    score_divergence,
)
from m3bert.trainers.embedding.similarity import nested_cosines, nested_similarity_distillation
from tests.conftest import assert_close


DIMS = (2, 5, 8)


def sides(rows: int = 7, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(rows, 8, dtype=dtype, requires_grad=True) for _ in range(2))


def test_products_and_cosines_are_those_of_prefixes():
    first, second = sides()
    products, cosines = (measure(first, second, DIMS) for measure in (nested_pair_products, nested_pair_cosines))
    for row, dim in enumerate(DIMS):
        a, b = first[:, :dim], second[:, :dim]
        torch.testing.assert_close(products[row], (a * b).sum(dim=1))
        torch.testing.assert_close(cosines[row], torch.cosine_similarity(a, b))


def test_equal_scores_and_low_precision_give_no_nan():
    similarities = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
    loss = cosent(similarities, torch.ones(4), temperature=0.05)
    loss.sum().backward()
    assert loss.tolist() == [0, 0] and not similarities.grad.any() and loss.dtype == torch.float32


@pytest.mark.parametrize(("loss", "measure"), [("CoSENTLoss", nested_pair_cosines), ("AnglELoss", nested_pair_angles)])
def test_a_loss_and_its_gradient_are_those_of_sentence_transformers_at_each_dim(loss, measure):
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer import losses

    model = library.SentenceTransformer(modules=[torch.nn.Identity()], device="cpu")
    theirs = getattr(losses, loss)(model, scale=2.0)  # at which the 1 in the logarithm counts
    first, second = sides(16, torch.float32)
    scores = torch.rand(16).mul(6).round()
    found = cosent(measure(first, second, DIMS), scores, temperature=1 / 2)
    for row, dim in enumerate(DIMS):
        expected = theirs.compute_loss_from_embeddings([first[:, :dim], second[:, :dim]], scores)
        assert_close(found[row], expected)
        gradients = [torch.autograd.grad(its, first, retain_graph=True)[0] for its in (found[row], expected)]
        # Entries that cancel keep the rounding of the largest ones.
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6 * max(1.0, float(gradients[1].abs().max())))


@pytest.mark.parametrize("as_margins", [False, True])
def test_margins_are_those_of_the_reranker(as_margins):
    similarities = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(5, 3, dtype=torch.float64)
    given = scores[:, :1] - scores[:, 1:] if as_margins else scores
    found = margin_mse(similarities, given)
    for row, values in enumerate(similarities):
        errors = [
            (values[query, 0] - values[query, other] - scores[query, 0] + scores[query, other]) ** 2
            for query in range(5)
            for other in (1, 2)
        ]
        torch.testing.assert_close(found[row], torch.stack(errors).mean())


def test_the_distribution_is_that_of_the_reranker():
    similarities, scores = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    found = score_divergence(similarities, scores, temperature=0.2, score_temperature=2.0)
    for row, values in enumerate(similarities):
        wanted, has = (scores / 2).softmax(dim=1), (values / 0.2).softmax(dim=1)
        torch.testing.assert_close(found[row], (wanted * (wanted / has).log()).sum(dim=1).mean())


PREFIXES = (2, 3, 6)


def vectors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(rows, 6, dtype=dtype, requires_grad=True) for rows in (4, 4, 9))


def test_candidates_of_the_student_learn_and_the_teacher_does_not():
    students, teachers, candidates = vectors()
    teacher_candidates = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    options = {"teacher_candidates": teacher_candidates, "temperature": 0.2}
    losses = nested_similarity_distillation(students, teachers, candidates, PREFIXES, **options)
    for dim, loss in zip(PREFIXES, losses, strict=True):
        wanted = torch.cosine_similarity(teachers[:, None], teacher_candidates[None], dim=2).detach() / 0.2
        found = torch.cosine_similarity(students[:, None, :dim], candidates[None, :, :dim], dim=2) / 0.2
        expected = (wanted.softmax(dim=1) * (wanted.log_softmax(dim=1) - found.log_softmax(dim=1))).sum(dim=1)
        torch.testing.assert_close(loss, expected)
        gradients = [torch.autograd.grad(x.sum(), candidates, retain_graph=True)[0] for x in (loss, expected)]
        torch.testing.assert_close(*gradients)
    losses.sum().backward()
    assert students.grad.any() and teachers.grad is None and teacher_candidates.grad is None


def test_cosines_of_prefixes_with_a_zero_vector_are_finite():
    students, _, candidates = vectors()
    students = students.detach().clone()
    students[0, :3] = 0
    students.requires_grad_()
    cosines = nested_cosines(students, candidates, PREFIXES)
    assert not cosines[:2, 0].any()
    cosines.sum().backward()
    assert torch.isfinite(students.grad).all()


def test_half_precision_is_compared_in_float32():
    students, teachers, candidates = (vector.detach().bfloat16() for vector in vectors())
    found = nested_similarity_distillation(students, teachers, candidates, PREFIXES)
    expected = nested_similarity_distillation(students.float(), teachers.float(), candidates.float(), PREFIXES)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
