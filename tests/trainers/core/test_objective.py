"""Terms, and objectives of one's own."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from m3bert.modeling import M3BertModel
from m3bert.trainers import PIC, SIA, Contrastive, Granularity, Grid, NestedBatch, NestedModel, Objective, Term
from tests.conftest import tiny_config
from tests.trainers.tiny_run import GRID, WithProjector


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (Term("contrastive", Granularity(4, 64)), "contrastive_4x64"),
        (Term("sia", Granularity(4, 64), "cka"), "sia_cka_4x64"),
        (Term("2dmse", name="align"), "2dmse_align"),
        (Term("mine"), "mine"),
    ],
)
def test_a_term_is_logged_under_a_name_that_says_what_it_is(term, name):
    assert str(term) == name
    with pytest.raises(FrozenInstanceError):
        term.name = "other"


def test_the_loss_is_the_weighted_sum_of_the_terms():
    objective = WithProjector(GRID)
    weights, values = (1.0, 0.5, 0.0), (2.0, 4.0, 8.0)
    terms = [Term("x", Granularity(2, 8), name, weight=weight) for name, weight in zip("abc", weights, strict=True)]
    assert objective.total(dict(zip(terms, map(torch.tensor, values), strict=True))) == 2 + 0.5 * 4
    assert objective.term(Granularity(2, 8), weight=3.0) == objective.term(Granularity(2, 8)), "a weight is no name"


def test_an_objective_knows_its_keyword_arguments_and_those_of_its_bases():
    assert {"layers", "temperature", "token_shares"} < set(SIA.argument_names())
    assert {"chain", "temperature", "detach_target"} < set(PIC.argument_names())


def test_objectives_can_be_made_of_others():
    """One forward pass, two objectives of one's own choice, one weighted total."""

    class Both(Objective):
        def __init__(self, grid: Grid):
            super().__init__(grid)
            self.first, self.second = Contrastive(grid), WithProjector(grid)

        def forward(self, batch):
            terms = {**self.first(batch), **self.second(NestedBatch({"text": batch.texts["a"]}))}
            return {replace(term, weight=0.5): value for term, value in terms.items()}

    ids = torch.randint(5, 99, (3, 6))
    model = NestedModel(M3BertModel(tiny_config()), Both(GRID))
    outputs = model(a={"input_ids": ids}, b={"input_ids": ids})
    assert len(outputs["terms"]) == 8
    torch.testing.assert_close(outputs["loss"], sum(outputs["terms"].values()) / 2)
