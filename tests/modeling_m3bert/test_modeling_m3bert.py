"""The architecture: attention back ends, switches, states, heads, compilation, flattened input."""

import itertools
import json
import re

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

from m3bert.modeling import (
    M3BertForMaskedLM,
    M3BertForSequenceClassification,
    M3BertForTokenClassification,
    M3BertModel,
)
from m3bert.modeling.modeling_m3bert import NestedLinear
from tests.conftest import padded_batch, refused, tiny_config


SWITCHES = [
    {}, {"mlp_gated": False, "hidden_act": "gelu"}, {"norm_position": "post"}, {"norm_type": "layernorm"},
    {"hidden_dropout": 0.1}, {"attention_bias": True, "mlp_bias": True}, {"position_embedding_type": "rope"},
    {"mlp_gated": False, "hidden_act": "gelu", "norm_position": "post", "norm_type": "layernorm", "mlp_bias": True},
]  # fmt: skip


def naive_forward(model: M3BertModel, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> list[torch.Tensor]:
    """The paper's encoder, a text at a time and without padding: states after the embeddings and after every layer."""
    config, rows = model.config, []
    heads, head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    for ids, mask in zip(input_ids, attention_mask, strict=True):
        x = model.embed_tokens(ids[mask.bool()])
        position = torch.arange(len(x))
        if config.position_embedding_type == "absolute":
            x = x + model.pos_embeddings(position)
        x = model.input_norm(x)
        states = [x]
        for layer in model.layers:
            pre = config.norm_position == "pre"
            y = layer.input_layernorm(x) if pre else x
            q, k, v = (getattr(layer.self_attn, f"{n}_proj")(y).view(-1, heads, head_dim) for n in "qkv")
            if config.position_embedding_type == "rope":
                frequency = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
                turn = torch.exp(1j * position[:, None] * frequency)[:, None]

                def rotated(z, turn=turn):
                    a, b = z.chunk(2, dim=-1)
                    c = torch.complex(a, b) * turn
                    return torch.cat((c.real, c.imag), dim=-1)

                q, k = rotated(q), rotated(k)
            weights = torch.softmax(torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5, dim=-1)
            x = x + layer.self_attn.o_proj(torch.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1))
            x = x if pre else layer.input_layernorm(x)
            y = layer.post_attention_layernorm(x) if pre else x
            act = nn.functional.silu if config.hidden_act == "silu" else nn.functional.gelu
            inner = (
                act(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y) if config.mlp_gated else act(layer.mlp.up_proj(y))
            )
            x = x + layer.mlp.down_proj(inner)
            x = x if pre else layer.post_attention_layernorm(x)
            states.append(x)
        states[-1] = model.norm(states[-1])
        rows.append(states)
    return [torch.cat(states) for states in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("attention", "switches"),
    # flex compiles for a while, and does not see the switches: once is enough.
    [*itertools.product(["eager", "sdpa"], SWITCHES), pytest.param("flex_attention", {}, marks=pytest.mark.slow)],
    ids=lambda value: value if isinstance(value, str) else ",".join(value) or "paper",
)
def test_states_equal_the_naive_encoder(switches, attention):
    model = M3BertModel(tiny_config(**switches)).eval()
    for norm in (module for module in model.modules() if isinstance(module, (nn.RMSNorm, nn.LayerNorm))):
        nn.init.normal_(norm.weight, mean=1.0, std=0.1)
    model.set_attn_implementation(attention)
    batch = padded_batch()
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
        expected = naive_forward(model, **batch)
    assert len(states) == 7
    for state, reference in zip(states, expected, strict=True):
        assert state.shape == (4, 7, 32)
        torch.testing.assert_close(state[batch["attention_mask"].bool()], reference, atol=2e-5, rtol=1e-5)


def test_a_row_of_padding_alone_gives_no_nan(tiny_model):
    batch = padded_batch(lengths=(5, 0))
    for attention in ("eager", "sdpa"):
        tiny_model.set_attn_implementation(attention)
        assert torch.isfinite(tiny_model(**batch).last_hidden_state).all()


