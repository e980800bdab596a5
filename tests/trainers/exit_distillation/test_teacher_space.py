"""Distillation into a teacher's space: loops over texts, candidates from the bank, and equal texts among them."""

from dataclasses import replace

import pytest
import torch

from m3bert.encode.states import StateOnly
from m3bert.trainers import Granularity, Grid, NestedBatch, TeacherSpace
from tests.trainers.taught_texts import (
    TEACHER,
    assert_autocast_stays_close,
    assert_same_as_a_loop,
    make_batch,
    students_and_teachers,
)


GRID = Grid.parse("2x4,3x6")


def bank(rows: int = 20) -> torch.Tensor:
    return torch.randn(rows, TEACHER, generator=torch.Generator().manual_seed(4))


def space(**changes) -> TeacherSpace:
    """In evaluation mode, whose candidates are known."""
    return TeacherSpace(GRID, **{"bank": bank(), "candidates": 5, "temperature": 0.3, **changes}).eval()


def cosines(vector: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.dot(vector, other) / (vector.norm() * other.norm()) for other in others])


def candidates_of(objective: TeacherSpace, teachers: torch.Tensor) -> torch.Tensor:
    drawn = objective.bank[torch.linspace(0, len(objective.bank) - 1, objective.candidates).long()]
    return torch.cat([teachers, drawn.to(teachers)])


def naive_similarity(objective, batch, layer, dim):
    students, teachers, _ = students_and_teachers(batch, layer)
    candidates, losses = candidates_of(objective, teachers), []
    for student, teacher in zip(students, teachers, strict=True):
        wanted = (cosines(teacher, candidates) / objective.temperature).softmax(dim=0)
        found = cosines(student[:dim], candidates[:, :dim]) / objective.temperature
        losses.append((wanted * (wanted.log() - found.log_softmax(dim=0))).sum())
    return torch.stack(losses).mean()


def naive_contrast(objective, batch, layer, dim):
    students, teachers, ids = students_and_teachers(batch, layer)
    candidates, losses = candidates_of(objective, teachers), []
    all_ids = [*ids, *[-1] * objective.candidates]
    for i, student in enumerate(students):
        scores = cosines(student[:dim], candidates[:, :dim]) / objective.temperature
        kept = [score for j, score in enumerate(scores) if j == i or all_ids[j] != ids[i]]
        losses.append(torch.stack(kept).logsumexp(dim=0) - scores[i])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize(("loss", "naive"), [("similarity", naive_similarity), ("contrastive", naive_contrast)])
def test_terms_and_gradients_are_those_of_a_loop_over_texts(loss, naive, repeats):
    assert_same_as_a_loop(lambda: space(loss=loss), naive, repeats)


@pytest.mark.parametrize("loss", ["similarity", "contrastive"])
def test_bfloat16_and_autocast_stay_close(loss):
    assert_autocast_stays_close(lambda: space(loss=loss))


def test_state_only_maps_have_the_same_losses_with_their_weight():
    batch = make_batch()
    alone = {
        name: replace(text, layers={2: text.layers[2], 3: text.layers[3], StateOnly(2): text.layers[1]})
        for name, text in batch.texts.items()
    }
    objective = space(alignment=2.0, state_only_weight=0.25).double()
    terms = objective(replace(batch, texts=alone))
    expected = space(alignment=2.0).double()(
        replace(
            batch,
            texts={
                name: replace(text, layers={2: text.layers[1], 3: text.layers[3]})
                for name, text in batch.texts.items()
            },
        )
    )
    found = {str(term): (term.weight, value) for term, value in terms.items()}
    assert list(found) == ["teacher_space_2x4", "teacher_space_3x6", "teacher_space_state_only_2x4"]
    assert found["teacher_space_state_only_2x4"][0] == 0.25
    torch.testing.assert_close(found["teacher_space_state_only_2x4"][1], expected[objective.term(Granularity(2, 4))])


def test_a_drawn_text_is_no_negative_of_itself():
    batch = make_batch()
    teachers = torch.cat(list(batch.teacher.values())).detach()
    alone = space(loss="contrastive", bank=teachers.float(), candidates=0).double()
    among_itself = space(loss="contrastive", bank=(2 * teachers[3:4]).double(), candidates=1).double()
    unmasked = NestedBatch(texts=batch.texts, teacher=batch.teacher)
    students = batch.texts["first"].layers[3]

    def third_loss_of(objective, batch):
        (gradient,) = torch.autograd.grad(sum(objective(batch).values()), students)
        return gradient[3]

    torch.testing.assert_close(third_loss_of(among_itself, batch), third_loss_of(alone, batch))
    assert not torch.allclose(third_loss_of(among_itself, unmasked), third_loss_of(alone, batch))


def test_training_draws_other_candidates_each_step_and_evaluation_the_same():
    objective, like = space(bank=bank(1000)), torch.zeros(1)
    assert torch.equal(objective.drawn(like), objective.drawn(like))
    objective.train()
    assert not torch.equal(objective.drawn(like), objective.drawn(like))
    assert objective.drawn(like).shape == (5, TEACHER)


def test_the_bank_is_not_saved_with_the_objective():
    assert space().state_dict() == {}


def test_a_grid_with_more_dims_than_the_teacher_is_refused():
    with pytest.raises(ValueError, match=r"has more dims than the teacher, 6: fit exits to the teacher first"):
        TeacherSpace(Grid.parse("3x8"), bank=bank())
