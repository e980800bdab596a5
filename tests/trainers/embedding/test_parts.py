"""What SIA, PIC, SCR and SIR have in common."""

import pytest
import torch

from m3bert.encode.states import PooledStates
from m3bert.trainers import PIC, SCR, SIA, SIR, Grid, NestedBatch, NestedStates
from tests.trainers.token_texts import CHAIN, GRID, LAYERS, MASKS, WIDTH, gradients, make_batch


@pytest.mark.parametrize("objective", [SIA(GRID), PIC(CHAIN), SCR(GRID), SIR(GRID)], ids=lambda part: part.name)
def test_empty_and_one_token_texts_do_no_harm(objective):
    batch = make_batch({"text": torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0]])})
    objective = objective.double()
    loss = objective.total(objective(batch))
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(objective, batch, loss).values())


@pytest.mark.parametrize("objective", [SIA(GRID), PIC(CHAIN), SCR(GRID), SIR(GRID)], ids=lambda part: part.name)
def test_half_precision_is_computed_in_single(objective):
    batch = make_batch()
    rounded = {
        name: {layer: state.detach().bfloat16() for layer, state in text.layers.items()}
        for name, text in batch.texts.items()
    }
    objective = objective.float()
    losses = []
    for dtype in (torch.bfloat16, torch.float32):
        texts = {
            name: NestedStates({layer: state.to(dtype) for layer, state in states.items()}, MASKS[name])
            for name, states in rounded.items()
        }
        losses.append(objective.total(objective(NestedBatch(texts))))
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("objective", [PIC(CHAIN), SIR(GRID)], ids=lambda part: part.name)
def test_a_batch_of_one_is_refused(objective):
    with pytest.raises(ValueError, match="batch of (one|1)"):
        objective.float()(
            NestedBatch({"text": PooledStates({layer: torch.randn(1, WIDTH) for layer in LAYERS}, objective.pooling)})
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PIC(Grid.parse("1x5,2x2")), "chain=1x5,2x2 must have two or more granularities, each deeper"),
        (lambda: PIC(CHAIN, temperature=0.0), "temperature=0.0 must be above 0"),
        (lambda: SIA(GRID, token_shares=[0.2, 0.3, 0.4]), r"one value for each of the dims \[2, 5\] below"),
        (lambda: SIA(GRID, token_shares=[0.7, 0.2]), "ascending"),
        (lambda: SIA(Grid.parse("2x12")), "SIA needs a grid of layers x two dims or more"),
        (lambda: SCR(Grid.parse("2x5,3x12")), "layers x two dims"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
