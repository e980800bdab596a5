"""What learns from similarity distillation, and its edges; exit distillation has the loop over texts."""

import torch

from m3bert.trainers.embedding.similarity import nested_cosines, nested_similarity_distillation


DIMS = (2, 3, 6)


def vectors(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(rows, 6, dtype=dtype, requires_grad=True) for rows in (4, 4, 9))


def test_candidates_of_the_student_learn_and_the_teacher_does_not():
    students, teachers, candidates = vectors()
    teacher_candidates = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    options = {"teacher_candidates": teacher_candidates, "temperature": 0.2}
    losses = nested_similarity_distillation(students, teachers, candidates, DIMS, **options)
    for dim, loss in zip(DIMS, losses, strict=True):
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
    cosines = nested_cosines(students, candidates, DIMS)
    assert not cosines[:2, 0].any()
    cosines.sum().backward()
    assert torch.isfinite(students.grad).all()


def test_half_precision_is_compared_in_float32():
    students, teachers, candidates = (vector.detach().bfloat16() for vector in vectors())
    found = nested_similarity_distillation(students, teachers, candidates, DIMS)
    expected = nested_similarity_distillation(students.float(), teachers.float(), candidates.float(), DIMS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
