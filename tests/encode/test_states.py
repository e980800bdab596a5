"""Nested states of many types of backbones, pooling, prefixes."""

import pytest
import torch
import transformers
from datasets import Dataset
from torch import nn

from m3bert.encode.states import max_positions
from m3bert.evaluation import GridEncoder
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.models.anatomy import anatomy_of
from m3bert.models.conversion import CONVERTIBLE
from m3bert.models.feed_forward import feed_forward_of
from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer, Grid, NestedStates, nested_states, truncate
from tests.conftest import padded_batch, quiet, refused, tiny_config


SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 48, "initializer_range": 0.2, "pad_token_id": 1,
}  # fmt: skip
EXTRA = {
    "distilbert": {"dim": 32, "hidden_dim": 37, "n_layers": 4, "n_heads": 4},
    "electra": {"embedding_size": 32},
    "qwen3": {"head_dim": 8, "num_key_value_heads": 2},
    "eurobert": {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 2},
    "modernbert": {"cls_token_id": 0, "sep_token_id": 2, "bos_token_id": 0, "eos_token_id": 2},
    # As in EmbeddingGemma: bidirectional, with windows that are shorter than the texts of the tests.
    "gemma3_text": {
        "head_dim": 8,
        "num_key_value_heads": 2,
        "query_pre_attn_scalar": 8,
        "use_bidirectional_attention": True,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
    },
    "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    # As in DeBERTa-v3, with the convolution of v2-xlarge after the first layer.
    "deberta-v2": {
        "relative_attention": True,
        "position_biased_input": False,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "conv_kernel_size": 3,
        "conv_act": "gelu",
    },
}
OTHERS = sorted(
    [
        "deberta", "deberta-v2", "eurobert", "gemma3_text", "gte", "modernbert", "mpnet", "nomic_bert", "qwen3",
        *CONVERTIBLE,
    ]
)  # fmt: skip
# Those that are BERT or RoBERTa under another name: one of the two trains by default.
LIKE_BERT = ("camembert", "data2vec-text", "electra", "xlm-roberta")
# First position in the table of positions: 0, or after the padding token's.
OFFSETS = dict.fromkeys(("roberta", "xlm-roberta", "camembert", "data2vec-text", "mpnet"), 2)
ABSOLUTE = ("bert", "electra", "distilbert", "deberta", *OFFSETS)
# Those that count positions from the first real token, or look at distances only.
PADDED_ON_ANY_SIDE = sorted({*OTHERS, *OFFSETS} - {"bert", "electra", "distilbert", "deberta"})


def backbone(model_type: str, layers: int = 4, **changes: object) -> transformers.PreTrainedModel:
    if model_type == "m3bert":
        values = {"num_hidden_layers": layers, "matryoshka_layers": [2], "matryoshka_dims": [8], **changes}
        return M3BertModel(tiny_config(**values)).eval()
    values = {**SIZES, **EXTRA.get(model_type, {}), **changes}
    if model_type == "modernbert":
        # Lists a layer long must be cut by hand.
        values["layer_types"] = ["full_attention", "sliding_attention"] * 2
    config = transformers.AutoConfig.for_model(model_type, **values)
    model = transformers.AutoModel.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name.lower():
            nn.init.normal_(parameter, mean=float("weight" in name), std=0.2)
    return model


