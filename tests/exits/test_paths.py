"""Paths of native encoders: their refit against a naive one, and what a fit with paths gives."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from m3bert.encode.states import nested_states
from m3bert.encode.tokenized_texts import TokenizedTexts
from m3bert.exits import paths
from m3bert.exits.passes import RawStates
from m3bert.modeling.anatomy_m3bert import feed_forward_of, run_native
from m3bert.modeling.modeling_elastic import Elasticity, layer_list
from m3bert.trainers import fit_exits
from tests.exits.test_fit import random_texts


FAMILIES = {
    "bert": {},  # post-norm
    "modernbert": {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},  # pre-norm, gated
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},  # causal
}


def tiny(family: str, tokenizer) -> torch.nn.Module:
    """A random encoder of six layers whose layers change the hidden state a good deal."""
    torch.manual_seed(3)
    config = CONFIG_MAPPING[family](
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=len(tokenizer),
        pad_token_id=0,
        initializer_range=0.2,
        max_position_embeddings=64,
        **FAMILIES[family],
    )
    return AutoModel.from_config(config).eval()


@pytest.fixture(params=FAMILIES)
def encoder(request, tiny_tokenizer) -> torch.nn.Module:
    return tiny(request.param, tiny_tokenizer)


def rows_of(encoder, tokenizer, layers, place) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """g, y and t of the tokens that fit and that are held out, read text by text with hooks on a copy whose list of
    layers is shorter."""
    ends, (name, own) = feed_forward_of(encoder), layer_list(encoder, 6)
    short = copy.deepcopy(encoder)
    parent = short.get_submodule(name.rpartition(".")[0]) if "." in name else short
    kept = [layer_list(short, 6)[1][layer - 1] for layer in layers[: place + 1]]
    setattr(parent, name.rpartition(".")[2], torch.nn.ModuleList(kept))
    short.config.num_hidden_layers = len(kept)
    if getattr(short.config, "layer_types", None):
        short.config.layer_types = [encoder.config.layer_types[layer - 1] for layer in layers[: place + 1]]
    for number, layer in enumerate(kept):
        for module in layer.modules():
            if "layer_idx" in module.__dict__:
                module.layer_idx = number
    seen: dict[str, torch.Tensor] = {}
    kept[-1].get_submodule(ends.output).register_forward_hook(lambda m, a, o: seen.update(g=a[0], o=o))
    kept[-1].register_forward_hook(lambda m, a, o: seen.update(out=o[0] if isinstance(o, tuple) else o))
    if ends.norm:
        kept[-1].get_submodule(ends.norm).register_forward_pre_hook(lambda m, a: seen.update(z=a[0]))
    wanted = own[layers[place + 1] - 2]
    handle = wanted.register_forward_hook(lambda m, a, o: seen.update(t=o[0] if isinstance(o, tuple) else o))
    found: tuple[dict, dict] = ({"g": [], "y": [], "t": []}, {"g": [], "y": [], "t": []})
    texts = random_texts(200)
    tokenized = TokenizedTexts({"texts": texts}, tokenizer, 40, [""])
    for group in tokenized:
        for its in group:
            held = int(paths.blake2b(its.text.encode(), digest_size=1).digest()[0] < paths.HELD_OUT * 256)
            with torch.no_grad():
                run_native(encoder, input_ids=torch.tensor([its.ids]))
                run_native(short, input_ids=torch.tensor([its.ids]))
            first = int(encoder.config.model_type == "qwen3")
            values = {"g": seen["g"], "y": seen.get("z", seen["out"]) - seen["o"], "t": seen["t"]}
            for key, value in values.items():
                found[held][key].append(value[0, first:].double().numpy())
    handle.remove()
    return tuple({key: np.concatenate(values) for key, values in each.items()} for each in found)


def naive_best(encoder, fit, held, before) -> float:
    """The explained variance of the best fold by normal equations."""
    ends = feed_forward_of(encoder)
    bias = before.get_submodule(ends.output).bias is not None

    def solve(x, target, penalty):
        if not bias:
            scale = np.sqrt((x**2).sum(0))
            z = x / scale
            return np.linalg.solve(z.T @ z + penalty * np.eye(len(scale)), z.T @ target) / scale[:, None], 0.0
        mean, deviation, middle = x.mean(0), x.std(0), target.mean(0)
        z = (x - mean) / deviation
        weight = np.linalg.solve(z.T @ z / len(z) + penalty * np.eye(len(mean)), z.T @ (target - middle) / len(z))
        weight = weight / deviation[:, None]
        return weight, middle - mean @ weight

    results = []
    for penalty in paths.PENALTIES:
        if ends.norm is None:
            weight, constant = solve(fit["g"], fit["t"] - fit["y"], penalty)
            results.append(held["y"] + held["g"] @ weight + constant)
            continue
        norm = before.get_submodule(ends.norm)
        gamma, beta = norm.weight.detach().double().numpy(), norm.bias.detach().double().numpy()
        (of_n, add_n), (of_y, add_y) = (
            solve(fit["g"], target, penalty) for target in ((fit["t"] - beta) / gamma, fit["y"])
        )
        for scale in paths.SCALES:
            factor = scale * np.sqrt((fit["y"] ** 2).mean())
            total = held["y"] + held["g"] @ (factor * of_n - of_y) + factor * add_n - add_y
            centred = total - total.mean(1, keepdims=True)
            results.append(centred / np.sqrt((centred**2).mean(1, keepdims=True) + norm.eps) * gamma + beta)
    errors = [((result - held["t"]) ** 2).sum() for result in results]
    return 1 - min(errors) / ((held["t"] - held["t"].mean(0)) ** 2).sum()


def test_a_refit_is_the_ridge_regression_over_tokens(encoder, tiny_tokenizer):
    raw = RawStates(encoder, tiny_tokenizer, "mean", 64)
    groups = list(TokenizedTexts({"texts": random_texts(200)}, tiny_tokenizer, 40, [""]))
    for layers, place in (([1, 6], 0), ([1, 2, 5, 6], 1)):
        fit, held = rows_of(encoder, tiny_tokenizer, layers, place)
        (found, tensors), *swapped = paths.fit_paths(raw, groups, [layers])
        naive = naive_best(encoder, fit, held, layer_list(encoder, 6)[1][layers[place + 1] - 2])
        assert found.kinds == ["fold"] and found.r_squared[0] == pytest.approx(naive, abs=2e-4)
        assert [its.kinds for its, _ in swapped] == ([["swap"]] if encoder.config.model_type == "bert" else [])
        name = layer_list(encoder, 6)[0]
        assert tensors and all(key.startswith(f"{name}.{place}.") for key in tensors)


def test_a_refit_without_a_gap_gives_back_the_layer(encoder, tiny_tokenizer):
    raw = RawStates(encoder, tiny_tokenizer, "mean", 64)
    groups = list(TokenizedTexts({"texts": random_texts(200)}, tiny_tokenizer, 40, [""]))
    own, ends = layer_list(encoder, 6)[1], feed_forward_of(encoder)
    refit, path = paths._Refit(ends, own[1], {2: own[1]}), paths._Path([1, 2, 3], "fold", own)
    path.gaps = [1]
    with torch.no_grad():
        for held_out, rows in paths._rows(raw, groups, {(): path}, {2}, ends):
            refit.add(rows[()], held_out)
        _, tensors, r_squared = refit.best("fold", 2)
    assert r_squared > 1 - 1e-6
    if ends.norm is None:  # the matrix itself, up to the penalty
        torch.testing.assert_close(
            tensors[f"{ends.output}.weight"], own[1].get_submodule(ends.output).weight, atol=2e-2, rtol=2e-2
        )


@pytest.mark.parametrize("static", [True, False])
def test_states_at_a_path_are_those_of_its_layers(encoder, tiny_tokenizer, static):
    texts = random_texts(120)
    fit = fit_exits(encoder, tiny_tokenizer, texts, paths={2: [1, 6], 4: [1, 2, 5, 6]}, layers=[3], static=static)
    spec = Elasticity.of(encoder.config)
    assert spec.depths == {2: [1, 6], 3: [1, 2, 3], 4: [1, 2, 5, 6], **({0: []} if static else {})}
    assert [*fit.paths] == [2, 4] and [*fit.layers] == [*([0] if static else []), 2, 3, 4]
    inputs = tiny_tokenizer(texts[:5], padding=True, return_tensors="pt")
    depths = [*([0] if static else []), 2, 3, 4, 6]
    with torch.no_grad():
        together = nested_states(encoder, inputs, depths).layers
        for depth in depths:
            alone = encoder(**inputs, output_layer=depth).last_hidden_state
            mask = inputs["attention_mask"].bool()
            torch.testing.assert_close(together[depth][mask], alone[mask], atol=1e-5, rtol=1e-5)


def test_an_interrupted_fit_leaves_the_model_as_it_was(encoder, tiny_tokenizer, monkeypatch):
    texts = random_texts(120)
    fit_exits(encoder, tiny_tokenizer, texts, paths={2: [1, 6]})
    weights, elastic = copy.deepcopy(encoder.state_dict()), copy.deepcopy(encoder.config.elastic)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("m3bert.exits.passes.TextPasses.path_sums", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_exits(encoder, tiny_tokenizer, texts, paths={4: [1, 2, 5, 6]}, static=False)
    assert encoder.config.elastic == elastic and encoder.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in encoder.state_dict().items())
