"""Paths of m3BERT: which layers a depth runs, and with which matrices."""

import itertools

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModel

from m3bert.modeling import M3BertModel
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.models.native import convert_to_native
from tests.conftest import padded_batch, refused, tiny_config
from tests.modeling_m3bert.static_models import WIDTH, affine, give_table, random_paths
from tests.modeling_m3bert.test_modeling_m3bert import SWITCHES


PATHS = {1: [6], 2: [1, 6], 3: [2, 4, 6], 4: [1, 2, 5, 6]}


def with_paths(paths=PATHS, table=True, model_class=M3BertModel, **changes):
    """A tiny model whose depths 1 to 4 have exits, and run these paths."""
    model = model_class(tiny_config(matryoshka_layers=[], **changes)).eval()
    if table:
        give_table(model.base_model, (0, 1, 2, 3, 4), paths=paths)
    else:
        exits = {layer: affine() for layer in range(1, 5)}
        model.base_model.set_depths(exits=exits, paths=random_paths(model.base_model, paths))
    return model


def by_hand(model: M3BertModel, batch: dict[str, torch.Tensor], depth: int) -> list[torch.Tensor]:
    """Input of the first layer that runs, and the raw output of each, in their order."""
    mask = batch["attention_mask"][:, None, None].bool()
    state, _ = model.embed(model.embed_tokens(batch["input_ids"]), None)
    states = [state]
    for place, layer in enumerate(PATHS[depth]):
        refitted = model.elastic.refitted(depth).get(f"layers.{place}.mlp.down_proj.weight")
        linear = model.layers[layer - 1].mlp.down_proj

        def product(module, inputs, output, refitted=refitted, bias=linear.bias):
            return None if refitted is None else torch.nn.functional.linear(inputs[0], refitted, bias)

        hook = linear.register_forward_hook(product)
        states.append(model.layers[layer - 1](states[-1], attention_mask=mask))
        hook.remove()
    return states


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("switches", [{}, {"norm_position": "post", "norm_type": "layernorm"}], ids=str)
def test_a_path_runs_its_layers_with_its_matrices(switches, table):
    model, batch = with_paths(table=table, **switches).double(), padded_batch()
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        for depth in PATHS:
            states = by_hand(model, batch, depth)
            actual = model(**batch, output_layer=depth, output_hidden_states=True)
            assert len(actual.hidden_states) == depth + 1
            normed = [*states[:-1], model.norm(states[-1])]
            for state, expected in zip(actual.hidden_states, normed, strict=True):
                torch.testing.assert_close(state[real], expected[real], rtol=1e-12, atol=1e-12)
            static = model.static_states(**batch) if table else None
            expected = model.exit_state(depth, normed[-1], static=static)
            torch.testing.assert_close(actual.last_hidden_state[real], expected[real], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("switches", SWITCHES[:3], ids=lambda s: ",".join(s) or "paper")
def test_a_cut_is_a_checkpoint_of_its_layers(tmp_path, switches, bytes_read):
    whole, batch = with_paths(**switches), padded_batch()
    whole.save_pretrained(tmp_path / "whole")
    for depth, dim in itertools.product(PATHS, (8, 32)):
        bytes_read.clear()
        size = {"output_layer": depth, "output_dim": dim}
        cut, info = M3BertModel.from_pretrained(tmp_path / "whole", output_loading_info=True, **size)
        assert not any(info.values())
        refitted = sum(tensor.nbytes for tensor in whole.elastic.refitted(depth).values())
        table = cut.elastic.table.weight.nbytes // 2  # stored in float16
        needed = sum(tensor.nbytes for tensor in cut.state_dict().values())
        assert sum(bytes_read) == needed + refitted - table
        cut.save_pretrained(tmp_path / "cut")
        with safe_open(tmp_path / "cut" / "model.safetensors", "pt") as file:
            numbers = {int(name.split(".")[1]) for name in file.keys() if name.startswith("layers.")}
        assert numbers == {*range(depth)} and not list(cut.elastic.paths)
        again = AutoModel.from_pretrained(tmp_path / "cut")
        spec = Elasticity.of(again.config)
        assert not spec.is_path(depth) and again.config.elastic["source_layers"] == PATHS[depth]
        with torch.no_grad():
            expected = whole(**batch, output_layer=depth, output_dim=dim).last_hidden_state
            for model in (cut, again):
                assert torch.equal(model(**batch).last_hidden_state, expected)


def test_a_cut_keeps_the_depths_below_its_gap_that_have_no_exit(tmp_path):
    whole, batch = M3BertModel(tiny_config(matryoshka_layers=[])).eval(), padded_batch()
    whole.set_depths(exits={5: affine()}, paths=random_paths(whole, {5: [1, 2, 3, 4, 6]}))
    whole.save_pretrained(tmp_path / "whole")
    cut = AutoModel.from_pretrained(tmp_path / "whole", output_layer=5)
    assert cut.config.legal_layers == [1, 2, 3, 5]
    cut.save_pretrained(tmp_path / "cut")
    shallow = AutoModel.from_pretrained(tmp_path / "cut", output_layer=3)
    with torch.no_grad():
        assert torch.equal(shallow(**batch).last_hidden_state, whole(**batch, output_layer=3).last_hidden_state)


def test_a_cut_path_becomes_a_native_encoder(tmp_path):
    switches = {"norm_position": "post", "norm_type": "layernorm", "mlp_gated": False, "hidden_act": "gelu"}
    with_paths(table=False, **switches).save_pretrained(tmp_path)
    cut, batch = M3BertModel.from_pretrained(tmp_path, output_layer=2), padded_batch()
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        raw = cut(**batch, output_hidden_states=True).hidden_states[-1]
        actual = convert_to_native(cut)(**batch).last_hidden_state
    torch.testing.assert_close(actual[real], raw[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("layers", "matrices", "message"),
    [
        ([1, 5], {}, "a path must end in the last layer"),
        ([6, 1], {}, r"must run 2 of the layers 1\.\.6, ascending"),
        ([1, 6], {"layers.1.mlp.down_proj.weight": (WIDTH, WIDTH)}, "down_proj.weight' has the shape"),
        ([1, 6], {"layers.2.mlp.down_proj.weight": (WIDTH, 37)}, "the model needs None"),
        ([1, 6], {"layers.0.mlp.bottom.weight": (WIDTH, 37)}, "the model needs None"),
    ],
)
def test_what_is_no_path_is_refused(layers, matrices, message, tiny_model):
    tensors = {name: torch.zeros(shape) for name, shape in matrices.items()}
    refused(message, tiny_model.set_depths, paths={2: (layers, tensors)})
    assert tiny_model.config.elastic is None