def cut_by_hand(model: nn.Module, depth: int) -> nn.Module:
    """A model that really has so many layers: what its last hidden state is, is the state of that layer."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers:
                setattr(module, name, child[:depth])
                model.config.num_hidden_layers = depth
                return model
    raise AssertionError("no list of layers found")


@pytest.mark.parametrize("model_type", [*OTHERS, "m3bert"])
def test_a_state_is_what_a_model_of_that_depth_would_return(model_type):
    model, batch = backbone(model_type), padded_batch()
    with torch.no_grad():
        states = nested_states(model, batch, [4, 1, 3])
        assert sorted(states.layers) == [1, 3, 4]
        assert states.causal == (model_type == "qwen3")
        assert torch.equal(states.layers[4], model(**batch).last_hidden_state)
        for layer in (4, 3, 1):
            expected = cut_by_hand(model, layer)(**batch).last_hidden_state
            real = batch["attention_mask"].bool()
            torch.testing.assert_close(states.layers[layer][real], expected[real], atol=1e-5, rtol=1e-5)


def test_states_of_a_post_norm_m3bert_and_of_a_cut_one():
    batch = padded_batch()
    post = M3BertModel(tiny_config(norm_position="post")).eval()
    with torch.no_grad():
        states = nested_states(post, batch, [2, 5])
        hidden = post(**batch, output_hidden_states=True).hidden_states
        assert torch.equal(states.layers[2], hidden[2])
        assert torch.equal(states.layers[5], hidden[5])
        cut = M3BertModel(tiny_config(output_layer=4, output_dim=8)).eval()
        # A state is full width, whatever the model returns by default.
        assert nested_states(cut, batch, [4]).layers[4].shape == (4, 7, 32)
        refused(r"layers=\[6\] must be within 0\.\.4", nested_states, cut, batch, [6])


@pytest.mark.parametrize("model_type", [*OTHERS, "m3bert"])
def test_layer_0_is_what_goes_into_the_first_layer(model_type):
    model, batch = backbone(model_type), padded_batch()
    seen: dict[str, torch.Tensor] = {}
    first = next(module for name, module in model.named_modules() if name.endswith((".0", "layers.0", "layer.0")))
    first.register_forward_pre_hook(
        lambda _, arguments, options: seen.update(state=arguments[0] if arguments else options["hidden_states"]),
        with_kwargs=True,
    )
    with torch.no_grad():
        states = nested_states(model, batch, [0, 2])
        assert sorted(states.layers) == [0, 2]
        torch.testing.assert_close(states.layers[0], seen["state"])


@pytest.mark.parametrize("model_type", PADDED_ON_ANY_SIDE)
def test_states_do_not_depend_on_the_side_of_the_padding(model_type):
    model, right = backbone(model_type), padded_batch()
    rolls = [7 - int(length) for length in right["attention_mask"].sum(dim=1)]
    left = {name: torch.stack([row.roll(n) for row, n in zip(x, rolls, strict=True)]) for name, x in right.items()}
    with torch.no_grad():
        expected, found = (nested_states(model, batch, [0, 1, 4]) for batch in (right, left))
    for layer in (0, 1, 4):
        state, other = expected.layers[layer], found.layers[layer]
        for row, n in enumerate(rolls):
            torch.testing.assert_close(other[row, n:], state[row, : 7 - n], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_text_of_as_many_tokens_as_there_are_positions(model_type, tiny_tokenizer):
    model = backbone(model_type)
    limit = max_positions(model.config)
    assert limit == 48 - OFFSETS.get(model_type, 0)
    ids = torch.randint(5, 99, (1, limit + 1))
    with torch.no_grad():
        assert nested_states(model, {"input_ids": ids[:, :limit]}, [4]).layers[4].isfinite().all()
        encoder = GridEncoder(model, tiny_tokenizer, Grid.parse("4x8"))
        assert encoder.max_length == limit  # the tokenizer would allow 48
        assert encoder.encode(["read " * 100]).layers[4].isfinite().all()
        if model_type in ABSOLUTE:
            with pytest.raises((IndexError, RuntimeError)):
                nested_states(model, {"input_ids": ids}, [4])


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=pytest.mark.slow) if name in LIKE_BERT else name for name in OTHERS]
)
def test_every_backbone_trains_saves_and_encodes(model_type, tiny_tokenizer, sentences, tmp_path):
    model = backbone(model_type)
    first = next(module[0] for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 4)
    before = {name: parameter.detach().clone() for name, parameter in first.named_parameters()}
    pairs = Dataset.from_dict({"anchor": sentences[:8], "positive": sentences[8:16]})
    args = ContrastiveConfig(
        **quiet(tmp_path, grid="1,4x8,32", max_steps=1, learning_rate=1e-2, per_device_train_batch_size=8)
    )
    ContrastiveTrainer(model, args, tiny_tokenizer, pairs).train()
    moved = [not torch.equal(parameter, before[name]) for name, parameter in first.named_parameters()]
    # A bias of the keys adds the same to all scores of a query.
    assert sum(moved) >= len(moved) - 1

    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModel.from_pretrained(tmp_path / "saved")
    grid = Grid.parse("1,3,4x8,32")
    vectors = [GridEncoder(its, tiny_tokenizer, grid).encode(sentences[:5]) for its in (model.eval(), again)]
    inputs = tiny_tokenizer(sentences[:5], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = nested_states(model, {name: inputs[name] for name in ("input_ids", "attention_mask")}, grid.layers)
    for granularity in grid:
        expected = truncate(states.pooled(granularity.layer), granularity.dim)
        for found in vectors:
            torch.testing.assert_close(found.at(granularity), expected, atol=1e-5, rtol=1e-5)


def test_a_gemma_is_causal_unless_its_config_says_otherwise():
    assert not anatomy_of(backbone("gemma3_text")).causal
    model, batch = backbone("gemma3_text", use_bidirectional_attention=False), padded_batch(lengths=(7, 7))
    with torch.no_grad():
        states = nested_states(model, batch, [4])
        other = {**batch, "input_ids": batch["input_ids"].clone()}
        other["input_ids"][:, 5:] = 4
        changed = nested_states(model, other, [4]).layers[4]
    assert states.causal
    torch.testing.assert_close(changed[:, :5], states.layers[4][:, :5])


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_keys_and_values_are_not_kept_for_generating_text(model_type):
    model, kept = backbone(model_type), []
    model.register_forward_hook(lambda _, arguments, outputs: kept.append(outputs.past_key_values))
    nested_states(model, padded_batch(), [4])
    assert kept == [None]


def test_m3bert_does_not_run_layers_that_nobody_reads(tiny_model):
    anatomy_of(tiny_model)  # which runs all of them, once
    for layer in tiny_model.layers[4:]:
        layer.forward = None
    assert sorted(nested_states(tiny_model, padded_batch(), [2, 4]).layers) == [2, 4]


def test_the_encoder_of_a_head_or_adapter_is_run_without_the_head(tiny_masked_lm):
    peft = pytest.importorskip("peft")
    batch = padded_batch()
    expected = nested_states(tiny_masked_lm.model, batch, [6]).layers[6]
    tiny_masked_lm.lm_head.forward = None
    assert torch.equal(nested_states(tiny_masked_lm, batch, [6]).layers[6], expected)
    adapter = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(M3BertForMaskedLM(tiny_config()).eval(), adapter)
    with torch.no_grad():
        on = nested_states(adapted, batch, [6]).layers[6]
        with adapted.disable_adapter():
            off = nested_states(adapted, batch, [6]).layers[6]
    assert not torch.allclose(on, off)


SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}


class Shifted(transformers.BertModel):
    """Adds something after the last layer, which is no norm."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state + 1
        return output


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: transformers.AlbertModel(transformers.AlbertConfig(**SMALL)),
            "AlbertModel has no list of its 4 layers, so it cannot skip any",
        ),
        (
            lambda: transformers.T5Model(transformers.T5Config(d_model=32, num_layers=4, num_heads=4, vocab_size=99)),
            "T5Model does not run on token ids and a mask alone",
        ),
        (
            lambda: Shifted(transformers.BertConfig(**SMALL)),
            "Shifted does more than one norm after its last layer, encoder.layer.3",
        ),
    ],
    ids=["albert", "t5", "shifted"],
)
def test_an_encoder_that_cannot_be_proved_is_refused_with_what_was_found(make, message):
    refused(message, nested_states, make(), padded_batch(), [4])


