"""The static table: its mean over a text as layer 0, and as a second input of deeper exits."""

import copy

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModel

from m3bert.modeling import M3BertConfig, M3BertForMaskedLM, M3BertForTokenClassification, M3BertModel
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.modeling.files_elastic import PARTS_FILE, write_parts
from m3bert.models.native import convert_to_native, output_map
from tests.conftest import padded_batch, refused, tiny_config
from tests.modeling_m3bert.static_models import IGNORED, VOCABULARY, WIDTH, affine, halves, static_mean, with_table
from tests.models.test_native import random_m3bert


# Padded on either side, with ignored tokens, a text of ignored tokens alone, and one that is empty.
TEXTS = [[5, 7, 9, 9, 30], [98], [0, 7, 2], [], [2, 11, 12, 0, 13, 14]]


PATHS = pytest.mark.parametrize("paths", [{}, {2: [1, 6], 4: [1, 2, 5, 6]}], ids=["prefixes", "paths"])


def batch_of(texts: list[list[int]], left: bool = False, padding: int = 1) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    ids, mask = torch.full((len(texts), longest), padding), torch.zeros(len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        places = slice(longest - len(text), longest) if left else slice(len(text))
        ids[row, places], mask[row, places] = torch.tensor(text, dtype=torch.long), 1
    return {"input_ids": ids, "attention_mask": mask}


def flat_batch(texts: list[list[int]]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([0, *map(len, texts)])
    return {
        "input_ids": torch.tensor([[token for text in texts for token in text]]),
        "position_ids": torch.tensor([[place for text in texts for place in range(len(text))]]),
        "cu_seq_lens_q": lengths.cumsum(0),
    }


@pytest.mark.parametrize("left", [False, True])
def test_values_and_gradients_are_those_of_a_loop_over_tokens(left):
    model = with_table().double()
    table = model.elastic.table.weight
    batch = batch_of(TEXTS, left)
    actual = model.static_states(**batch)
    expected = torch.stack([static_mean(table, text) for text in TEXTS]).unsqueeze(1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert not actual[2:4].any(), "nothing counts in these texts"
    flat = flat_batch(TEXTS)
    flattened = model.static_states(flat["input_ids"], cu_seq_lens=flat["cu_seq_lens_q"])
    per_token = torch.cat([expected[row].expand(len(text), -1) for row, text in enumerate(TEXTS)])
    torch.testing.assert_close(flattened[0], per_token, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(actual)
    target, ours = (
        torch.autograd.grad((weights * states).sum(), table, retain_graph=True)[0] for states in (expected, actual)
    )
    torch.testing.assert_close(ours, target, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(flattened)
    target, ours = (torch.autograd.grad((weights * states).sum(), table)[0] for states in (per_token, flattened))
    torch.testing.assert_close(ours, target, rtol=1e-12, atol=1e-12)


@PATHS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_flattened_texts_are_those_of_a_padded_batch(attention, paths):
    model, texts = with_table(paths=paths).double(), [text for text in TEXTS if text]
    model.set_attn_implementation(attention)
    batch = batch_of(texts)
    with torch.no_grad():
        for layer in (0, 2, 4):
            padded = model(**batch, output_layer=layer).last_hidden_state
            flat = model(**flat_batch(texts), output_layer=layer).last_hidden_state[0]
            torch.testing.assert_close(flat, padded[batch["attention_mask"].bool()], rtol=1e-12, atol=1e-12)


def test_layer_0_alone_is_the_table_and_reads_nothing_else(tmp_path, bytes_read):
    whole, batch = with_table(), batch_of(TEXTS)
    whole.save_pretrained(tmp_path / "whole")
    AutoModel.from_pretrained(tmp_path / "whole", output_layer=0).save_pretrained(tmp_path / "alone")
    with safe_open(tmp_path / "whole" / PARTS_FILE, "pt") as file:
        assert 0 < sum(bytes_read) <= 1.05 * file.get_tensor("table").nbytes
    with torch.no_grad():
        expected = whole(**batch, output_layer=0, output_dim=8).last_hidden_state
        for folder, size in (("whole", {"output_layer": 0}), ("alone", {})):
            table = AutoModel.from_pretrained(tmp_path / folder, output_dim=8, **size)
            assert list(table.state_dict()) == ["elastic.table.weight"] and not list(table.buffers())
            assert table.get_input_embeddings() is table.elastic.table
            table.elastic.table.weight[:, 8:] = torch.nan  # only the columns of a prefix are gathered
            assert torch.equal(table(**batch).last_hidden_state, expected)
        for layer in whole.layers:
            layer.forward = whole.embed_tokens.forward = None  # calling them would be an error
        assert torch.equal(whole(**batch, output_layer=0, output_dim=8).last_hidden_state, expected)


@pytest.mark.parametrize("dtype", [None, "auto", torch.float32, torch.bfloat16, torch.float16])
def test_the_table_is_stored_in_float16_and_has_the_type_of_the_model(tmp_path, dtype):
    model = with_table()
    with torch.no_grad():
        model.elastic.table.weight += 1e-5
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / PARTS_FILE)
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    assert kinds.pop("table") == torch.float16 and {*kinds.values()} == {torch.float32}
    assert torch.equal(stored["table"], model.elastic.table.weight.half())
    for layer in (0, 4):
        loaded = AutoModel.from_pretrained(tmp_path, output_layer=layer, **({} if dtype is None else {"dtype": dtype}))
        target = dtype if isinstance(dtype, torch.dtype) else torch.float32
        assert {parameter.dtype for parameter in loaded.parameters()} == {target}
    model.save_pretrained(tmp_path, exact=True)
    assert torch.equal(load_file(tmp_path / PARTS_FILE)["table"], model.elastic.table.weight)


@pytest.mark.parametrize("layer", [None, 0, 4])
@pytest.mark.parametrize("tokens", [103, 20])
def test_resizing_the_vocabulary_resizes_the_table(tmp_path, layer, tokens):
    with_table().save_pretrained(tmp_path / "whole")
    model = M3BertModel.from_pretrained(tmp_path / "whole", output_layer=layer)
    old = model.elastic.table.weight.detach().clone()
    resized = model.resize_token_embeddings(tokens)
    assert resized is model.get_input_embeddings() and resized.weight.shape == (tokens, WIDTH)
    table = model.elastic.table.weight
    assert table.shape == (tokens, WIDTH) and table.requires_grad and not table[VOCABULARY:].any()
    assert torch.equal(table[:VOCABULARY], old[:tokens])
    model.save_pretrained(tmp_path / "resized")
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "resized").elastic.table.weight, table)


def test_given_static_states_replace_the_look_up():
    model, batch = with_table(), batch_of(TEXTS)
    states = model.static_states(**batch)
    embedded = {"inputs_embeds": model.embed_tokens(batch["input_ids"]), "attention_mask": batch["attention_mask"]}
    for layer in (0, 2):
        expected = model(**batch, output_layer=layer).last_hidden_state
        assert torch.equal(model(**embedded, output_layer=layer, static_states=states).last_hidden_state, expected)
        with pytest.raises(
            ValueError, match=rf"Depth {layer} reads the static table by token ids: pass input_ids, or"
        ):
            model(**embedded, output_layer=layer)
    model(**embedded, output_layer=6)  # does not read it


@pytest.mark.slow
@PATHS
def test_a_compiled_model_computes_the_same(paths):
    model, batch = with_table(paths=paths), batch_of(TEXTS)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for layer in (0, 2):
            expected = model(**batch, output_layer=layer).last_hidden_state
            torch.testing.assert_close(compiled(**batch, output_layer=layer).last_hidden_state, expected)


def test_adapters_leave_table_and_joint_maps_alone():
    peft = pytest.importorskip("peft")
    model, batch = with_table(), batch_of(TEXTS)
    expected = model(**batch, output_layer=4).last_hidden_state
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules="all-linear"))
    torch.testing.assert_close(adapted(**batch, output_layer=4).last_hidden_state, expected)
    assert not [name for name, _ in adapted.named_parameters() if "lora" in name and "exits" in name]


