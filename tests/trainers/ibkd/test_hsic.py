"""Kernels and HSIC against their definitions, and HSIC against a loop over texts."""

import pytest
import torch
from torch import nn

from m3bert.encode.states import PooledStates
from m3bert.trainers import HSIC, Grid, NestedBatch, NestedModel
from m3bert.trainers.ibkd.losses import gram_matrix, hsic
from tests.conftest import assert_close, refused
from tests.trainers.taught_texts import COLUMNS, GRID, assert_autocast_stays_close, assert_same_as_a_loop, make_batch
from tests.trainers.tiny_run import quiet_model


def naive_hsic(objective, batch, layer, dim):
    values = []
    for name in COLUMNS:
        x, s = batch.texts[name].layers[objective.input_layer], batch.texts[name].layers[layer][:, :dim]
        if objective.detach_input:
            x = x.detach()
        if objective.normalize:
            x, s = nn.functional.normalize(x, dim=1), nn.functional.normalize(s, dim=1)
        values.append(naive_trace(*(naive_gram(side, "rbf", objective.gamma) for side in (x, s))))
    return torch.stack(values).mean()


OBJECTIVES = {
    "hsic": lambda: HSIC(GRID, gamma=0.1),
    "of an input without gradient": lambda: HSIC(GRID, gamma=0.1, detach_input=True),
    "normalised, of layer 1": lambda: HSIC(GRID, normalize=True, input_layer=1),
}


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_terms_and_gradients_are_those_of_a_loop_over_texts(name, repeats):
    assert_same_as_a_loop(OBJECTIVES[name], naive_hsic, repeats)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_bfloat16_and_autocast_stay_close(name):
    assert_autocast_stays_close(OBJECTIVES[name])


def test_hsic_reads_the_embedding_layer_and_a_mean(tiny_tokenizer):
    """X is the mean over real tokens of what goes into the first layer."""
    model = quiet_model().model.eval()
    batch = tiny_tokenizer(
        ["open the file", "read a list of text or name", "a name"], padding=True, return_tensors="pt"
    )
    objective = HSIC(Grid.parse("6x8"), gamma=0.1, pooling="cls")
    nested = NestedModel(model, objective)
    loss = nested(**batch)["loss"]
    outputs = model(**batch, output_hidden_states=True)
    mask = batch["attention_mask"][:, :, None]
    x = (outputs.hidden_states[0] * mask).sum(dim=1) / mask.sum(dim=1)
    s = outputs.last_hidden_state[:, 0, :8]
    texts = {"text": PooledStates({0: x, 6: s}, "mean")}
    (expected,) = HSIC(Grid.parse("6x8"), gamma=0.1)(NestedBatch(texts=texts)).values()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert model.embed_tokens.weight.grad.any()
    with pytest.raises(ValueError, match="HSIC reads token hidden states: its gradients cannot be cached"):
        NestedModel(model, objective, mini_batch_size=2)


def test_hsic_with_cached_gradients_is_that_of_the_whole_batch(tiny_tokenizer):
    texts = ["open the file", "read a list of text or name", "a name", "not for the file"]
    batch = tiny_tokenizer(texts, padding=True, return_tensors="pt")
    found = []
    for mini_batch_size in (None, 1, 3):
        model = quiet_model().model
        NestedModel(model, HSIC(Grid.parse("4,6x8,32"), gamma=0.1), mini_batch_size)(**batch)["loss"].backward()
        found.append(model.embed_tokens.weight.grad)
    for gradient in found[1:]:
        assert_close(gradient, found[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HSIC(GRID, kernel="cubic")(make_batch()), "kernel='cubic' is unknown; legal values: rbf"),
        (lambda: HSIC(GRID, input_layer=2), "input_layer=2 must be below the trained layers"),
    ],
)
def test_bad_arguments_say_what_is_legal(make, message):
    refused(message, make)


KERNELS = ("rbf", "imq", "linear")


def naive_gram(vectors, kernel, gamma):
    rows = []
    for x in vectors:
        row = []
        for y in vectors:
            squared = (x - y).square().sum()
            if kernel == "rbf":
                row.append(torch.exp(-gamma * squared))
            elif kernel == "imq":
                row.append(1 / torch.sqrt(squared + gamma))
            else:
                row.append(torch.dot(x / x.norm(), y / y.norm()))
        rows.append(torch.stack(row))
    return torch.stack(rows)


def naive_trace(first, second):
    n = len(first)
    centring = torch.eye(n, dtype=first.dtype) - torch.ones(n, n, dtype=first.dtype) / n
    return torch.trace(first @ centring @ second @ centring) / n**2


@pytest.mark.parametrize("gamma", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_kernels_and_their_gradients_are_those_of_the_definition(rows, kernel, gamma):
    vectors = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    ours, expected = gram_matrix(vectors, kernel, gamma=gamma), naive_gram(vectors, kernel, gamma)
    torch.testing.assert_close(ours, expected)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(gram, vectors, upstream)[0] for gram in (ours, expected)), atol=1e-10, rtol=1e-8
    )


def test_identical_texts_and_a_batch_of_one_have_a_gradient_without_nan():
    for rows in (1, 3):
        for kernel in KERNELS:
            x = torch.ones(rows, 4, requires_grad=True)
            value = hsic(gram_matrix(x, kernel), gram_matrix(x, kernel))
            value.backward()
            assert value.item() == pytest.approx(0, abs=1e-6)
            assert torch.isfinite(x.grad).all()


def test_half_precision_and_autocast_are_summed_in_single():
    x = torch.randn(32, 64).bfloat16()
    expected = gram_matrix(x.float())
    torch.testing.assert_close(gram_matrix(x), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(gram_matrix(x.float()), expected)