def test_layers_outside_the_model_are_refused():
    for layers in ([-1], [7], []):
        refused(r"must be within 0\.\.4", nested_states, backbone("bert"), padded_batch(), layers)


@pytest.mark.parametrize("model_type", [*OTHERS, "m3bert"])
def test_the_probe_finds_norms_and_the_end_of_the_layers(model_type):
    model = backbone(model_type)
    norms = {"modernbert": "final_norm", **dict.fromkeys(("eurobert", "qwen3", "gemma3_text", "m3bert"), "norm")}
    found = anatomy_of(model)
    assert found.final_norm == norms.get(model_type) and found.causal == (model_type == "qwen3")
    assert found.resumes == (model_type != "deberta-v2")  # its convolution reads the first layer's input
    ends = feed_forward_of(model)
    assert (ends.norm is not None) == (found.final_norm is None)
    assert (ends.behind is not None) == (model_type == "gemma3_text")
    gated = model_type in ("eurobert", "gemma3_text", "gte", "nomic_bert", "qwen3", "m3bert")
    assert len(ends.inner.names) == 1 + gated  # ModernBERT makes both parts with one matrix


def test_weights_that_are_not_finite_are_no_reason_to_refuse():
    model = backbone("bert")
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[0, 0] = torch.nan
    assert anatomy_of(model).final_norm is None