@pytest.mark.parametrize("dropped", [[0], [2, 4], [0, 2, 4]])
def test_dropped_depths_take_the_table_with_them_if_no_depth_is_left(tmp_path, dropped):
    model = with_table()
    model.drop_depths(dropped)
    left = [layer for layer in (0, 2, 4) if layer not in dropped]
    spec = Elasticity.of(model.config)
    assert spec.table == spec.exits == left
    assert (model.elastic.table is None) == (not left)
    model.save_pretrained(tmp_path)
    assert M3BertModel.from_pretrained(tmp_path).state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("layer", [2, 6])
def test_a_native_model_has_the_map_of_the_state_alone(layer, tmp_path):
    source = random_m3bert()
    maps = {2: affine(), 6: affine()}
    joints = {number: affine(2 * WIDTH) for number in maps}
    source.set_depths(exits=maps, joints=joints, table=halves(VOCABULARY, WIDTH), ignored_ids=IGNORED)
    source.save_pretrained(tmp_path / "static")
    source.set_depths(exits=maps)
    source.save_pretrained(tmp_path / "plain")
    models = [M3BertModel.from_pretrained(tmp_path / name, output_layer=layer) for name in ("static", "plain")]
    for one, other in zip(*map(output_map, models), strict=True):
        assert torch.equal(one, other)
    batch = padded_batch()
    one, other = (convert_to_native(model)(**batch).last_hidden_state for model in models)
    assert torch.equal(one, other)


