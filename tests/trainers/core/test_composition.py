"""Objectives of one's own, their terms, and several objectives as one: values, gradients, names in the log."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from m3bert.modeling import M3BertModel
from m3bert.trainers import (
    PIC,
    SIR,
    Composition,
    Contrastive,
    Granularity,
    Grid,
    NestedBatch,
    NestedModel,
    Objective,
    Term,
)
from m3bert.trainers.core.composition import mapping_of
from m3bert.utils import papers
from tests.conftest import refused, tiny_config
from tests.trainers.tiny_run import GRID as OWN_GRID, WithProjector, named
from tests.trainers.token_texts import CHAIN, GRID, gradients, make_batch


def test_a_composition_is_the_weighted_sum_of_its_parts():
    batch, contrastive = make_batch(), Contrastive(Grid.parse("3x2,5,12"))
    sir, pic = SIR(Grid.parse("1x5")), PIC(CHAIN)
    both = Composition({"mrl": (0.4, contrastive), "sir": (0.3, sir), "pic": (0.0, pic)})
    assert both.layers == [1, 3] and set(both.parts) == {"mrl", "sir"}, "what weighs nothing costs nothing"
    assert both.pooling == "mean" and both.grid == contrastive.grid
    terms = both(batch)
    expected = 0.4 * contrastive.total(contrastive(batch)) + 0.3 * sir.total(sir(batch))
    torch.testing.assert_close(both.total(terms), expected)


def two_of_a_class() -> tuple[Composition, PIC, PIC]:
    """Two chains with weights of their own in one loss, and the same two chains alone."""
    torch.manual_seed(4)
    pairs = []
    for _ in range(2):
        torch.manual_seed(4)
        first = PIC(CHAIN, temperature=0.1).double()
        pairs.append((first, PIC(Grid.parse("1x5,3x12"), temperature=0.3).double()))
    (first, second), alone = pairs
    return Composition({"short": (0.4, first), "wide": (2.0, second)}), *alone


def test_two_objectives_of_one_class_compose():
    both, first, second = two_of_a_class()
    batch = make_batch()
    terms = both(batch)
    assert list(map(str, terms)) == ["short_1x2", "short_2x5", "wide_1x5"], "each logs under its name here"
    assert Term("short", Granularity(1, 2)) in terms
    alone = [*first(batch).values(), *second(batch).values()]
    torch.testing.assert_close(list(terms.values()), alone)
    expected = 0.4 * first.total(first(batch)) + 2.0 * second.total(second(batch))
    loss = both.total(terms)
    torch.testing.assert_close(loss, expected)
    together = torch.nn.ModuleDict({"parts": torch.nn.ModuleDict({"short": first, "wide": second})})
    ours, theirs = gradients(both, batch, loss), gradients(together, batch, expected)
    torch.testing.assert_close(ours, theirs)
    assert both.identity.name == "PIC + PIC"
    assert [(part.name, part.weight) for part in both.identity.parts] == [("PIC", 0.4), ("PIC", 2.0)]
    assert both.identity.papers == (papers.MIPIC,), "each paper is named once"


def test_a_composition_within_a_composition_is_flattened():
    batch, weights = make_batch(), {"mrl": 0.5, "near": 0.5 * 0.4, "far": 0.5 * 0.2}
    grids = {"mrl": Grid.parse("3x12"), "near": Grid.parse("2x5"), "far": Grid.parse("1x5")}

    def parts() -> dict:
        return {name: Contrastive(grid) if name == "mrl" else SIR(grid) for name, grid in grids.items()}

    own = parts()
    inner = Composition({"near": (0.4, own["near"]), "far": (0.2, own["far"])})
    outer = Composition({"mrl": (0.5, own["mrl"]), "regularisers": (0.5, inner)})
    assert outer.weights == pytest.approx(weights)
    terms = outer(batch)
    assert {name.split("_")[0] for name in named(terms)} == set(weights)
    expected = sum(weights[name] * part.total(part(batch)) for name, part in parts().items())
    torch.testing.assert_close(outer.total(terms), expected)
    assert [part.name for part in outer.identity.parts] == ["InfoNCE", "SIR", "SIR"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"sir": (-1.0, SIR(GRID))}, "must not be negative: sir"),
        (lambda: {"sir": (0.0, SIR(GRID))}, "an objective with a weight above 0"),
        (
            lambda: {"sir": (1.0, SIR(GRID)), "more": (1.0, Composition({"sir": (1.0, SIR(GRID))}))},
            "the same name: 'sir'",
        ),
    ],
)
def test_compositions_that_cannot_be(make, message):
    refused(message, Composition, make())


def test_arguments_are_spelt_as_a_mapping_or_as_text():
    for value in ({"scale": 1.5}, '{"scale": 1.5}', "scale: 1.5"):
        assert mapping_of("sir", value) == {"scale": 1.5}
    assert mapping_of("sir", None) == mapping_of("sir", "") == {}
    refused(r"sir=\[1\] must be a mapping", mapping_of, "sir", [1])
    with pytest.raises(ValueError, match="sir has unknown keys: tau; legal values: layers, scale, pooling, "):
        mapping_of("sir", {"tau": 1.0}, SIR.argument_names())


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
    objective = WithProjector(OWN_GRID)
    weights, values = (1.0, 0.5, 0.0), (2.0, 4.0, 8.0)
    terms = [Term("x", Granularity(2, 8), name, weight=weight) for name, weight in zip("abc", weights, strict=True)]
    assert objective.total(dict(zip(terms, map(torch.tensor, values), strict=True))) == 2 + 0.5 * 4
    assert objective.term(Granularity(2, 8), weight=3.0) == objective.term(Granularity(2, 8)), "a weight is no name"


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
    model = NestedModel(M3BertModel(tiny_config()), Both(OWN_GRID))
    outputs = model(a={"input_ids": ids}, b={"input_ids": ids})
    assert len(outputs["terms"]) == 8
    torch.testing.assert_close(outputs["loss"], sum(outputs["terms"].values()) / 2)