def test_flattened_texts_do_not_see_each_other(tiny_model):
    batch = padded_batch()
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [{"input_ids": ids[:n].tolist()} for ids, n in zip(batch["input_ids"], lengths, strict=True)]
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(rows)
    flat.pop("labels")
    for attention in ("eager", "sdpa"):
        tiny_model.set_attn_implementation(attention)
        with torch.no_grad():
            padded = tiny_model(**batch).last_hidden_state[batch["attention_mask"].bool()]
            flattened = tiny_model(**flat).last_hidden_state
        assert flattened.shape == (1, sum(lengths), 32)
        torch.testing.assert_close(flattened[0], padded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_in_one_graph_it_is_the_same(tiny_model, backend):
    batch = padded_batch()
    compiled = torch.compile(tiny_model, fullgraph=True, backend=backend)
    with torch.no_grad():
        expected = tiny_model(**batch, output_layer=4, output_dim=8).last_hidden_state
        actual = compiled(**batch, output_layer=4, output_dim=8).last_hidden_state
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_too_long_a_text_is_refused(tiny_model):
    refused("The input has 49 tokens but the model has 48 positions", tiny_model, torch.ones(1, 49, dtype=torch.long))
    rope = M3BertModel(tiny_config(position_embedding_type="rope")).eval()
    assert rope(torch.ones(1, 49, dtype=torch.long)).last_hidden_state.shape == (1, 49, 32)


def test_wrong_inputs_are_refused(tiny_model):
    refused("exactly one of input_ids and inputs_embeds", tiny_model)
    ids = torch.ones(1, 4, dtype=torch.long)
    tiny_model(ids, token_type_ids=torch.zeros_like(ids))
    refused("token_type_ids must be all zero", tiny_model, ids, token_type_ids=ids)


def test_masked_lm_logits_are_a_prefix_product(tiny_masked_lm):
    batch, model = padded_batch(), tiny_masked_lm
    state = model.model(**batch, output_layer=4).last_hidden_state
    logits = model(**batch, output_layer=4, output_dim=8).logits
    expected = state[..., :8] @ model.lm_head.weight[:, :8].T + model.lm_head.bias
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("sparse", [False, True])
def test_masked_lm_loss_is_cross_entropy_of_labelled_tokens(sparse):
    model = M3BertForMaskedLM(tiny_config(sparse_prediction=sparse)).eval()
    batch = padded_batch()
    labels = torch.where(torch.rand(4, 7) < 0.4, batch["input_ids"], -100)
    full = model(**batch).logits
    outputs = model(**batch, labels=labels)
    torch.testing.assert_close(outputs.loss, nn.functional.cross_entropy(full.flatten(0, 1), labels.flatten()))
    assert outputs.logits.shape == ((int((labels != -100).sum()), 99) if sparse else (4, 7, 99))
    total = model(**batch, labels=labels, num_items_in_batch=10).loss
    torch.testing.assert_close(total, outputs.loss * (labels != -100).sum() / 10)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tokens", [120, 70], ids=["grown", "shrunk"])
def test_the_masked_lm_head_stays_nested_when_the_vocabulary_is_resized(tmp_path, tokens, tied):
    model = M3BertForMaskedLM(tiny_config(tie_word_embeddings=tied)).eval()
    nn.init.normal_(model.lm_head.bias)
    batch, granularities = padded_batch(vocab_size=70), [{}, {"output_layer": 4, "output_dim": 8}]
    with torch.no_grad():
        before = [model(**batch, **granularity).logits for granularity in granularities]
        model.resize_token_embeddings(tokens)
        after = [model(**batch, **granularity).logits for granularity in granularities]
    assert type(model.lm_head) is NestedLinear
    assert model.config.vocab_size == model.lm_head.out_features == model.lm_head.bias.shape[0] == tokens
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    rest = min(tokens, 99)
    for old, new in zip(before, after, strict=True):
        assert new.shape == (4, 7, tokens)
        torch.testing.assert_close(new[..., :rest], old[..., :rest], atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = M3BertForMaskedLM.from_pretrained(tmp_path).eval()
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    with torch.no_grad():
        for granularity, expected in zip(granularities, after, strict=True):
            assert torch.equal(loaded(**batch, **granularity).logits, expected)


HEADS = [
    (M3BertForSequenceClassification, {"labels": torch.tensor([0, 2, 1, 1])}, (4, 3)),
    (M3BertForTokenClassification, {"labels": torch.randint(3, (4, 7))}, (4, 7, 3)),
]


@pytest.mark.parametrize(("head", "labels", "shape"), HEADS, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("granularity", [(None, None), (2, 8), (4, 32)])
def test_heads_work_and_learn_at_any_granularity(head, labels, shape, granularity):
    model = head(tiny_config(num_labels=3, attention_dropout=0.0, embedding_dropout=0.0)).train()
    batch = padded_batch()
    layer, dim = granularity
    outputs = model(**batch, **labels, output_layer=layer, output_dim=dim)
    assert outputs[1].shape == shape
    outputs.loss.backward()
    width = dim or 32
    gradient = model.classifier.weight.grad
    assert (gradient[:, :width].abs().sum(0) > 0).all()
    assert (gradient[:, width:] == 0).all()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0


INPUTS = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", "token_type_ids"}
CLASSES = [(M3BertModel, {}), (M3BertForMaskedLM, {"labels": None}), *((head, labels) for head, labels, _ in HEADS)]


def batch_and_embeddings(model):
    """One batch as token ids and as embeddings, in the shapes that the model takes."""
    batch = padded_batch()
    batch |= {"position_ids": torch.arange(1, 8).expand(4, 7), "token_type_ids": torch.zeros(4, 7, dtype=torch.long)}
    embedded = {**batch, "inputs_embeds": model.get_input_embeddings()(batch["input_ids"])}
    return batch, {name: value for name, value in embedded.items() if name != "input_ids"}


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("model_class", [model_class for model_class, _ in CLASSES[1:]])
def test_every_head_takes_embeddings_in_place_of_ids(model_class, pooling):
    model = model_class(tiny_config(num_labels=3, classifier_pooling=pooling)).eval()
    batch, embedded = batch_and_embeddings(model)
    with torch.no_grad():
        for names in (INPUTS, {"input_ids", "inputs_embeds"}):
            by_id = model(**{name: value for name, value in batch.items() if name in names})
            given = model(**{name: value for name, value in embedded.items() if name in names})
            for expected, actual in zip(by_id.to_tuple(), given.to_tuple(), strict=True):
                torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("model_class", [model_class for model_class, _ in CLASSES])
def test_every_class_returns_hidden_states_and_attentions_on_request(model_class):
    model = model_class(tiny_config(num_labels=3)).eval()
    model.set_attn_implementation("eager")
    batch, _ = batch_and_embeddings(model)
    outputs = model(**batch, output_layer=4, output_dim=8, output_hidden_states=True, output_attentions=True)
    assert [state.shape for state in outputs.hidden_states] == [(4, 7, 32)] * 5
    assert [attention.shape for attention in outputs.attentions] == [(4, 4, 7, 7)] * 4
    plain = model(**batch)
    assert plain.hidden_states is None and plain.attentions is None


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_sequence_classification_ignores_padding(pooling, left):
    positions = "rope" if left else "absolute"
    config = tiny_config(classifier_pooling=pooling, position_embedding_type=positions)
    model = M3BertForSequenceClassification(config).eval()
    batch = padded_batch(lengths=(7, 3))
    alone = {name: value[1:, :3] for name, value in batch.items()}
    if left:
        batch = {name: torch.stack([value[0], value[1].roll(4)]) for name, value in batch.items()}
    torch.testing.assert_close(model(**batch).logits[1:], model(**alone).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("model_class", [M3BertModel, M3BertForMaskedLM, M3BertForSequenceClassification])
def test_the_tensor_parallel_plan_names_every_projection_and_nothing_else(tmp_path, model_class, gated):
    model = model_class(tiny_config(mlp_gated=gated))
    modules = {re.sub(r"\d+", "*", name): module for name, module in model.named_modules()}
    assert set(model.tp_plan) <= set(modules)
    assert set(model.fsdp_plan) <= set(modules)
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear) and ".layers." in f".{name}"}
    assert {name.rpartition(".")[2] for name in linear} == {
        *(f"{name}_proj" for name in ("q", "k", "v", "o", "up", "down")),
        *(["gate_proj"] if gated else []),
    }
    styles = {name: "rowwise" if name.endswith(("o_proj", "down_proj")) else "colwise" for name in linear}
    assert {name: style for name, style in model.tp_plan.items() if ".layers." in f".{name}"} == styles
    model.save_pretrained(tmp_path)
    assert not any("plan" in name for name in json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.gpu
def test_flash_attention_equals_sdpa_on_flattened_input(tiny_model, flash_attention):
    model = tiny_model.to("cuda", torch.bfloat16)
    rows = [{"input_ids": torch.randint(5, 99, (n,)).tolist()} for n in (7, 3, 5)]
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")(rows)
    flat.pop("labels")
    flat = {name: value.to("cuda") if torch.is_tensor(value) else value for name, value in flat.items()}
    with torch.no_grad():
        expected = model(**flat).last_hidden_state
        model.set_attn_implementation(flash_attention)
        actual = model(**flat).last_hidden_state
    torch.testing.assert_close(actual, expected, atol=0.05, rtol=0.05)