def reloaded(model, folder, **size):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, **size)


TOKENS = torch.ones(1, 2, dtype=torch.long)
REFUSED = {
    "no table": (
        lambda _: M3BertModel(tiny_config()).set_depths(exits={2: affine()}, joints={2: affine(64)}),
        r"joints=\[2\] must have an exit, and read a static table",
    ),
    "table of another vocabulary": (
        lambda _: M3BertModel(tiny_config()).set_depths(table=halves(98, 32)),
        "The new depths: 'table' has the shape",
    ),
    "table that a table-only model loses": (
        lambda folder: reloaded(with_table(), folder, output_layer=0).set_depths(),
        "depth 0 is the table",
    ),
    "static states of a model without a table": (
        lambda _: M3BertModel(tiny_config()).static_states(TOKENS),
        "The model has no static table",
    ),
    "state without its static state": (
        lambda _: with_table().exit_state(2, torch.randn(3, 32)),
        "Depth 2 reads the static table: pass static, from static_states",
    ),
    "new table": (
        lambda _: M3BertModel(M3BertConfig(**{**with_table().config.to_dict(), "output_layer": 0})),
        "Layer 0 is a static table, which is loaded",
    ),
    "masked-LM head of a table": (
        lambda folder: reloaded(with_table(M3BertForMaskedLM), folder, output_layer=0),
        "Layer 0 is a static table here, which predicts no tokens",
    ),
    "native table": (
        lambda folder: convert_to_native(reloaded(with_table(), folder, output_layer=0)),
        "its layer 0 is a static table. Export that instead: `m3bert export --format static`",
    ),
    "native head": (
        lambda folder: convert_to_native(reloaded(with_table(M3BertForTokenClassification), folder, output_layer=2)),
        "its head reads the static table",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(tmp_path, name):
    request, message = REFUSED[name]
    refused(message, request, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update(table=tensors["table"][:-1].clone()), "'table' has the shape"),
        (lambda tensors: tensors.pop("table"), "'table' has the shape None"),
        (lambda tensors: tensors.pop("exits.4.joint.bias"), "'exits.4.joint.bias' has the shape None"),
    ],
    ids=["vocabulary", "no table", "no joint map"],
)
def test_a_damaged_file_is_refused(tmp_path, change, message):
    with_table().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / PARTS_FILE)
    change(tensors)
    write_parts(tmp_path, tensors)
    refused(message, AutoModel.from_pretrained, tmp_path)