def naive_pooled(state: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """A text at a time: of its real tokens the mean, the first or the last."""
    rows = []
    for row, real in zip(state, mask.bool(), strict=True):
        tokens = row[real]
        rows.append({"mean": tokens.mean(0), "cls": tokens[0], "lasttoken": tokens[-1]}[pooling])
    return torch.stack(rows)


# A causal backbone has no first token that has seen the text.
POOLINGS_OF = [("mean", False), ("mean", True), ("cls", False), ("lasttoken", False), ("lasttoken", True)]


@pytest.mark.parametrize(("pooling", "causal"), POOLINGS_OF)
@pytest.mark.parametrize("side", ["right", "left"])
def test_pooling_equals_the_naive_one(pooling, causal, side):
    mask = padded_batch()["attention_mask"]
    mask = mask if side == "right" else mask.flip(1)
    state = torch.randn(4, 7, 5, requires_grad=True)
    pooled = NestedStates({3: state}, mask, causal).pooled(3, pooling)
    expected = naive_pooled(state, mask, pooling)
    torch.testing.assert_close(pooled, expected)
    weights = torch.randn(4, 5)
    actual, wanted = (torch.autograd.grad((weights * x).sum(), state)[0] for x in (pooled, expected))
    torch.testing.assert_close(actual, wanted)


def test_the_first_token_of_a_causal_backbone_is_no_embedding():
    states = NestedStates({1: torch.randn(2, 3, 4)}, torch.ones(2, 3), causal=True)
    refused("pooling='cls' reads the first token, which attends to no other", states.pooled, 1, "cls")
    model, batch = backbone("qwen3"), padded_batch()
    refused("use 'lasttoken' or 'mean'", nested_states(model, batch, [4]).pooled, 4, "cls")


def test_pooling_an_empty_text_gives_no_nan():
    """The mean of no token is 0; where a token is asked for, it is one of the padding, which is finite as well."""
    states = NestedStates({1: torch.randn(2, 3, 4)}, torch.tensor([[0, 0, 0], [1, 1, 0]]))
    assert torch.equal(states.pooled(1)[0], torch.zeros(4))
    for pooling in ("cls", "lasttoken"):
        assert torch.isfinite(states.pooled(1, pooling)).all()
    refused("pooling='max' is unknown; legal values: mean, cls, lasttoken", states.pooled, 1, "max")
    refused("pooling='anchor' is unknown", states.pooled, 1, "anchor")


def test_pooling_half_precision_is_summed_in_float32():
    state = torch.full((1, 512, 2), 1.01, dtype=torch.bfloat16)
    pooled = NestedStates({1: state}, torch.ones(1, 512)).pooled(1)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, state[:, 0].float())


def test_a_prefix_is_sliced_before_it_is_normalised():
    vectors = torch.tensor([[3.0, 4.0, 100.0]])
    torch.testing.assert_close(truncate(vectors, 2, normalize=True), torch.tensor([[0.6, 0.8]]))
    assert torch.equal(truncate(vectors, 2), vectors[:, :2])
    assert torch.equal(truncate(torch.zeros(1, 3), 2, normalize=True), torch.zeros(1, 2))
