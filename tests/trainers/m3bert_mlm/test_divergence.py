"""Divergences inside one masked-LM head, against logits that are all there at once."""

import pytest
import torch
from torch.nn import functional

from m3bert.trainers.m3bert_mlm.losses import nested_cross_entropy_and_divergence


LAYERS, TOKENS, WIDTH, VOCABULARY = 3, 5, 12, 23
DIMS = (2, 5, 12)
TEACHER = (2, 2)
PAIRS = {
    "one": [((0, 1), TEACHER)],
    "two teachers": [((0, 1), TEACHER), ((0, 1), (2, 1)), ((1, 2), (1, 0))],
    "to all": [((layer, dim), TEACHER) for layer in range(3) for dim in range(3) if (layer, dim) != TEACHER],
    "a student that teaches": [((1, 1), TEACHER), ((0, 0), (1, 1))],
}


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "states": torch.randn(LAYERS, tokens, WIDTH, dtype=dtype, requires_grad=True),
        "weight": torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True),
        "bias": torch.randn(VOCABULARY, dtype=dtype, requires_grad=True) if bias else None,
        "targets": torch.randint(VOCABULARY, (tokens,)),
    }


def naive(states, weight, bias, targets, pairs, reverse=True, temperature=1.0, dims=DIMS):
    """Cross-entropies and divergences from whole logits; the teacher's are detached."""
    logits = {
        (layer, index): functional.linear(states[layer, :, :dim], weight[:, :dim], bias)
        for layer in range(len(states))
        for index, dim in enumerate(dims)
    }
    losses = [functional.cross_entropy(scores, targets, reduction="none") for scores in logits.values()]
    losses = torch.stack(losses).unflatten(0, (len(states), len(dims))).transpose(1, 2).contiguous()
    values = []
    for student, teacher in pairs:
        log_s = (logits[student] / temperature).log_softmax(dim=1)
        log_t = (logits[teacher].detach() / temperature).log_softmax(dim=1)
        p, q = (log_s, log_t) if reverse else (log_t, log_s)
        values.append((p.exp() * (p - q).nan_to_num(0)).sum(dim=1))
    return losses, torch.stack(values)


def gradients(function, values, **options):
    leaves = [tensor for tensor in values.values() if tensor is not None and tensor.requires_grad]
    losses, divergences = function(**values, **options)
    torch.manual_seed(1)
    total = (losses * torch.rand_like(losses)).sum() + (divergences * torch.rand_like(divergences)).sum()
    return losses.detach(), divergences.detach(), *torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("block_size", [4, 23, None])
@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("pairs", list(PAIRS))
def test_values_and_gradients_are_those_of_whole_logits(pairs, temperature, reverse, block_size):
    options = {"pairs": PAIRS[pairs], "reverse": reverse, "temperature": temperature}
    ours = gradients(nested_cross_entropy_and_divergence, inputs(), dims=DIMS, block_size=block_size, **options)
    expected = gradients(naive, inputs(), **options)
    for actual, value in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, value, atol=1e-11, rtol=1e-9)


def test_without_tokens_and_without_bias():
    losses, divergences = nested_cross_entropy_and_divergence(
        **inputs(bias=False, tokens=0), dims=DIMS, pairs=PAIRS["one"]
    )
    assert losses.shape == (LAYERS, 0, len(DIMS))
    assert divergences.shape == (1, 0)
    ours = gradients(nested_cross_entropy_and_divergence, inputs(bias=False), dims=DIMS, pairs=PAIRS["one"])
    expected = gradients(naive, inputs(bias=False), pairs=PAIRS["one"])
    for actual, value in zip(ours, expected, strict=True):
        torch.testing.assert_close(actual, value, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reverse", [True, False])
def test_coarser_precision(dtype, reverse):
    values = inputs(torch.float32)
    options = {"pairs": PAIRS["to all"], "reverse": reverse}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        ours = gradients(nested_cross_entropy_and_divergence, values, dims=DIMS, **options)
    expected = gradients(naive, inputs(torch.float32), **options)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for actual, value in zip(ours, expected, strict=True):
        assert actual.dtype == torch.float32
        assert (actual - value).abs().max() <= tolerance * value.abs().max()
