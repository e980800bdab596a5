"""Objectives that draw embeddings to a teacher's, against loops over texts, and what they leave alone."""

import pytest
import torch
from torch import nn

from m3bert.encode.states import PooledStates
from m3bert.trainers import CRD, HPD, Grid, NestedBatch, TeacherContrast, TeacherMSE
from m3bert.trainers.distillation.objective import RepresentationDistillation
from tests.conftest import refused
from tests.trainers.taught_texts import (
    GRID,
    TEACHER,
    assert_autocast_stays_close,
    assert_same_as_a_loop,
    make_batch,
    students_and_teachers,
)
from tests.trainers.tiny_run import named


def cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.dot(x, y) / (x.norm() * y.norm())


def naive_contrast(objective, batch, layer, dim):
    students, teachers, ids = students_and_teachers(batch, layer)
    weight = objective.maps[str(layer)].weight[:, :dim]
    losses = []
    for i, student in enumerate(students):
        scores = [cosine(weight @ student[:dim], teacher) / objective.temperature for teacher in teachers]
        kept = [s for j, s in enumerate(scores) if j == i or not objective.mask_duplicates or ids[j] != ids[i]]
        losses.append(torch.stack(kept).logsumexp(dim=0) - scores[i])
    return torch.stack(losses).mean()


def naive_mse(objective, batch, layer, dim):
    students, teachers, _ = students_and_teachers(batch, layer)
    weight = objective.maps[str(layer)].weight[:, :dim]
    losses = []
    for s, t in zip(students, teachers, strict=True):
        s = weight @ s[:dim]
        if objective.normalize:
            s, t = s / s.norm(), t / t.norm()
        losses.append(((s - t) ** 2).mean())
    return torch.stack(losses).mean()


def naive_crd(objective, batch, layer, dim):
    students, teachers, ids = students_and_teachers(batch, layer)
    mapped = [objective.maps[str(layer)].weight[:, :dim] @ s[:dim] for s in students]
    targets = [objective.teacher_map.weight @ t for t in teachers]
    scores = torch.stack([torch.stack([cosine(s, t) for t in targets]) for s in mapped]) / objective.temperature
    z = scores.exp().mean().detach()
    negatives = len(students) - 1
    losses = []
    for matrix in (scores, scores.T):
        for i, row in enumerate(matrix):
            chances = (row.exp() / z) / (row.exp() / z + negatives)
            others = [j for j in range(len(row)) if j != i and ids[j] != ids[i]]
            losses.append(-chances[i].log() - (1 - chances[others]).log().sum())
    return torch.stack(losses).sum() / len(students)


OBJECTIVES = {
    "infonce": (lambda: TeacherContrast(GRID, teacher_dim=TEACHER), naive_contrast),
    "infonce, repeats": (lambda: TeacherContrast(GRID, teacher_dim=TEACHER, mask_duplicates=False), naive_contrast),
    "mse": (lambda: TeacherMSE(GRID, teacher_dim=TEACHER), naive_mse),
    "mse, normalised": (lambda: TeacherMSE(GRID, teacher_dim=TEACHER, normalize=True), naive_mse),
    "crd": (lambda: CRD(GRID, teacher_dim=TEACHER, critic_dim=5), naive_crd),
}


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_terms_and_gradients_are_those_of_a_loop_over_texts(name, repeats):
    assert_same_as_a_loop(*OBJECTIVES[name], repeats)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_bfloat16_and_autocast_stay_close(name):
    assert_autocast_stays_close(OBJECTIVES[name][0])


def test_maps_start_as_the_identity_or_keep_angles():
    same = TeacherContrast(Grid.parse("3x6"), teacher_dim=6).maps["3"].weight
    torch.testing.assert_close(same, torch.eye(6))
    wider = TeacherMSE(Grid.parse("3x4"), teacher_dim=6).maps["3"].weight
    torch.testing.assert_close(wider.T @ wider, torch.eye(4), atol=1e-5, rtol=0)


def test_the_normaliser_of_crd_is_that_of_the_first_batch():
    objective = CRD(Grid.parse("3x8"), teacher_dim=TEACHER, critic_dim=5)
    objective(make_batch(torch.float32))
    first = objective.state_dict()["log_normalizer_3x8"].clone()
    assert torch.isfinite(first)
    objective(make_batch(torch.float32, rows=3))
    assert objective.state_dict()["log_normalizer_3x8"].equal(first)


def test_hpd_is_the_distance_to_the_teachers_components():
    components = torch.linalg.qr(torch.randn(TEACHER, 3)).Q.T.contiguous()
    objective = HPD(Grid.parse("3x3"), components=components, teacher_dim=TEACHER)
    assert not list(objective.parameters())
    batch = make_batch(torch.float32)
    students, teachers, _ = students_and_teachers(batch, 3)
    expected = (students[:, :3] - teachers @ components.T).square().mean()
    torch.testing.assert_close(named(objective(batch))["hpd_3x3"], expected)
    sides = (nn.functional.normalize(vectors, dim=1) for vectors in (students[:, :3], teachers @ components.T))
    normalized = HPD(Grid.parse("3x3"), components=components, teacher_dim=TEACHER, normalize=True)(batch)
    torch.testing.assert_close(named(normalized)["hpd_3x3"], nn.functional.mse_loss(*sides))
    with pytest.raises(ValueError, match="HPD trains one granularity of 3 dims; the grid is 3x4"):
        HPD(Grid.parse("3x4"), components=components, teacher_dim=TEACHER)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TeacherContrast(GRID, teacher_dim=6, temperature=0), "temperature=0 must be above 0"),
        (lambda: TeacherMSE(GRID, teacher_dim=6)(NestedBatch(make_batch().texts)), "TeacherMSE needs a teacher's"),
        (lambda: TeacherMSE(GRID, teacher_dim=9)(make_batch()), "embeddings have 6 dims, but teacher_dim=9"),
    ],
)  # fmt: skip
def test_bad_arguments_say_what_is_legal(make, message):
    refused(message, make)


def test_one_text_has_nothing_to_be_told_from():
    batch = NestedBatch(
        texts={"text": PooledStates({3: torch.randn(1, 6)}, "mean")}, teacher={"text": torch.randn(1, 6)}
    )
    refused("at least two candidates", TeacherContrast(Grid.parse("3x6"), teacher_dim=6), batch)


def test_an_objective_of_ones_own_needs_only_its_loss():
    class L1(RepresentationDistillation):
        name = "l1"

        def losses(self, students, granularity, taught):
            return (students - taught.teacher[:, : granularity.dim]).abs().mean(dim=1)

    batch = make_batch()
    students, teachers, _ = students_and_teachers(batch, 2)
    terms = L1(Grid.parse("2x4"), teacher_dim=TEACHER)(batch)
    torch.testing.assert_close(named(terms)["l1_2x4"], (students[:, :4] - teachers[:, :4]).abs().mean())
