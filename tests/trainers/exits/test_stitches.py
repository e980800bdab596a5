"""The fit of stitches: against a solve with all tokens, on a stack with an exact stitch, on ranks, and refusals."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModel

from modeling_m3bert import M3BertModel
from tests.conftest import tiny_config
from tests.trainers.exits.test_fit import naive_ridge, pooled, random_texts
from tests.trainers.tiny_run import run_two
from trainers import fit_exits
from trainers.exits.passes import RawStates, TextPasses


@pytest.fixture
def model() -> M3BertModel:
    torch.manual_seed(5)
    return M3BertModel(tiny_config(matryoshka_layers=[], matryoshka_dims=[])).eval()


@torch.no_grad()
def token_states(model, tokenizer, texts, layers) -> list[torch.Tensor]:
    """The raw states of all real tokens at some layers, and their token ids, text by text."""
    plain = M3BertModel(tiny_config(norm_position=model.config.norm_position)).eval()
    plain.load_state_dict(model.state_dict(), strict=False)
    found: list[list[torch.Tensor]] = [[] for _ in (*layers, "ids")]
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        states = plain(**inputs, output_hidden_states=True).hidden_states
        for values, new in zip(found, [*(states[layer][0] for layer in layers), inputs["input_ids"][0]], strict=True):
            values.append(new)
    return [torch.cat(values) for values in found]


@pytest.mark.parametrize("static", [True, False])
def test_a_stitch_is_the_ridge_regression_over_tokens(model, tiny_tokenizer, static):
    texts = random_texts(120)
    fit = fit_exits(model, tiny_tokenizer, texts, layers=[4], stitches={2: 1, 4: 2}, static=static)
    assert model.config.stitches == {2: 1, 4: 2} and [*fit.layers] == ([0, 2, 4] if static else [2, 4])
    assert model.config.legal_layers == [*([0] if static else []), 2, 4, 6]
    first, second, third, fourth, ids = token_states(model, tiny_tokenizer, texts, [1, 2, 4, 5])
    for depth, state, target in ((2, first, fourth), (4, second, third)):
        if static:
            state = torch.cat([state, model.static_table(ids).detach()], dim=1)
        expected = naive_ridge(state.double(), target.double(), fit.stitches[depth].penalty)(state.double())
        found = model.stitches[str(depth)](state).detach().double()
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
        assert 0 < fit.stitches[depth].r_squared < 1


def test_an_interrupted_fit_leaves_the_model_as_it_was(model, tiny_tokenizer, monkeypatch):
    texts = random_texts(120)
    fit_exits(model, tiny_tokenizer, texts, layers=[2, 4], stitches=[4])
    weights, config = copy.deepcopy(model.state_dict()), model.config.to_dict()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(TextPasses, "stitched_sums", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_exits(model, tiny_tokenizer, texts, layers=[1], stitches=[2], static=False)
    assert model.config.to_dict() == config and model.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_an_exact_stitch_is_found(model, tiny_tokenizer, tmp_path):
    with torch.no_grad():
        for layer in model.layers[1:5]:  # what they add is 0, so the states before and after them are the same
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    texts = random_texts(300)
    fit = fit_exits(model, tiny_tokenizer, texts, layers=[1], stitches=[2])
    assert fit.stitches[2].r_squared > 1 - 1e-6
    inputs = tiny_tokenizer(texts[:1], return_tensors="pt")
    with torch.no_grad():
        deep, short = (
            model(**inputs, output_layer=layer, output_hidden_states=True).hidden_states[-1] for layer in (6, 2)
        )
    torch.testing.assert_close(short, deep, atol=1e-2, rtol=0)
    model.save_pretrained(tmp_path)
    whole, cut = AutoModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path, output_layer=2)
    assert cut.config.exit_fit == fit.record() and fit.record()["stitches"]["2"].keys() == {
        "top_layers",
        "penalty",
        "r_squared",
    }
    vectors = pooled(cut, tiny_tokenizer, texts[:20], [2])[2]
    assert torch.equal(vectors, pooled(whole, tiny_tokenizer, texts[:20], [2])[2])


def test_fitting_again_starts_from_raw_states(model, tiny_tokenizer):
    texts, found = random_texts(100), []
    for _ in range(2):
        fit_exits(model, tiny_tokenizer, texts, layers=[1], stitches=[2], basis="principal")
        found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    fit_exits(model, tiny_tokenizer, texts, layers=[1])
    assert not model.config.stitches and not [*model.stitches]


def test_fewer_texts_are_sampled_from_all_groups(model, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("trainers.data.tokenized_texts.TEXTS_AT_ONCE", 50)
    monkeypatch.setattr("trainers.exits.stitches.MOST_TEXTS", 60)
    monkeypatch.setattr("trainers.exits.passes.STITCHED_TEXTS", 100)
    read: list[int] = []
    encode = RawStates.pooled
    monkeypatch.setattr(RawStates, "pooled", lambda raw, ids, at: read.append(len(ids)) or encode(raw, ids, at))
    fit_exits(model, tiny_tokenizer, random_texts(200), layers=[1], stitches=[2], static=False)
    assert read == [50, 50, 50, 50, 25, 25, 25, 25]


FIT_OF_TWO = """
import torch
from tests.conftest import tiny_tokenizer, tiny_config
from tests.trainers.exits.test_fit import random_texts
from modeling_m3bert import M3BertModel
from trainers import fit_exits
torch.distributed.init_process_group("gloo")
torch.manual_seed(5)
model = M3BertModel(tiny_config())
fit = fit_exits(model, tiny_tokenizer.__wrapped__(), random_texts(101), layers=[1], stitches=[2])
if torch.distributed.get_rank() == 0:
    torch.save(model.state_dict(), Path(sys.argv[1]) / "fit.pt")
"""


def test_two_processes_fit_what_one_does(tiny_tokenizer, tmp_path):
    run_two(tmp_path, FIT_OF_TWO)
    torch.manual_seed(5)
    model = M3BertModel(tiny_config())
    fit_exits(model, tiny_tokenizer, random_texts(101), layers=[1], stitches=[2])
    for name, tensor in torch.load(tmp_path / "fit.pt").items():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("stitches", "message"),
    [
        ([6], r"stitches=\[6\] must be within 1..5: a stitched depth runs at least one layer, and fewer than all"),
        ([0], r"stitches=\[0\] must be within 1..5"),
        ({2: 3}, "A stitched depth of 2 layers cannot end in the last 3: take 1 to 2"),
    ],
)
def test_depths_that_cannot_be_stitched_are_refused(model, tiny_tokenizer, stitches, message):
    with pytest.raises(ValueError, match=message):
        fit_exits(model, tiny_tokenizer, random_texts(50), stitches=stitches)
