"""Token states of two text columns of different lengths, and how a loss of them is compared."""

import copy
from dataclasses import replace

import torch

from m3bert.trainers import Grid, NestedBatch, NestedStates
from tests.conftest import assert_close


WIDTH, LAYERS, DIMS = 12, (1, 2, 3), (2, 5)


MASKS = {
    "view 1": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]),
    "view 2": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),  # another length
}


GRID = Grid.product([2, 3], [*DIMS, WIDTH])


CHAIN = Grid.parse("1x2,2x5,3x12")


def make_batch(masks: dict[str, torch.Tensor] | None = None, causal: bool = False) -> NestedBatch:
    masks = masks or MASKS
    states = {
        name: {layer: torch.randn(*mask.shape, WIDTH, dtype=torch.float64, requires_grad=True) for layer in LAYERS}
        for name, mask in masks.items()
    }
    return NestedBatch({name: NestedStates(states[name], mask, causal) for name, mask in masks.items()})


def gradients(objective, batch: NestedBatch, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {f"{name} {layer}": text.layers[layer] for name, text in batch.texts.items() for layer in LAYERS}
    leaves |= dict(objective.named_parameters())
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def assert_same(objective, batch: NestedBatch, expected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Total and gradients are those of a naive loss, in float32 but for rounding; returns the gradients."""
    loss = objective.total(objective(batch))
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-9)
    ours, theirs = gradients(objective, batch, loss), gradients(objective, batch, expected)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: name + text)
    texts = {
        name: replace(
            text, layers={layer: state.detach().float().requires_grad_() for layer, state in text.layers.items()}
        )
        for name, text in batch.texts.items()
    }
    objective, batch = copy.deepcopy(objective).float(), NestedBatch(texts)
    loss = objective.total(objective(batch))
    assert_close(loss, expected)
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in gradients(objective, batch, loss).items():
        torch.testing.assert_close(gradient.double(), theirs[name], atol=1e-3 * largest, rtol=0)
    return ours
