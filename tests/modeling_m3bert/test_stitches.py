"""Stitched depths: which layers they run, what a cut has of them, and what is refused."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from modeling_m3bert import M3BertForMaskedLM, M3BertModel, convert_to_native
from modeling_m3bert.configuration_m3bert import layers_of, plan_of
from tests.conftest import padded_batch, tiny_config
from tests.modeling_m3bert.static_models import WIDTH, affine, assert_refused, give_table, with_table
from tests.modeling_m3bert.test_modeling_m3bert import SWITCHES
from trainers import nested_states


TOPS = {1: 1, 2: 1, 3: 3, 4: 2}


def with_stitches(tops=TOPS, table=True, model_class=M3BertModel, **changes):
    """A tiny model whose depths 1 to 4 have exits and, those of `tops`, stitches."""
    model = model_class(tiny_config(matryoshka_layers=[], **changes)).eval()
    if table:
        give_table(model.base_model, (0, 1, 2, 3, 4), stitches=tops)
    else:
        model.base_model.set_exits(
            {layer: affine() for layer in range(1, 5)},
            stitches={layer: (top, *affine()) for layer, top in tops.items()},
        )
    return model


def by_hand(model: M3BertModel, batch: dict[str, torch.Tensor], depth: int, top: int) -> list[torch.Tensor]:
    """Input of the first layer that runs, and the raw output of each, in their order."""
    mask = batch["attention_mask"][:, None, None].bool()
    state, _ = model.embed(model.embed_tokens(batch["input_ids"]), None)
    states = []
    for number in [*range(depth - top), *range(6 - top, 6)]:
        if number == 6 - top:
            joined = [state, model.static_table(batch["input_ids"])] if model.static_table is not None else [state]
            stitch = model.stitches[str(depth)]
            state = torch.cat(joined, -1) @ stitch.weight.T + stitch.bias
        states = states or [state]
        state = model.layers[number](state, attention_mask=mask)
        states.append(state)
    return states


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("switches", [{}, {"norm_position": "post", "norm_type": "layernorm"}], ids=str)
def test_a_stitched_depth_runs_its_first_and_its_last_layers(switches, table):
    model, batch = with_stitches(table=table, **switches).double(), padded_batch()
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        for depth, top in TOPS.items():
            states = by_hand(model, batch, depth, top)
            static = model.static_states(**batch) if table else None
            expected = model.exit_state(depth, model.norm(states[-1]), static=static)
            found = model(**batch, output_layer=depth, output_hidden_states=True)
            torch.testing.assert_close(found.last_hidden_state[real], expected[real], rtol=1e-10, atol=1e-10)
            assert len(found.hidden_states) == depth + 1
            for one, other in zip(found.hidden_states[:-1], states[:-1], strict=True):
                torch.testing.assert_close(one[real], other[real], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layers", [[1, 2, 3, 4, 5, 6], [2], [3, 4], [0, 4], [1, 3, 5]])
def test_states_of_a_grid_are_those_of_each_depth_and_run_no_other_layers(layers):
    tops = {2: 1, 4: 2}
    model, batch = with_stitches(tops), padded_batch()
    with torch.no_grad():
        alone = {layer: model(**batch, output_layer=layer).last_hidden_state for layer in {*layers} - {5}}
        calls = []
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: calls.append(1))
        found = nested_states(model, batch, layers).layers
    assert list(found) == layers
    assert len(calls) == max(layer - tops.get(layer, 0) for layer in layers) + sum(
        top for layer, top in tops.items() if layer in layers
    )
    for layer, state in alone.items():
        torch.testing.assert_close(found[layer], state)


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("switches", SWITCHES[:3], ids=lambda s: ",".join(s) or "paper")
def test_a_cut_is_a_complete_checkpoint_of_its_layers(tmp_path, switches, table, bytes_read):
    whole, batch = with_stitches(table=table, **switches), padded_batch()
    whole.save_pretrained(tmp_path / "whole")
    for depth, dim in itertools.product(TOPS, (8, 32)):
        bytes_read.clear()
        cut, info = M3BertModel.from_pretrained(
            tmp_path / "whole", output_layer=depth, output_dim=dim, output_loading_info=True
        )
        assert not any(info.values())
        cut.save_pretrained(tmp_path / "cut")
        with safe_open(tmp_path / "cut" / "model.safetensors", "pt") as file:
            assert sum(bytes_read) == sum(file.get_tensor(name).nbytes for name in file.keys())
            numbers = {int(name.split(".")[1]) for name in file.keys() if name.startswith("layers.")}
        assert numbers == {*range(depth)}
        assert "_stored_layers" not in json.loads((tmp_path / "cut" / "config.json").read_text())
        again = AutoModel.from_pretrained(tmp_path / "cut")
        assert layers_of(depth, again.config) == [*range(depth)]
        with torch.no_grad():
            expected = whole(**batch, output_layer=depth, output_dim=dim).last_hidden_state
            assert torch.equal(cut(**batch).last_hidden_state, expected)
            assert torch.equal(again(**batch).last_hidden_state, expected)


def test_a_cut_keeps_the_depths_below_its_stitch_that_have_no_exit(tmp_path):
    whole, batch = M3BertModel(tiny_config(matryoshka_layers=[])).eval(), padded_batch()
    whole.set_exits({5: affine()}, stitches={5: (2, *affine())})
    whole.save_pretrained(tmp_path / "whole")
    cut = AutoModel.from_pretrained(tmp_path / "whole", output_layer=5)
    assert cut.config.legal_layers == [1, 2, 3, 5]
    cut.save_pretrained(tmp_path / "cut")
    shallow = AutoModel.from_pretrained(tmp_path / "cut", output_layer=3)
    assert not shallow.config.stitch_layers and not [*shallow.stitches]
    with torch.no_grad():
        assert torch.equal(shallow(**batch).last_hidden_state, whole(**batch, output_layer=3).last_hidden_state)


def test_a_prefix_has_no_stitch_and_a_model_without_stitches_does_not_mention_them(tmp_path, tiny_model):
    with_stitches({4: 2}).save_pretrained(tmp_path / "whole")
    for model in (AutoModel.from_pretrained(tmp_path / "whole", output_layer=3), tiny_model):
        model.save_pretrained(tmp_path / "saved")
        names = {*json.loads((tmp_path / "saved" / "config.json").read_text())}
        names |= {*load_file(tmp_path / "saved" / "model.safetensors")}
        assert not [name for name in names if "stitch" in name or "stored" in name]


def test_a_model_built_from_a_config_has_numbered_layers_and_saves_them(tmp_path):
    config = with_stitches().config
    config.output_layer = 4
    model, batch = M3BertForMaskedLM(config).eval(), padded_batch()
    assert list(model.model.layers._modules) == ["0", "1", "2", "3"]
    model.save_pretrained(tmp_path)
    again = M3BertForMaskedLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_a_fresh_stitch_is_the_identity_of_the_state(tiny_model):
    config = tiny_config(exit_layers=[4], static_layers=[4], stitch_layers=[4], stitch_top_layers=[2])
    model, batch = M3BertModel(config).eval(), padded_batch()
    with torch.no_grad():
        for name, parameter in tiny_model.named_parameters():
            model.get_parameter(name).copy_(parameter)
        state = tiny_model(**batch, output_hidden_states=True).hidden_states[2]
        for layer in tiny_model.layers[4:]:
            state = layer(state, attention_mask=batch["attention_mask"][:, None, None].bool())
        real = batch["attention_mask"].bool()
        found = model(**batch, output_layer=4).last_hidden_state
    torch.testing.assert_close(found[real], tiny_model.norm(state)[real])


def test_given_rows_replace_the_look_up():
    model, batch = with_stitches(), padded_batch()
    given = {
        "inputs_embeds": model.embed_tokens(batch["input_ids"]),
        "attention_mask": batch["attention_mask"],
        "static_states": model.static_states(**batch),
        "static_rows": model.static_table(batch["input_ids"]),
    }
    expected = model(**batch, output_layer=2).last_hidden_state
    assert torch.equal(model(**given, output_layer=2).last_hidden_state, expected)


def test_dropped_exits_take_their_stitches_with_them():
    model = with_stitches()
    model.drop_exits([1, 4])
    assert model.config.stitches == {2: 1, 3: 3} and list(model.stitches) == ["2", "3"]


@pytest.mark.parametrize(
    ("depths", "plan"), [([4], (2, [4])), ([6, 4, 2], (6, [2, 4])), ([3, 4], (3, [4])), ([5], (5, []))]
)
def test_the_plan_of_several_depths(depths, plan):
    config = tiny_config(exit_layers=[2, 4], stitch_layers=[2, 4])
    assert config.stitches == {2: 1, 4: 2}
    assert plan_of(depths, config) == plan


REFUSED = {
    "depth without an exit": (
        lambda: tiny_config(exit_layers=[2], stitch_layers=[4]),
        r"stitch_layers=\[4\] must be ascending and among exit_layers=\[2\]",
    ),
    "embedding layer": (
        lambda: tiny_config(exit_layers=[0], stitch_layers=[0]),
        r"stitch_top_layers=\[1\] must have a number of last layers for each of stitch_layers=\[0\]",
    ),
    "more last layers than layers": (
        lambda: tiny_config(exit_layers=[2], stitch_layers=[2], stitch_top_layers=[3]),
        r"stitch_top_layers=\[3\] must have a number of last layers for each of stitch_layers=\[2\], from 1",
    ),
    "no number of last layers": (
        lambda: tiny_config(exit_layers=[2, 4], stitch_layers=[2, 4], stitch_top_layers=[1]),
        "must have a number of last layers for each",
    ),
    "stitch without an exit": (
        lambda: M3BertModel(tiny_config()).set_exits({2: affine()}, stitches={4: (2, *affine())}),
        r"stitch_layers=\[4\] must be ascending and among",
    ),
    "native model": (
        lambda: convert_to_native(
            M3BertModel(tiny_config(exit_layers=[4], stitch_layers=[4], stitch_top_layers=[2], output_layer=4))
        ),
        "depth 4 is stitched, and no native model has a map between its layers. Export it to ONNX instead",
    ),
    "embeddings without rows": (
        lambda: with_stitches()(
            inputs_embeds=torch.randn(1, 3, WIDTH), static_states=torch.randn(1, 1, WIDTH), output_layer=2
        ),
        r"The stitched depths \[2\] read the static table by token ids: pass input_ids, or static_rows beside",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name):
    assert_refused(*REFUSED[name])


def test_a_checkpoint_without_its_stitch_is_refused(tmp_path):
    with_table(stitches={4: 2}).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["stitches.4.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"Missing encoder tensors: stitches\.4\.weight"):
        AutoModel.from_pretrained(tmp_path, output_layer=4)
    AutoModel.from_pretrained(tmp_path, output_layer=2)  # does not read it
