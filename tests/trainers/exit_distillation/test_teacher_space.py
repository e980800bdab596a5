"""Distillation into a teacher's space against loops over texts, and queries of one depth with documents of another."""

from dataclasses import replace

import pytest
import torch

from m3bert.encode.states import StateOnly
from m3bert.trainers import Composition, Contrastive, Granularity, Grid, NestedBatch, NestedModel, TeacherSpace
from m3bert.trainers.exit_distillation.cross_depth import CrossDepth
from tests.conftest import padded_batch, refused, tiny_config
from tests.trainers import taught_texts
from tests.trainers.pooled_texts import TAU, assert_same as assert_same_as, batch_of, info_nce
from tests.trainers.tiny_run import named


GRID = Grid.parse("2x4,3x6")


def bank(rows: int = 20) -> torch.Tensor:
    return torch.randn(rows, taught_texts.TEACHER, generator=torch.Generator().manual_seed(4))


def space(**changes) -> TeacherSpace:
    """In evaluation mode, whose candidates are known."""
    return TeacherSpace(GRID, **{"bank": bank(), "candidates": 5, "temperature": 0.3, **changes}).eval()


def cosines(vector: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.dot(vector, other) / (vector.norm() * other.norm()) for other in others])


def candidates_of(objective: TeacherSpace, teachers: torch.Tensor) -> torch.Tensor:
    drawn = objective.bank[torch.linspace(0, len(objective.bank) - 1, objective.candidates).long()]
    return torch.cat([teachers, drawn.to(teachers)])


def naive_similarity(objective, batch, layer, dim):
    students, teachers, _ = taught_texts.students_and_teachers(batch, layer)
    candidates, losses = candidates_of(objective, teachers), []
    for student, teacher in zip(students, teachers, strict=True):
        wanted = (cosines(teacher, candidates) / objective.temperature).softmax(dim=0)
        found = cosines(student[:dim], candidates[:, :dim]) / objective.temperature
        losses.append((wanted * (wanted.log() - found.log_softmax(dim=0))).sum())
    return torch.stack(losses).mean()


def naive_contrast(objective, batch, layer, dim):
    students, teachers, ids = taught_texts.students_and_teachers(batch, layer)
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
    taught_texts.assert_same_as_a_loop(lambda: space(loss=loss), naive, repeats)


@pytest.mark.parametrize("loss", ["similarity", "contrastive"])
def test_bfloat16_and_autocast_stay_close(loss):
    taught_texts.assert_autocast_stays_close(lambda: space(loss=loss))


def test_state_only_maps_have_the_same_losses_with_their_weight():
    batch = taught_texts.make_batch()
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
    batch = taught_texts.make_batch()
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
    assert objective.drawn(like).shape == (5, taught_texts.TEACHER)


def test_the_bank_is_not_saved_with_the_objective_and_has_the_dims_of_the_grid():
    assert space().state_dict() == {}
    message = "has more dims than the teacher, 6: fit exits to the teacher first"
    refused(message, TeacherSpace, Grid.parse("3x8"), bank=bank())


DEPTHS = Grid.parse("1,3x2,8")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(("grid", "document_layer"), [("1,3x2,8", None), ("1x4,2x2", 3), ("1x2,3x8", None)])
def test_terms_and_gradients_equal_a_loop(leaves, grid, document_layer, reduction):
    grid = Grid.parse(grid)
    objective = CrossDepth(grid, document_layer=document_layer, reduction=reduction, temperature=TAU)
    terms = {g: info_nce([leaves[g.layer][0], *leaves[3][1:]], g.dim) for g in grid}
    actual = named(objective(batch_of(leaves)))
    assert list(actual) == [f"cross_depth_{g}" for g in grid]
    for g, value in terms.items():
        torch.testing.assert_close(actual[f"cross_depth_{g}"], value)
    total = sum(terms.values())
    assert_same_as(objective, leaves, total / len(grid) if reduction == "mean" else total)


def test_both_directions(leaves):
    """Also each positive at the last layer among the anchors of the shallow one."""
    objective = CrossDepth(Grid.parse("1x8"), document_layer=3, temperature=TAU, symmetric=True)
    anchors, positives, negatives = leaves[1][0], *leaves[3][1:]
    expected = info_nce([anchors, positives, negatives], 8) + info_nce([positives, anchors], 8)
    assert_same_as(objective, leaves, expected / 2)


def test_gradients_can_be_cached(tiny_model):
    """In a composition, too: values and gradients are those of encoding the whole batch at once."""
    model, grid = tiny_model.double(), Grid.parse("2,6x8,32")
    objective = Composition({"own": (1.0, Contrastive(grid)), "cross": (0.5, CrossDepth(grid))})
    texts = {name: padded_batch(lengths=(7, 3, 1, 5)) for name in ("anchor", "positive")}
    results = []
    for size in (None, 3):
        model.zero_grad(set_to_none=True)
        outputs = NestedModel(model, objective, size)(**texts)
        outputs["loss"].backward()
        results.append((named(outputs["terms"]), [parameter.grad for parameter in model.parameters()]))
    (expected, wanted), (actual, ours) = results
    assert actual.keys() == expected.keys() and {"own_2x8", "cross_2x8"} <= actual.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value)
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_identity_and_bad_arguments():
    identity = CrossDepth(DEPTHS).identity
    assert identity.name == "CrossDepth" and identity.papers == () and "sentence-similarity" in identity.tags
    assert identity.equation.endswith("against positives at layer 3, sum over the grid")
    assert CrossDepth(Grid.parse("1,2x8"), document_layer=3).layers == [1, 2, 3]
    refused("reduction='max' is unknown; legal values: sum, mean", CrossDepth, DEPTHS, reduction="max")
    refused("document_layer=2 must be 3 or more, the deepest of the grid", CrossDepth, DEPTHS, document_layer=2)
    refused(r"layers 1\.\.6 .*outside of it: 9x", CrossDepth(DEPTHS, document_layer=9).validate, tiny_config())
